"""Items that others framed: where in such an archive the payload lies, whether its sums are right; and what was saved
through extensions of torch's streams, as compression.
"""

import io
import struct
import zlib
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import _StorageInfo

from torchobj.checkpoint.archive import LOCAL_HEADER_BYTES, Record, find_directory, payload_of, records_of
from torchobj.checkpoint.dcp.limits import check_nesting
from torchobj.exceptions import CheckpointError, IntegrityError

__all__ = ["END_BYTES", "Payload", "check_archive", "check_packed", "is_transformed", "payload_in", "untransformed"]

#: So much of both ends of an archive is looked at: the records before a payload, and the directory.
END_BYTES = 4096

#: What is read of an extension's stream at once.
_READ_BYTES = 1 << 20


class Payload(NamedTuple):
    """Where an archive has a tensor's memory."""

    offset: int
    """From the archive's start."""
    crc32: int
    """0: was not taken."""


class _Ends:
    """The first and the last bytes of an archive; the first may be all of it."""

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

    def records(self) -> dict[str, Record]:
        """What the directory has; nothing where it cannot be read."""
        try:
            place = find_directory(self._tail or self._head, self._length)
            directory = None if place is None else self.at(place.start, place.end - place.start)
            return {} if place is None or directory is None else records_of(directory, place.start)
        except (CheckpointError, struct.error):
            return {}

    def content_of(self, record: Record) -> tuple[int, bytes | None] | None:
        """Where a record's bytes begin, and the bytes where they were read; None where its header was not."""
        header = self.at(record.header, LOCAL_HEADER_BYTES)
        try:
            start = None if header is None else payload_of(record, header)
        except CheckpointError:
            return None
        return None if start is None else (start, self.at(start, record.size))


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
    records = ends.records()
    pickled, data = records.get("data.pkl"), records.get("data/0")
    if pickled is None or data is None or not data.stored or data.size != payload_bytes:
        return None
    found, payload = ends.content_of(pickled), ends.content_of(data)
    if found is None or payload is None or found[1] != pickle or payload[0] + payload_bytes > length:
        return None
    order = records.get("byteorder")
    if order is not None and (ends.content_of(order) or (0, None))[1] != b"little":
        return None
    return Payload(payload[0], data.crc32)


def check_packed(content: bytes | bytearray, limit_bytes: int, name: str) -> None:
    """Checks what torch would unpack of an archive, and how deep its pickle nests; what is no archive passes.

    Raises:
        CheckpointError: It is larger than the limit when it is unpacked, or nests too deep; the message has `name`.
    """
    if not content.startswith(b"PK"):
        return
    content = bytes(content)
    ends = _Ends(content, b"", len(content))
    records = ends.records()
    unpacked = sum(record.size for record in records.values() if not record.stored)
    if unpacked > limit_bytes or not records:
        what = f"has {unpacked} bytes when it is unpacked, more than {limit_bytes}" if records else "has no directory"
        raise CheckpointError(f"{name}: the archive {what}: refused")
    pickled = records.get("data.pkl")
    found = None if pickled is None or not pickled.stored else ends.content_of(pickled)
    if found is not None and found[1] is not None:
        check_nesting(found[1], name)


def check_archive(content: bytes | bytearray, name: str) -> None:
    """Checks the sums of all records of an archive; what is no archive, and a sum that was not taken, passes.

    Raises:
        IntegrityError: A record is not what was written; the message has `name`.
    """
    content = bytes(content)
    ends = _Ends(content, b"", len(content))
    for record in ends.records().values():
        if not record.stored:
            continue
        found = ends.content_of(record)
        if found is None or found[1] is None or (record.crc32 and zlib.crc32(found[1]) != record.crc32):
            raise IntegrityError(f"{name}: record {record.name} is not what was written")


def _descriptors(info: _StorageInfo) -> Any:
    # Metadata, and torch, of before there were extensions have no such field.
    return getattr(info, "transform_descriptors", None)


def is_transformed(info: _StorageInfo) -> bool:
    """Whether an item's bytes are not those of its archive."""
    return bool(_descriptors(info))


def untransformed(content: bytearray, info: _StorageInfo, limit_bytes: int, name: str) -> bytes | bytearray:
    """The bytes that were saved.

    Raises:
        CheckpointError: An extension is not known, or it fails, or makes more bytes than the limit; the message has
            `name`.
    """
    if not is_transformed(info):
        return content
    try:
        from torch.distributed.checkpoint._extension import (  # noqa: PLC0415  torch 2.6 has none
            ExtensionRegistry,
            StreamTransformExtension,
        )

        stream: Any = io.BytesIO(content)
        for extension in ExtensionRegistry().from_descriptor_list(_descriptors(info)):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        plain = bytearray()
        while len(plain) <= limit_bytes and (piece := stream.read(_READ_BYTES)):
            plain += piece
    except Exception as error:
        raise CheckpointError(
            f"{name}: was saved through {list(_descriptors(info))}, which fails: {error!r}"
        ) from error
    if len(plain) > limit_bytes:
        raise CheckpointError(f"{name}: has more than {limit_bytes} bytes when it is unpacked: refused")
    return plain
