"""Reads through a few blocks: each byte is in place, and the blocks bound the memory."""

import zlib
from unittest import mock

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchobj.checkpoint.archive import device_memory


@settings(max_examples=100)
@given(st.lists(st.integers(0, 100), max_size=20), st.booleans())
def test_reads_through_blocks_put_each_byte_in_place_within_the_memory_limit(lengths, checksum):
    source = bytes(range(256)) * 8
    targets = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    destinations = [(3 * number, target) for number, target in enumerate(targets)]
    largest, addresses = [], set()

    def read(segments):
        largest.append(sum(len(memory) for _, memory in segments))
        addresses.add(numpy.asarray(segments[0][1]).ctypes.data)
        for offset, memory in segments:
            memory[:] = memoryview(source)[offset : offset + len(memory)]
        return [zlib.crc32(memory) if checksum else 0 for _, memory in segments]

    with mock.patch.multiple(device_memory, BLOCK_BYTES=16, BLOCKS_BYTES=64):
        sums = device_memory.fill(destinations, read, lambda _: None)
    wanted = [source[offset : offset + len(target)] for offset, target in destinations]
    assert [bytes(target.numpy()) for target in targets] == wanted
    assert sums == [zlib.crc32(data) if checksum else 0 for data in wanted]
    assert max(largest, default=0) <= 16
    assert len(addresses) <= 4
