"""An object whose start is read in one request, and ranges of such objects, read into memory of any device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchobj import _torchobj
from torchobj.checkpoint.archive import device_memory
from torchobj.checkpoint.safetensors import header
from torchobj.exceptions import CheckpointError, RangeError
from torchobj.ranks.shared_read.destinations import destination_of, fill
from torchobj.ranks.shared_read.reads import Reads, read_alone
from torchobj.store.transfers import ByteProgress

__all__ = ["SafetensorsFile", "StartedObject", "TensorRead", "read"]

#: Number of bytes that are read first. Most headers fit: that of 4,000 tensors.
_FIRST_BYTES = 512 << 10

#: The first bytes of larger files, in units of `_FIRST_BYTES`, are read again with their tensors rather than kept.
_KEPT_RATIO = 16


class StartedObject:
    """One version of an object, whose first bytes are in memory.

    Args:
        store, key: The object.
        url: Its URL, for messages.

    Raises:
        StoreError: The object cannot be read.
    """

    def __init__(self, store: "_torchobj.NativeStore", key: str, url: str) -> None:
        self.url = url
        self._store, self._key = store, key
        self._version: str | None = None
        first = bytearray(_FIRST_BYTES)
        try:
            [(self._version, self.size, _)] = _torchobj.scatter([(store, key, None, [(0, first)])], checksum=False)
            self._first = memoryview(first)
        except RangeError:
            # It is smaller.
            small, _, self.size, self._version = store.get_ends(key, _FIRST_BYTES, 1)
            self._first = memoryview(small)

    @property
    def version(self) -> str | None:
        """The version that is read."""
        return self._version

    def start(self, length: int) -> bytes:
        """Returns the first `length` bytes; all of a smaller object."""
        data = bytearray(min(length, self.size))
        self.read_into([(0, data)])
        return bytes(data)

    def remaining(self, segments: Sequence[tuple[int, Any]]) -> Any:
        """Copies what was read already into its (offset, writable memory) pairs; returns a job for the other ones."""
        missing = []
        for offset, memory in segments:
            if offset + len(memory) > len(self._first):
                missing.append((offset, memory))
            else:
                fill(memory, self._first[offset : offset + len(memory)])
        return self._store, self._key, self._version, missing

    def read_into(self, segments: Sequence[tuple[int, Any]]) -> list[int]:
        """Reads (offset, writable memory) pairs. Returns a 0 for each, in place of the CRC-32.

        Raises:
            ObjectChangedError: The object was replaced.
        """
        job = self.remaining(segments)
        if job[-1]:
            _torchobj.scatter([job], checksum=False)
        return [0] * len(segments)


class SafetensorsFile(StartedObject):
    """One version of a file of safetensors.

    Raises:
        CheckpointError: The object is not a file of safetensors, or is damaged.
        StoreError: The object cannot be read.
    """

    def __init__(self, store: "_torchobj.NativeStore", key: str, url: str) -> None:
        super().__init__(store, key, url)
        try:
            end = header.header_end(self.start(header.LENGTH_BYTES), self.size)
            parsed = header.parse(self.start(end), self.size)
        except CheckpointError as error:
            raise CheckpointError(f"{url}: {error}") from None
        if self.size > _KEPT_RATIO * _FIRST_BYTES:
            self._first = memoryview(b"")
        self.metadata = parsed.metadata
        #: By name, in the order of their bytes.
        self.tensors = {tensor.name: tensor for tensor in parsed.tensors}


class TensorRead(NamedTuple):
    """A tensor of a file, and the memory that it is read into."""

    file: SafetensorsFile
    start: int
    """Offset of its first byte in the file."""
    target: torch.Tensor
    """Uint8 tensor of shape (nbytes,), on any device."""


def read(tensors: Sequence[TensorRead], counted: ByteProgress, reads: Reads = read_alone) -> None:
    """Reads tensors in parallel, directly into memory on the CPU, and through a few blocks to other devices.

    Args:
        tensors: What to read; targets do not overlap.
        counted: Receives the number of bytes that have arrived.
        reads: Whether other ranks read together with this one.

    Raises:
        ObjectChangedError: A file was replaced after its header was read.
        StoreError: A file cannot be read.
    """
    direct: dict[SafetensorsFile, list[tuple[int, Any]]] = {}
    staged: dict[SafetensorsFile, list[tuple[int, torch.Tensor]]] = {}
    direct_bytes = 0
    for file, start, target in tensors:
        if not len(target):
            continue
        counted.expect(len(target))
        if reads.reaches(target.device):
            direct.setdefault(file, []).append((start, destination_of(target)))
            direct_bytes += len(target)
        else:
            staged.setdefault(file, []).append((start, target))
    jobs = [job for file, segments in direct.items() if (job := file.remaining(segments))[-1]]
    if jobs:
        reads.read(jobs, checksum=False, arrived=counted.arrived)
    counted.add(direct_bytes)
    for file, destinations in staged.items():
        device_memory.fill(destinations, file.read_into, counted.add)
