"""Reads the records of a `.pt` file from a store in parallel, into memory of any device, and verifies their CRC-32."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch

from torchobj import _torchobj
from torchobj.checkpoint.archive import device_memory
from torchobj.checkpoint.archive.zip_archive import (
    LOCAL_HEADER_BYTES,
    Ends,
    Record,
    find_directory,
    payload_of,
    records_of,
)
from torchobj.exceptions import CheckpointError, IntegrityError
from torchobj.ranks.shared_read.destinations import destination_of, fill
from torchobj.ranks.shared_read.reads import Reads, read_alone
from torchobj.store.tensor_memory import memory_of
from torchobj.store.transfers import ByteProgress

__all__ = ["NotPlannableError", "RecordRange", "Records"]

logger = logging.getLogger("torchobj")

#: Last bytes of the first pickle of a file of torch before 1.6: its magic number (torch/serialization.py).
_LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa85019")

#: First bytes of files that are often confused with those of torch.save, and a description for the error.
_SIGNATURES = (
    (b"\x93NUMPY", "a numpy array: read it with numpy.load"),
    (b"\x89HDF\r\n", "an HDF5 file: read it with h5py"),
    (b"GGUF", "a GGUF file of llama.cpp"),
    (b"PAR1", "a Parquet file"),
    (b"\x1f\x8b", "a file compressed with gzip: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "a file compressed with zstd: decompress it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"<?xml", "XML, such as the error response of a server: check how it was downloaded"),
    (b"<!DOCTYPE", "HTML: check whether a web page was downloaded instead of the file"),
    (b"<html", "HTML: check whether a web page was downloaded instead of the file"),
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file with git lfs pull"),
)
#: Maximum header length that safetensors accepts.
_SAFETENSORS_HEADER_BYTES = 100_000_000

#: Length of the prefix and of the suffix that are fetched first. Most pickles and directories fit, as do small files.
_END_BYTES = 256 << 10


class NotPlannableError(CheckpointError):
    """`torch.load` may be able to read the file, but range reads cannot."""


class RecordRange(NamedTuple):
    """Part of a record, and the memory that it is read into."""

    record: Record
    start: int
    """Offset from the first byte of the record."""
    target: torch.Tensor
    """Uint8 tensor of shape (nbytes,), on any device."""
    label: str
    """Name of the tensor, for errors."""


class Records:
    """The records of one version of a `.pt` file. Two parallel requests fetch the file's prefix and suffix.

    Args:
        store, key: The object.
        url: Its URL, for messages.
        reads: How the ranges of `read` are read; everything else is read alone.

    Raises:
        CheckpointError: The file is not a checkpoint, or is damaged.
        NotPlannableError: Only `torch.load` can read the file.
        StoreError: The object cannot be read.
    """

    def __init__(self, store: "_torchobj.NativeStore", key: str, url: str, reads: Reads = read_alone) -> None:
        self.url = url
        self._store, self._key, self._reads = store, key, reads
        head, tail, size, self._version = store.get_ends(key, _END_BYTES, _END_BYTES)
        self._ends = Ends(memoryview(head), memoryview(tail), size)
        self.by_name = self._read_directory()
        #: Offset of the payload of each record whose local header was read.
        self._payloads: dict[str, int] = {}
        if "constants.pkl" in self.by_name:
            raise NotPlannableError("it is a TorchScript archive")
        if "data.pkl" not in self.by_name:
            raise CheckpointError(f"it is {_describe_zip(self.by_name)}, not a file of torch.save: it has no data.pkl")
        if not all(record.stored for record in self.by_name.values()):
            raise NotPlannableError("its records are compressed")

    def get(self, name: str, *, verify: bool) -> bytes | None:
        """Returns the bytes of a small record; None if there is no record with this name.

        Raises:
            IntegrityError: The CRC-32 differs from the directory's.
        """
        record = self.by_name.get(name)
        if record is None:
            return None
        target = device_memory.bytes_of(device_memory.storage_of(record.size))
        self.read([RecordRange(record, 0, target, name)], verify=verify, counted=ByteProgress(None))
        return bytes(memory_of(target))

    def read(self, ranges: Sequence[RecordRange], *, verify: bool, counted: ByteProgress) -> None:
        """Reads ranges in parallel, directly into memory on the CPU, and through a few blocks to other devices.

        Args:
            ranges: What to read; whole records if `verify`.
            verify: Whether to compare the CRC-32 of each record with the directory's, unless the directory has none.
            counted: Receives the number of bytes that have arrived.

        Raises:
            CheckpointError: The archive is damaged.
            IntegrityError: A CRC-32 differs.
        """
        ranges = [part for part in ranges if part.record.size or verify]
        direct = [part for part in ranges if self._reads.reaches(part.target.device)]
        staged = [part for part in ranges if not self._reads.reaches(part.target.device)]
        counted.expect(sum(len(part.target) for part in ranges))
        sums = self._read_directly(direct, (part.record for part in staged), checksum=verify, counted=counted)
        if staged:
            destinations = [(self._offset(part), part.target) for part in staged]
            sums += device_memory.fill(
                destinations,
                functools.partial(self._read_into, checksum=verify),
                counted.add,
            )
        if verify:
            for part, value in zip([*direct, *staged], sums, strict=True):
                self._verify(part, value)

    def _verify(self, part: RecordRange, value: int) -> None:
        record = part.record
        if record.crc32 not in (0, value):
            raise IntegrityError(
                f"{self.url}: {part.label}: the CRC-32 of its {record.size} bytes is {value:08x}, but the file's "
                f"directory has {record.crc32:08x}: the bytes differ from what was saved"
            )
        if record.size and not record.crc32:
            logger.debug("%s: %s: not verified: the file has no CRC-32 for it", self.url, record.name)

    def _offset(self, part: RecordRange) -> int:
        """Returns the offset of a range in the object; without gaps until its local header was read."""
        return self._payloads.get(part.record.name, part.record.payload) + part.start

    def _read_directly(
        self,
        ranges: Sequence[RecordRange],
        others: Iterable[Record],
        *,
        checksum: bool,
        counted: ByteProgress,
    ) -> list[int]:
        """Reads into memory on the CPU, and along with it the local headers of these records and of others."""
        segments = [(self._offset(part), destination_of(part.target)) for part in ranges]
        new = {record.name: record for record in (*(part.record for part in ranges), *others)}
        headers = [(new[name], bytearray(LOCAL_HEADER_BYTES)) for name in new if name not in self._payloads]
        headed = [*segments, *((record.header, data) for record, data in headers)]
        sums = self._read_into(headed, self._reads, checksum=checksum, arrived=counted.arrived)
        counted.add(sum(len(part.target) for part in ranges))
        for record, data in headers:
            payload = payload_of(record, data)
            if payload + record.size > self._ends.size:
                raise CheckpointError(f"{record.name}: it ends beyond the end of the object")
            self._payloads[record.name] = payload
        # Gaps between records: torch does not write such archives, but reads them.
        moved = {
            number: (self._offset(part), memory)
            for number, (part, (offset, memory)) in enumerate(zip(ranges, segments, strict=True))
            if offset != self._offset(part)
        }
        for number, value in zip(moved, self._read_into(list(moved.values()), checksum=checksum), strict=True):
            sums[number] = value
        return sums[: len(segments)]

    def _read_into(
        self,
        segments: Sequence[tuple[int, Any]],
        reads: Reads = read_alone,
        *,
        checksum: bool = False,
        arrived: Callable[[int], object] | None = None,
    ) -> list[int]:
        """Reads (offset in the object, writable contiguous memory) pairs; the CRC-32 of each, 0 without `checksum`.

        Raises:
            RangeError: A segment ends beyond the end of the object.
            ObjectChangedError: The object was replaced.
        """
        sums = [0] * len(segments)
        remote = []
        for number, (offset, memory) in enumerate(segments):
            fetched = self._ends.at(offset, len(memory))
            if fetched is None:
                remote.append(number)
            else:
                fill(memory, fetched)
                sums[number] = crc32(fetched) if checksum else 0
        if remote:
            job = (self._store, self._key, self._version, [segments[number] for number in remote])
            [remote_sums] = reads.read([job], checksum=checksum, arrived=arrived)
            if checksum:
                for number, value in zip(remote, remote_sums, strict=True):
                    sums[number] = value
        return sums

    def _read_directory(self) -> dict[str, Record]:
        head, size = bytes(self._ends.head), self._ends.size
        if not head:
            raise CheckpointError("it is empty")
        if not head.startswith(b"PK\x03\x04"):
            if _LEGACY_MAGIC in head[:64]:
                raise NotPlannableError("it has the format of torch before 1.6")
            raise CheckpointError(f"it is not a file of torch.save{_describe(head, size)}")
        directory = find_directory(bytes(self._ends.tail), size)
        if directory is None:
            raise CheckpointError("it is an archive without an end: truncated or damaged")
        data = bytearray(directory.end - directory.start)
        self._read_into([(directory.start, data)])
        records = records_of(bytes(data), directory.start)
        for record in records.values():
            end = record.payload + record.size if record.stored else record.payload
            if not record.header + LOCAL_HEADER_BYTES <= record.payload <= end <= directory.start:
                raise CheckpointError("the archive's directory is damaged")
        return records


def _describe_zip(names: Iterable[str]) -> str:
    """Describes a zip archive by the names of its records."""
    found = sorted(names)
    if found and all(name.endswith(".npy") for name in found):
        return "a zip archive of numpy arrays, to be read with numpy.load"
    return f"a zip archive of {len(found)} records ({', '.join(found[:3])})" if found else "an empty zip archive"


def _describe(head: bytes, size: int) -> str:
    """Describes a file by its first bytes, for an error; empty if the format is unknown."""
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= header_bytes <= min(_SAFETENSORS_HEADER_BYTES, size - 8):
        return "; it looks like safetensors: pass format='safetensors'"
    # A pickle of protocol 2 or later starts with the protocol number.
    if head[:1] == b"\x80" and head[1:2] <= b"\x05" and len(head) > 2:
        hint = "pickle.load(torchobj.open(url)) reads it and runs code that it names: use it for trusted files only"
        return f"; it looks like a plain pickle: {hint}"
    if head[257:262] == b"ustar":
        return "; it looks like a tar archive"
    for signature, what in _SIGNATURES:
        if head.startswith(signature):
            return f"; it looks like {what}"
    if head.lstrip()[:1] in (b"{", b"["):
        return "; it looks like JSON"
    return ""
