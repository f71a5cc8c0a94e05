"""Items of another format, as other programs saved them: finds the payload in the archive, verifies the records, and
undoes torch's extensions, such as compression. Does no I/O.
"""

import io
import sys
import zlib
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import _StorageInfo

from torchobj.checkpoint.archive.pickling import byte_order, check_nesting
from torchobj.checkpoint.archive.plan import TensorArchive
from torchobj.checkpoint.archive.zip_archive import Ends
from torchobj.exceptions import CheckpointError, IntegrityError

__all__ = ["END_BYTES", "Payload", "check_archive", "is_transformed", "payload_in", "untransformed"]

#: Size of both ends of an archive that are read: the records before a payload, and the directory.
END_BYTES = 4096

#: Size of a read from the stream of an extension.
_READ_BYTES = 1 << 20


class Payload(NamedTuple):
    """The bytes of a tensor in an archive."""

    offset: int
    """Offset in the archive."""
    crc32: int
    """CRC-32; 0 if the writer computed none."""


def payload_in(head: bytes, tail: bytes, length: int, expected: TensorArchive) -> Payload | None:
    """Finds the bytes of the only tensor of an archive.

    Args:
        head, tail: First and last `END_BYTES` of the archive, or the whole archive and nothing.
        length: Size of the archive.
        expected: Archive that this torch would write.

    Returns:
        None if the archive has other contents or an unknown layout.
    """
    ends = Ends(head, tail, length)
    records = ends.records()
    pickled, data = records.get("data.pkl"), records.get("data/0")
    if pickled is None or data is None or not data.stored or data.size != expected.payload_bytes:
        return None
    found, payload = ends.content_of(pickled), ends.content_of(data)
    if found is None or payload is None or found[1] != expected.pickle or payload[0] + data.size > length:
        return None
    order = records.get("byteorder")
    content = None if order is None else (ends.content_of(order) or (0, b""))[1] or b""
    try:
        is_swapped = byte_order(None if content is None else bytes(content)) != sys.byteorder
    except CheckpointError:
        # torch reports it.
        return None
    if is_swapped:
        return None
    return Payload(payload[0], data.crc32)


def check_archive(content: bytes, limit_bytes: int, name: str, *, verify: bool) -> None:
    """Checks the unpacked size of an archive, the nesting of its pickle, and with `verify` its checksums.

    Content that is not an archive passes.

    Raises:
        CheckpointError: It unpacks to more than the limit, or nests too deep; the message contains `name`.
        IntegrityError: The CRC-32 of a record differs.
    """
    if not content.startswith(b"PK"):
        return
    ends = Ends(content, b"", len(content))
    records = ends.records()
    unpacked = sum(record.size for record in records.values() if not record.stored)
    if unpacked > limit_bytes or not records:
        what = f"has {unpacked} bytes when it is unpacked, more than {limit_bytes}" if records else "has no directory"
        raise CheckpointError(f"{name}: the archive {what}: refused")
    for record in records.values():
        if not record.stored:
            continue
        _, found = ends.content_of(record) or (0, None)
        if record.name == "data.pkl" and found is not None:
            check_nesting(found, name)
        # Writers that compute no CRC-32 leave 0.
        if verify and (found is None or (record.crc32 and zlib.crc32(found) != record.crc32)):
            raise IntegrityError(f"{name}: record {record.name} is not what was written")


def is_transformed(info: _StorageInfo) -> bool:
    """Returns whether extensions transformed the bytes of an item."""
    # Metadata of torch without extensions has no such field.
    return bool(getattr(info, "transform_descriptors", None))


def untransformed(content: bytes, info: _StorageInfo, limit_bytes: int, name: str) -> bytes:
    """Returns the bytes of an item before the extensions transformed them.

    Raises:
        CheckpointError: An extension is unknown or fails, or returns more bytes than the limit; the message contains
            `name`.
    """
    if not is_transformed(info):
        return content
    descriptors: Any = info.transform_descriptors
    try:
        from torch.distributed.checkpoint._extension import (  # noqa: PLC0415  torch 2.6 has none
            ExtensionRegistry,
            StreamTransformExtension,
        )

        stream: Any = io.BytesIO(content)
        for extension in ExtensionRegistry().from_descriptor_list(descriptors):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        plain = bytearray()
        while len(plain) <= limit_bytes and (piece := stream.read(_READ_BYTES)):
            plain += piece
    except Exception as error:
        raise CheckpointError(f"{name}: was saved through {list(descriptors)}, which fails: {error!r}") from error
    if len(plain) > limit_bytes:
        raise CheckpointError(f"{name}: has more than {limit_bytes} bytes when it is unpacked: refused")
    return bytes(plain)
