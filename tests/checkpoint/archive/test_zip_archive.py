"""The zip archive of torch.save: parsed offsets are those of torch, and damaged directories are errors."""

import io
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.saved_objects import stock
from torchobj.checkpoint.archive import zip_archive
from torchobj.exceptions import CheckpointError


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3000), max_size=12), st.sampled_from([1, 64, 4096]))
def test_payload_offsets_equal_torchs(lengths, alignment):
    config = pytest.importorskip("torch.utils.serialization.config", reason="torch 2.6 aligns to 64 always")
    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        data = stock([torch.arange(length, dtype=torch.int16) for length in lengths])
    finally:
        config.save.storage_alignment = before
    directory = zip_archive.find_directory(data[-256 << 10 :], len(data))
    records = zip_archive.records_of(data[directory.start : directory.end], directory.start)
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    assert sorted(records) == sorted(reader.get_all_records())
    for name, record in records.items():
        assert record.payload == reader.get_record_offset(name)
        local = data[record.header : record.header + zip_archive.LOCAL_HEADER_BYTES]
        assert zip_archive.payload_of(record, local) == record.payload
        assert record.stored
        content = data[record.payload : record.payload + record.size]
        assert zlib.crc32(content) == record.crc32
        assert data[record.crc32_field : record.crc32_field + 4] == record.crc32.to_bytes(4, "little")
        if record.size:
            at = zip_archive.crc32_of_descriptor(record.payload, record.size)
            assert data[at : at + 4] == record.crc32.to_bytes(4, "little")


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_directory_raises_checkpoint_error_or_parses_differently(data):
    body = bytearray(stock({"a": torch.ones(3), "b": torch.zeros(9)}))
    start = body.index(b"PK\x01\x02")
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(start, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        directory = zip_archive.find_directory(bytes(body), len(body))
        if directory is not None:
            zip_archive.records_of(bytes(body[directory.start : directory.end]), directory.start)
    except CheckpointError:
        pass
