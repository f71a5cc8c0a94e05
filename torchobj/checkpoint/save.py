"""`torchobj.save`: a stock `.pt` file, its parts cut from the tensors' own memory and sent in parallel."""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchobj import _torchobj
from torchobj.checkpoint.files import NO_ATTRIBUTES, ObjectWriter, _target_of
from torchobj.checkpoint.memory import memory_of
from torchobj.checkpoint.plan import Field, Plan, PlanError, plan_of
from torchobj.checkpoint.staging import STAGING_BYTES, bytes_of, is_reachable, taken
from torchobj.config import S3ClientConfig, StoreConfig, store_config

__all__ = ["SavedObject", "save"]

logger = logging.getLogger("torchobj")


#: Tensors that are small on average, and together no larger, are copied by torch.
_COPIED_BYTES = 16 << 20


class SavedObject(NamedTuple):
    """An object that was saved."""

    url: str
    size: int
    """Bytes."""
    version: str
    """The store's name of what was written: an ETag, a generation."""


def save(
    obj: Any,
    url: str,
    *,
    checksum: bool = True,
    if_none_match: bool = False,
    config: StoreConfig | S3ClientConfig | None = None,
    region: str | None = None,
    endpoint_url: str | None = None,
) -> SavedObject:
    """Saves what `torch.save` saves, as the file that it writes, to an object.

    The bytes of tensors go from their own memory to the store, in parallel parts, with the GIL released; those of many
    small ones are copied. Beside the tensors at most 64 MiB are used. Tensors of other devices come through those. They
    must not change until this returns. The object appears whole, or not at all: after an error the bucket is as it was.

    Where torch does not let the file be planned, it is streamed through `torchobj.open`; the log says why.

    Args:
        obj: Whatever `torch.save` takes.
        url: `s3://bucket/key`, `file:///folder/file` or `memory://name/key`.
        checksum: Whether the file holds the CRC-32 of each tensor, as `torch.save` writes it.
        if_none_match: The object must not exist when it is finished.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.

    Returns:
        URL, size in bytes and version of the object.

    Raises:
        ConfigError: No URL of an object.
        StoreError: The store refused, or went on failing after the retries.
        Exception: What pickling raised; nothing was sent then.

    Example:
        >>> import torch
        >>> save({"weight": torch.ones(3)}, "memory://example/saved.pt").url
        'memory://example/saved.pt'
    """
    settings = store_config(config, region, endpoint_url)
    parsed, store = _target_of(url, settings)
    # torch computes the checksums of what it copies, unless it was told not to.
    copies = checksum and torch.serialization.get_crc32_options()
    try:
        plan = plan_of(obj, _COPIED_BYTES if copies else 0)
    except PlanError as reason:
        logger.info("%s: streamed by torch.save: %s", parsed, reason)
        with ObjectWriter(url, config=settings, if_none_match=if_none_match) as writer:
            torch.save(obj, writer)
            size = writer.tell()
        return SavedObject(str(parsed), size, writer.version)
    if not checksum:
        plan = plan._replace(fields=[])
    staged = not all(is_reachable(hole.storage.device) for hole in plan.holes)
    limit_bytes = STAGING_BYTES // 2 if staged else None
    gather = _torchobj.NativeGather(store, parsed.key, NO_ATTRIBUTES, if_none_match, None, limit_bytes)
    try:
        for batch in _batches(plan):
            gather.write(batch)
        version, size, _crc32 = gather.close()
    except BaseException:
        gather.abort()
        raise
    return SavedObject(str(parsed), size, version)


def _batches(plan: Plan) -> Iterator[list[Any]]:
    """The plan's pieces for a gather. A block of staged memory ends a batch: the next is made when it is on its way."""
    batch: list[Any] = []
    #: By hole: the first of its records and their end.
    sums: dict[int, tuple[int, int]] = {}
    records = 0
    for piece in plan.pieces():
        if isinstance(piece, bytes):
            batch.append(piece)
        elif isinstance(piece, Field):
            batch.append(sums[piece.hole])
        elif is_reachable(piece.storage.device):
            batch.append(memory_of(bytes_of(piece.storage)))
            sums[piece.start] = (records, records + 1)
            records += 1
        else:
            first = records
            for block in taken(piece.storage):
                batch.append(block)
                records += 1
                yield batch
                batch = []
            sums[piece.start] = (first, records)
    yield batch
