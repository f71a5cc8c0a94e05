"""Parses the zip archive of `torch.save`: the directory, and the offsets of payloads and of their CRC-32.

Reads no store and does not import torch. A payload follows a local header, whose padding is not in the directory. But
records follow each other without gaps, so the next record's header gives the end of a payload, and thereby its start.
Readers rely on this, and read the local header with the payload to verify it.
"""

import itertools
import struct
from typing import Any, NamedTuple

from torchobj.exceptions import CheckpointError

__all__ = [
    "DESCRIPTOR_MARK",
    "LOCAL_HEADER_BYTES",
    "Directory",
    "Ends",
    "Record",
    "crc32_of_descriptor",
    "find_directory",
    "payload_of",
    "records_in",
    "records_of",
]

#: Without the name and the padding after it.
LOCAL_HEADER_BYTES = 30
#: Precedes the CRC-32 in the descriptor after a payload.
DESCRIPTOR_MARK = b"PK\x07\x08"

# APPNOTE.TXT 4.3: fields of a local header, an entry, the end, the 64-bit locator and the 64-bit end.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENTRY = struct.Struct("<4s4x2H4x3I3H8xI")
_END = struct.Struct("<4s8xIIH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END_64 = struct.Struct("<4s36xQQ")
_CRC32_IN_ENTRY = 16

_FLAG_ENCRYPTED, _FLAG_DESCRIPTOR = 1, 8
_LIMIT_32 = 0xFFFFFFFF
_EXTRA_64 = 1


class Directory(NamedTuple):
    """The central directory of an archive: bytes `start..end` of the file."""

    start: int
    end: int


class Record(NamedTuple):
    """A file of an archive; its name is without the archive's top folder."""

    name: str
    header: int
    """Offset of its local header."""
    payload: int
    """Offset of its bytes, if records follow each other without gaps."""
    size: int
    """Size in bytes, after decompression."""
    crc32: int
    """0 if it was not computed."""
    crc32_field: int
    """Offset of the CRC-32 in the directory."""
    stored: bool
    """Whether it is neither compressed nor encrypted."""


def find_directory(tail: Any, size: int) -> Directory | None:
    """Finds the directory by the last bytes of a file of `size` bytes; None if they are not the end of a zip archive.

    Raises:
        CheckpointError: The end of the archive is damaged.
    """
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        return None
    _, length, start, _ = _END.unpack_from(tail, at)
    base = size - len(tail)
    end = base + at
    if at >= _LOCATOR.size:
        mark, end_64 = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        if mark == b"PK\x06\x07":
            if not base <= end_64 <= base + at - _LOCATOR.size - _END_64.size:
                raise CheckpointError("the archive's end is damaged")
            mark, length, start = _END_64.unpack_from(tail, end_64 - base)
            end = end_64
            if mark != b"PK\x06\x06":
                raise CheckpointError("the archive's end is damaged")
    if start + length > end:
        raise CheckpointError("the archive's directory extends beyond its end")
    return Directory(start, start + length)


def records_in(tail: Any, size: int) -> dict[str, Record]:
    """Returns the records of an archive of `size` bytes, by name, if its last bytes contain the whole directory.

    Raises:
        CheckpointError: They do not contain it, or it is damaged.
    """
    directory, base = find_directory(tail, size), size - len(tail)
    if directory is None or directory.start < base:
        raise CheckpointError("the archive's directory is not at its end")
    return records_of(tail[directory.start - base : directory.end - base], directory.start)


def records_of(directory: Any, start: int) -> dict[str, Record]:
    """Returns the records of an archive, by name, from the bytes of its directory, which starts at `start`.

    Raises:
        CheckpointError: The directory is damaged, or has two records of one name, of which readers choose different
            ones.
    """
    entries: list[tuple[int, str, int, int, int, bool, int]] = []
    at, folder = 0, None
    while at < len(directory):
        if at + _ENTRY.size > len(directory):
            raise CheckpointError("the archive's directory is truncated")
        mark, flags, method, crc32, packed, size, name_bytes, extra_bytes, comment_bytes, header = _ENTRY.unpack_from(
            directory, at
        )
        name_at, extra_at = at + _ENTRY.size, at + _ENTRY.size + name_bytes
        end = extra_at + extra_bytes + comment_bytes
        if mark != b"PK\x01\x02" or end > len(directory):
            raise CheckpointError("the archive's directory is damaged")
        if _LIMIT_32 in (size, packed, header):
            size, packed, header = _large(directory[extra_at : extra_at + extra_bytes], size, packed, header)
        name = directory[name_at:extra_at].decode("utf-8", "replace")
        if folder is None:
            folder = name.partition("/")[0] + "/" if "/" in name else ""
        stored = method == 0 and packed == size and not flags & _FLAG_ENCRYPTED
        # As miniz writes it: with 64-bit sizes if the size or the offset of the record needs them.
        descriptor_bytes = 24 if header >= _LIMIT_32 or size >= _LIMIT_32 else 16
        length = packed + (descriptor_bytes if flags & _FLAG_DESCRIPTOR else 0)
        entries.append((header, name.removeprefix(folder), size, crc32, start + at, stored, length))
        at = end
    entries.sort()
    records = {}
    for entry, after in itertools.zip_longest(entries, entries[1:]):
        header, name, size, crc32, entry_at, stored, length = entry
        payload = (after[0] if after else start) - length
        if name in records:
            raise CheckpointError(f"the archive has two records {name!r}: readers choose different ones; save it again")
        records[name] = Record(name, header, payload, size, crc32, entry_at + _CRC32_IN_ENTRY, stored)
    return records


def payload_of(record: Record, local_header: Any) -> int:
    """Returns the offset of a record's bytes, from its local header.

    Raises:
        CheckpointError: This is not a local header.
    """
    mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local_header)
    if mark != b"PK\x03\x04":
        raise CheckpointError(f"{record.name}: there is no record at byte {record.header}")
    padded: int = name_bytes + extra_bytes
    return record.header + LOCAL_HEADER_BYTES + padded


class Ends(NamedTuple):
    """The first and the last bytes of an archive. The first may be the whole archive."""

    head: Any
    tail: Any
    size: int
    """Size of the archive in bytes."""

    def at(self, start: int, length: int) -> Any | None:
        """Returns bytes of the archive; None if they are in neither end."""
        for end, offset in ((self.head, 0), (self.tail, self.size - len(self.tail))):
            if offset <= start and start + length <= offset + len(end):
                return end[start - offset : start - offset + length]
        return None

    def records(self) -> dict[str, Record]:
        """Returns the records of the directory; none if it is damaged or not whole in the last bytes."""
        try:
            return records_in(self.tail or self.head, self.size)
        except CheckpointError:
            return {}

    def content_of(self, record: Record) -> tuple[int, Any | None] | None:
        """Returns the offset of a record's bytes, and the bytes if they are in an end; None without its header."""
        header = self.at(record.header, LOCAL_HEADER_BYTES)
        try:
            start = None if header is None else payload_of(record, header)
        except CheckpointError:
            return None
        return None if start is None else (start, self.at(start, record.size))


def crc32_of_descriptor(payload: int, size: int) -> int:
    """Returns the offset of the CRC-32 in the descriptor after a payload."""
    return payload + size + len(DESCRIPTOR_MARK)


def _large(extra: Any, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Returns the three numbers; those that exceed 32 bits are in the entry's extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _EXTRA_64:
            if at + 4 + length // 8 * 8 > len(extra):
                raise CheckpointError("the archive's directory is damaged")
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size, packed, header = (
                next(values, _LIMIT_32) if value == _LIMIT_32 else value for value in (size, packed, header)
            )
            break
        at += 4 + length
    return size, packed, header
