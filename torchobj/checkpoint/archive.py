"""The zip layout of `torch.save`: its directory, where payloads lie, where their CRC-32 stand.

Reads nothing, knows no torch. A payload follows a local header, whose padding the directory does not know. But records
follow each other without a gap, so the end of a payload is known from the next record's header, and with it its start.
A reader fetches by this and compares with the local header, which it fetches along.
"""

import itertools
import struct
from typing import NamedTuple

from torchobj.exceptions import CheckpointError

__all__ = [
    "LOCAL_HEADER_BYTES",
    "Directory",
    "Record",
    "crc32_of_descriptor",
    "find_directory",
    "payload_of",
    "records_of",
]

#: Without the name and the padding behind it.
LOCAL_HEADER_BYTES = 30

# APPNOTE.TXT 4.3: the fields that are used of an entry, of the end, and of the end and its locator with 64 bits.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENTRY = struct.Struct("<4s4x2H4x3I3H8xI")
_END = struct.Struct("<4s8xIIH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END_64 = struct.Struct("<4s36xQQ")
_CRC32_IN_ENTRY, _CRC32_IN_DESCRIPTOR = 16, 4

_FLAG_ENCRYPTED, _FLAG_DESCRIPTOR = 1, 8
_LIMIT_32 = 0xFFFFFFFF
_EXTRA_64 = 1


class Directory(NamedTuple):
    """Where the central directory of an archive lies: bytes `start..end` of the file."""

    start: int
    end: int


class Record(NamedTuple):
    """A file of an archive, by its name there without the archive's own folder."""

    name: str
    header: int
    """Where its local header begins."""
    payload: int
    """Where its bytes begin, if records follow each other without a gap."""
    size: int
    """Bytes; those of the file, where it is compressed."""
    crc32: int
    """0 where it was not computed, or is 0."""
    crc32_field: int
    """Where the directory holds the CRC-32."""
    stored: bool
    """Whether its bytes stand in the archive as they are: neither compressed nor encrypted."""


def find_directory(tail: bytes, size: int) -> Directory | None:
    """Where the directory lies, by the last bytes of a file of `size` bytes; None where these are not the end of a zip.

    Raises:
        CheckpointError: An end that points behind itself, or is not whole.
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
        raise CheckpointError("the archive's directory lies behind its end")
    return Directory(start, start + length)


def records_of(directory: bytes, start: int) -> dict[str, Record]:
    """The records of an archive, by name, by the bytes of its directory, which begins at `start`.

    Raises:
        CheckpointError: The directory is damaged.
    """
    entries: list[tuple[int, str, int, int, int, bool, int]] = []
    at, folder = 0, None
    while at < len(directory):
        if at + _ENTRY.size > len(directory):
            raise CheckpointError("the archive's directory is cut off")
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
        descriptor = _descriptor_bytes(header, size) if flags & _FLAG_DESCRIPTOR else 0
        entries.append((header, name.removeprefix(folder), size, crc32, start + at, stored, packed + descriptor))
        at = end
    entries.sort()
    records = {}
    for entry, after in itertools.zip_longest(entries, entries[1:]):
        header, name, size, crc32, entry_at, stored, length = entry
        payload = (after[0] if after else start) - length
        records[name] = Record(name, header, payload, size, crc32, entry_at + _CRC32_IN_ENTRY, stored)
    return records


def payload_of(record: Record, local_header: bytes) -> int:
    """Where a record's bytes begin, by its local header.

    Raises:
        CheckpointError: This is no local header.
    """
    mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local_header)
    if mark != b"PK\x03\x04":
        raise CheckpointError(f"{record.name}: no record begins at byte {record.header}")
    padded: int = name_bytes + extra_bytes
    return record.header + LOCAL_HEADER_BYTES + padded


def crc32_of_descriptor(payload: int, size: int) -> int:
    """Where the CRC-32 stands in the descriptor behind a payload."""
    return payload + size + _CRC32_IN_DESCRIPTOR


def _descriptor_bytes(header: int, size: int) -> int:
    """As miniz writes it: with sizes of 64 bits where the record, or where it lies, needs them."""
    return 24 if header >= _LIMIT_32 or size >= _LIMIT_32 else 16


def _large(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """The three numbers, those that do not fit into 32 bits by the entry's extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _EXTRA_64:
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size, packed, header = (
                next(values, _LIMIT_32) if value == _LIMIT_32 else value for value in (size, packed, header)
            )
            break
        at += 4 + length
    return size, packed, header
