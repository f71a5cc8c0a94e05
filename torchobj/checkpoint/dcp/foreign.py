"""Items that others framed: where in such an archive the payload lies, and whether its sums are right."""

import struct
import zlib
from typing import NamedTuple

from torchobj.exceptions import IntegrityError

__all__ = ["END_BYTES", "Payload", "check_archive", "payload_in"]

#: So much of both ends of an archive is looked at: the records before a payload, and the directory.
END_BYTES = 4096

_LOCAL = struct.Struct("<4s22x2H")
_ENTRY = struct.Struct("<4s6xH4xI2I3H8xI")
_END = struct.Struct("<4s6xH2IH")
_LOCATOR = struct.Struct("<4s4xQ4x")
_LARGE = 0xFFFF_FFFF


class _Record(NamedTuple):
    """A record of an archive, as its directory has it."""

    name: str
    is_stored: bool
    crc32: int
    size: int
    offset: int
    """Where its header begins."""


class Payload(NamedTuple):
    """Where an archive has a tensor's memory."""

    offset: int
    """From the archive's start."""
    crc32: int
    """0: was not taken."""


class _Ends:
    """The first and the last bytes of an archive."""

    def __init__(self, head: bytes, tail: bytes, length: int) -> None:
        self._head, self._tail, self._length = head, tail, length

    def at(self, start: int, length: int) -> bytes | None:
        """Bytes of the archive; None where they were not read."""
        if start < 0 or start + length > self._length:
            return None
        if start + length <= len(self._head):
            return self._head[start : start + length]
        start -= self._length - len(self._tail)
        return self._tail[start : start + length] if start >= 0 else None

    def records(self) -> list[_Record] | None:
        """What the directory has; None where it cannot be read."""
        end = self.at(self._length - _END.size, _END.size)
        if end is None or not end.startswith(b"PK\x05\x06"):
            return None
        _, count, size, offset, _ = _END.unpack(end)
        if offset == _LARGE:
            locator = self.at(self._length - _END.size - _LOCATOR.size, _LOCATOR.size)
            end64_offset = _LOCATOR.unpack(locator)[1] if locator else -1
            end64 = self.at(end64_offset, 56)
            if end64 is None:
                return None
            offset = struct.unpack_from("<Q", end64, 48)[0]
        directory = self.at(offset, size)
        return None if directory is None else _entries(directory, count)

    def content_of(self, record: _Record) -> tuple[int, bytes | None] | None:
        """Where a record's bytes begin, and the bytes where they were read; None where its header was not."""
        header = self.at(record.offset, _LOCAL.size)
        if header is None or not header.startswith(b"PK\x03\x04"):
            return None
        _, name_length, extra_length = _LOCAL.unpack(header)
        start = record.offset + _LOCAL.size + name_length + extra_length
        return start, self.at(start, record.size)


def _entries(directory: bytes, count: int) -> list[_Record] | None:
    records, position = [], 0
    for _ in range(count):
        if len(directory) < position + _ENTRY.size:
            return None
        mark, method, crc32, packed, size, name_length, extra_length, comment, offset = _ENTRY.unpack_from(
            directory, position
        )
        if mark != b"PK\x01\x02":
            return None
        position += _ENTRY.size
        name = directory[position : position + name_length].decode("utf-8", "replace")
        extra = directory[position + name_length : position + name_length + extra_length]
        position += name_length + extra_length + comment
        # zip64: what does not fit its field stands here, in this order.
        large = list(struct.unpack_from(f"<{(len(extra) - 4) // 8}Q", extra, 4)) if extra.startswith(b"\1\0") else []
        if size == _LARGE and large:
            size = large.pop(0)
        if packed == _LARGE and large:
            packed = large.pop(0)
        if offset == _LARGE and large:
            offset = large.pop(0)
        records.append(_Record(name, method == 0 and packed == size, crc32, size, offset))
    return records


def payload_in(head: bytes, tail: bytes, length: int, pickle: bytes, payload_bytes: int) -> Payload | None:
    """Where an archive has the memory of its one tensor.

    Args:
        head, tail: Its first and last `END_BYTES`, or all of it.
        length: Of the archive.
        pickle: What it pickles, if it is the tensor that was expected.
        payload_bytes: How large that is.

    Returns:
        None where it holds something else than that tensor, or is laid out otherwise.
    """
    ends = _Ends(head, tail, length)
    records = {record.name.partition("/")[2]: record for record in ends.records() or []}
    pickled, data = records.get("data.pkl"), records.get("data/0")
    if pickled is None or data is None or not data.is_stored or data.size != payload_bytes:
        return None
    found, payload = ends.content_of(pickled), ends.content_of(data)
    if found is None or payload is None or found[1] != pickle:
        return None
    order = records.get("byteorder")
    if order is not None and (ends.content_of(order) or (0, None))[1] != b"little":
        return None
    return Payload(payload[0], data.crc32)


def check_archive(content: bytes | bytearray, name: str) -> None:
    """Checks the sums of all records of an archive; what is no archive, and a sum that was not taken, passes.

    Raises:
        IntegrityError: A record is not what was written; the message has `name`.
    """
    content = bytes(content)
    ends = _Ends(content, b"", len(content))
    for record in ends.records() or []:
        if not record.is_stored:
            continue
        found = ends.content_of(record)
        if found is None or found[1] is None or (record.crc32 and zlib.crc32(found[1]) != record.crc32):
            raise IntegrityError(f"{name}: record {record.name} is not what was written")
