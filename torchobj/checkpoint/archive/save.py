"""`torchobj.save`: writes the file of `torch.save`, and sends parts of it in parallel from the tensors' own memory."""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchobj import _torchobj
from torchobj.checkpoint.archive.device_memory import BLOCK_BYTES, BLOCKS_BYTES, blocks_of, bytes_of, is_reachable
from torchobj.checkpoint.archive.plan import Field, Plan, PlanError, plan_of
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.store.conditions import check_condition
from torchobj.store.file_objects import NO_ATTRIBUTES, ObjectWriter, store_of
from torchobj.store.tensor_memory import memory_of
from torchobj.store.transfers import ByteProgress, ProgressOption
from torchobj.telemetry.ranges import profiled

__all__ = ["SavedObject", "save", "save_counted"]

logger = logging.getLogger("torchobj")


class SavedObject(NamedTuple):
    """An object that was saved."""

    url: str
    size: int
    """Size in bytes."""
    version: str
    """The store's version of the object: on S3 the ETag."""


def save(
    obj: Any,
    url: str,
    *,
    checksum: bool = True,
    overwrite: bool = True,
    if_version: str | None = None,
    progress: ProgressOption = None,
    config: StoreConfig | None = None,
) -> SavedObject:
    """Saves an object as the file that `torch.save` writes.

    Tensors are sent from their own memory in parallel parts, with the GIL released; many small tensors are copied
    first. At most 64 MiB are used in addition to the tensors. Tensors of other devices pass through 256 MiB, pinned for
    GPUs. Tensors must not change until this returns. The object appears whole or not at all: after an error the bucket
    is unchanged.

    If torch's file cannot be planned, it is streamed through `torchobj.open`, and the reason is logged.

    Args:
        obj: Anything that `torch.save` accepts.
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`.
        checksum: Whether the file contains the CRC-32 of each tensor, as `torch.save` writes it.
        overwrite: If False, the object must not exist when the upload finishes.
        if_version: The object must have this version when the upload finishes.
        progress: Receives a `torchobj.files.Progress` as the file is sent, and at the end; True shows a bar on stderr.
            An exception that it raises ends the save: the bucket is unchanged, unless it is raised at the end. At most
            256 MiB are in flight with it, and count as done.
        config: Settings of the store.

    Returns:
        URL, size in bytes and version of the object.

    Raises:
        ConfigError: The URL does not name an object, or an object that is named as a file of safetensors; or conditions
            exclude each other.
        CheckpointError: The memory of a tensor was freed.
        PreconditionFailedError: The condition does not hold. This is also a `FileExistsError`.
        StoreError: The store refused a request, or failed after all retries.
        Exception: Pickling failed; nothing was sent.

    Example:
        >>> import torch
        >>> save({"weight": torch.ones(3)}, "memory://example/saved.pt").url
        'memory://example/saved.pt'
    """
    return save_counted(
        obj,
        url,
        checksum=checksum,
        overwrite=overwrite,
        if_version=if_version,
        config=config,
        counted=ByteProgress(progress),
    )


@profiled("torchobj.save")
def save_counted(
    obj: Any,
    url: str,
    *,
    checksum: bool = True,
    overwrite: bool = True,
    if_version: str | None = None,
    config: StoreConfig | None,
    counted: ByteProgress,
) -> SavedObject:
    """`save` as a part of an operation, whose progress is `counted`. Arguments and errors are those of `save`.

    `obj` may also be the plan of a file.
    """
    check_condition(overwrite, if_version)
    parsed, store = store_of(url, config, is_written=True)
    if parsed.key.lower().endswith(".safetensors"):
        raise ConfigError(
            f"{parsed}: this would be a file of torch.save, which readers of safetensors refuse; write "
            "safetensors.torch.save(tensors) with torchobj.open, or choose another name, such as .pt"
        )
    try:
        plan = obj if isinstance(obj, Plan) else plan_of(obj, copies_small=True, checksum=checksum)
    except PlanError as reason:
        logger.info("%s: streamed by torch.save: %s", parsed, reason)
        with ObjectWriter(url, config=config, overwrite=overwrite, if_version=if_version) as writer:
            torch.save(obj, writer)
            size = writer.tell()
        counted.add(size)
        counted.finish()
        return SavedObject(str(parsed), size, writer.version)
    staged = not all(is_reachable(hole.storage.device) for hole in plan.holes)
    # With `progress`, a batch is written when those before it are sent, up to the limit.
    in_blocks = counted.arrived is not None
    limit_bytes = BLOCKS_BYTES // 2 if staged else BLOCKS_BYTES if in_blocks else None
    gather = _torchobj.NativeGather(store, parsed.key, NO_ATTRIBUTES, overwrite, if_version, limit_bytes)
    try:
        counted.expect(plan.size)
        for batch in _batches(plan, in_blocks=in_blocks):
            gather.write(batch)
            counted.add(sum(4 if isinstance(piece, tuple) else memoryview(piece).nbytes for piece in batch))
        version, size, _crc32 = gather.close()
    except BaseException:
        gather.abort()
        raise
    counted.finish()
    return SavedObject(str(parsed), size, version)


def _batches(plan: Plan, *, in_blocks: bool) -> Iterator[list[Any]]:
    """Yields the plan's pieces for `NativeGather`. Each block of a device ends a batch: it is sent before the next.

    With `in_blocks` the blocks of the CPU's memory do so too.
    """
    batch: list[Any] = []
    #: By the start of a hole: its range of records.
    sums: dict[int, tuple[int, int]] = {}
    records = 0
    for piece in plan.pieces():
        if isinstance(piece, bytes):
            batch.append(piece)
        elif isinstance(piece, Field):
            batch.append(sums[piece.hole])
        else:
            first, storage = records, piece.storage
            is_direct = is_reachable(storage.device)
            memory = memory_of(bytes_of(storage)) if is_direct else None
            step = BLOCK_BYTES if in_blocks else max(1, storage.nbytes())
            steps = range(0, storage.nbytes(), step)
            for block in blocks_of(storage) if memory is None else (memory[at : at + step] for at in steps):
                batch.append(block)
                records += 1
                if not is_direct or in_blocks:
                    yield batch
                    batch = []
            sums[piece.start] = (first, records)
    yield batch
