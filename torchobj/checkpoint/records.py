"""The records of a `.pt` file in a store: its directory fetched, payloads read in parallel and checked."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from torchobj.checkpoint.archive import LOCAL_HEADER_BYTES, Record, find_directory, payload_of, records_of
from torchobj.checkpoint.ranges import RangedObject
from torchobj.exceptions import CheckpointError, IntegrityError

__all__ = ["NotPlannableError", "Records", "Want", "check"]

#: How the first of the pickles of a file of torch before 1.6 ends: its magic number (torch/serialization.py).
_LEGACY_MAGIC = bytes.fromhex("8a0a6cfc9c46f9206aa85019")


#: How files begin that are mistaken for those of torch.save, and what they are.
_BEGINNINGS = (
    (b"\x93NUMPY", "an array of numpy: read it by numpy.load"),
    (b"\x89HDF\r\n", "an HDF5 file: read it by h5py"),
    (b"GGUF", "a GGUF file of llama.cpp"),
    (b"PAR1", "a Parquet file"),
    (b"\x1f\x8b", "compressed by gzip: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: decompress it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"<?xml", "XML, as the error of a server: was it downloaded by a request that failed?"),
    (b"<!DOCTYPE", "HTML: was it downloaded from a page in place of the file?"),
    (b"<html", "HTML: was it downloaded from a page in place of the file?"),
    (b"version https://git-lfs", "a pointer of Git LFS: fetch the file itself by git lfs pull"),
)
#: The largest header that safetensors reads.
_SAFETENSORS_HEADER = 100_000_000


class NotPlannableError(CheckpointError):
    """A file that `torch.load` may read, but nobody by ranges."""


class Want(NamedTuple):
    """Bytes of a record, and where they belong."""

    record: Record
    start: int
    """From the record's first byte."""
    memory: Any
    """Writable and contiguous; its length says how many."""


class Records:
    """The records of a checkpoint.

    Args:
        file: The object.

    Raises:
        CheckpointError: It is no checkpoint, or a damaged one.
        NotPlannableError: It is a checkpoint that `torch.load` must read.
    """

    def __init__(self, file: RangedObject) -> None:
        self._file = file
        self.by_name = _directory_of(file)
        self._payloads: dict[str, int] = {}
        if "constants.pkl" in self.by_name:
            raise NotPlannableError("it is a TorchScript archive")
        if "data.pkl" not in self.by_name:
            raise CheckpointError(f"it is {_archive_of(self.by_name)}, but not one of torch.save: it has no data.pkl")
        if not all(record.stored for record in self.by_name.values()):
            raise NotPlannableError("its records are compressed")

    @property
    def url(self) -> str:
        """The object's URL."""
        return self._file.url

    def whole(self, name: str, *, verify: bool) -> bytes | None:
        """The bytes of a small record, None if there is none of this name.

        Raises:
            IntegrityError: They are not those that were saved.
        """
        record = self.by_name.get(name)
        if record is None:
            return None
        memory = bytearray(record.size)
        self.read([Want(record, 0, memory)])
        if verify:
            check(self.url, name, record, crc32(memory))
        return bytes(memory)

    def locate(self, records: Iterable[Record]) -> None:
        """Fetches the local headers of records, so that `offset_of` knows."""
        self._read_headers([record for record in records if record.name not in self._payloads], [])

    def offset_of(self, record: Record) -> int:
        """Where a located record's bytes begin in the object."""
        return self._payloads[record.name]

    def read_at(self, segments: Sequence[tuple[int, Any]]) -> None:
        """Reads (offset in the object, memory) pairs."""
        self._file.read_into(segments)

    def read(self, wants: Sequence[Want], *, checksum: bool = False) -> list[int]:
        """Reads bytes of records, all in parallel, straight into their memory; local headers come along.

        Returns:
            The CRC-32 of each, in their order; nothing where none was asked for.

        Raises:
            CheckpointError: The archive is damaged.
        """
        wants = [want for want in wants if want.record.size] if not checksum else list(wants)
        segments = [
            (self._payloads.get(want.record.name, want.record.payload) + want.start, want.memory) for want in wants
        ]
        new = {want.record.name: want.record for want in wants if want.record.name not in self._payloads}
        sums = self._read_headers(list(new.values()), segments, checksum=checksum)
        moved = [n for n, want in enumerate(wants) if segments[n][0] != self.offset_of(want.record) + want.start]
        if moved:
            # Records with something between them: no archive that torch writes, but one that it reads.
            again = [(self.offset_of(wants[n].record) + wants[n].start, wants[n].memory) for n in moved]
            for n, value in zip(moved, self._file.read_into(again, checksum=checksum), strict=False):
                sums[n] = value
        return sums

    def _read_headers(
        self, records: list[Record], segments: list[tuple[int, Any]], *, checksum: bool = False
    ) -> list[int]:
        """Reads local headers, and segments besides, whose CRC-32 it returns."""
        headers = memoryview(bytearray(LOCAL_HEADER_BYTES * len(records)))
        places = [headers[at : at + LOCAL_HEADER_BYTES] for at in range(0, len(headers), LOCAL_HEADER_BYTES)]
        along = [(record.header, place) for record, place in zip(records, places, strict=True)]
        sums = self._file.read_into([*segments, *along], checksum=checksum)
        for record, place in zip(records, places, strict=True):
            payload = payload_of(record, bytes(place))
            if payload + record.size > self._file.size:
                raise CheckpointError(f"{record.name}: it ends behind the object's end")
            self._payloads[record.name] = payload
        return sums[: len(segments)]


def check(url: str, name: str, record: Record, value: int) -> None:
    """Compares a CRC-32 with the directory's; 0 there means that none was computed.

    Raises:
        IntegrityError: They differ.
    """
    if record.crc32 not in (0, value):
        raise IntegrityError(
            f"{url}: {name}: the CRC-32 of its {record.size} bytes is {value:08x}, the file says {record.crc32:08x}: "
            "they are not what was saved"
        )


def _directory_of(file: RangedObject) -> dict[str, Record]:
    head, tail = file.head(), file.tail()
    if not head:
        raise CheckpointError("it is empty")
    if not head.startswith(b"PK\x03\x04"):
        if _LEGACY_MAGIC in head[:64]:
            raise NotPlannableError("it has the format of torch before 1.6")
        raise CheckpointError(f"it is no file of torch.save{_appearance(head, file.size)}")
    directory = find_directory(tail, file.size)
    if directory is None:
        raise CheckpointError("it is an archive without an end: cut off, or damaged")
    try:
        records = records_of(bytes(file.read(*directory)), directory.start)
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError("the archive's directory is damaged") from error
    for record in records.values():
        end = record.payload + record.size if record.stored else record.payload
        if not record.header + LOCAL_HEADER_BYTES <= record.payload <= end <= directory.start:
            raise CheckpointError("the archive's directory is damaged")
    return records


def _archive_of(names: Iterable[str]) -> str:
    """What a zip archive is, by the names of its records."""
    found = sorted(names)
    if found and all(name.endswith(".npy") for name in found):
        return "a zip archive of numpy arrays, to be read by numpy.load"
    return f"a zip archive of {len(found)} records ({', '.join(found[:3])})" if found else "an empty zip archive"


def _appearance(head: bytes, size: int) -> str:
    """What a file looks like that begins like this, for an error; nothing where that is not known."""
    header_bytes = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= header_bytes <= min(_SAFETENSORS_HEADER, size - 8):
        return "; it looks like safetensors: read it by safetensors.torch.load(torchobj.open(url).read())"
    # A pickle of protocol 2 or later begins with its number.
    if head[:1] == b"\x80" and head[1:2] <= b"\x05" and len(head) > 2:
        hint = "pickle.load(torchobj.open(url)) reads it, and runs what it names: only for a file that you trust"
        return f"; it looks like a plain pickle: {hint}"
    if head[257:262] == b"ustar":
        return "; it looks like a tar archive"
    for beginning, what in _BEGINNINGS:
        if head.startswith(beginning):
            return f"; it looks like {what}"
    if head.lstrip()[:1] in (b"{", b"["):
        return "; it looks like JSON"
    return ""
