"""`torchobj.save`: writes the file of `torch.save`, and sends parts of it in parallel from the tensors' own memory.

Objects that `torchobj.checkpoint.safetensors` plans are sent likewise.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torchobj import _torchobj
from torchobj.checkpoint.archive.device_memory import BLOCK_BYTES, BLOCKS_BYTES, blocks_of, bytes_of, is_reachable
from torchobj.checkpoint.archive.plan import Field, Plan, PlanError, plan_of
from torchobj.checkpoint.safetensors import folder, names
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
    format: names.Format = None,  # noqa: A002  the word of torch.distributed.checkpoint
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    checksum: bool = True,
    overwrite: bool = True,
    if_version: str | None = None,
    progress: ProgressOption = None,
    config: StoreConfig | None = None,
) -> SavedObject:
    """Saves an object as the file that `torch.save` writes, or tensors as that of `safetensors.torch.save_file`.

    Tensors are sent from their own memory in parallel parts, with the GIL released; many small tensors are copied
    first. At most 64 MiB are used in addition to the tensors. Tensors of other devices pass through 256 MiB, pinned for
    GPUs. Tensors must not change until this returns. The object appears whole or not at all: after an error the bucket
    is unchanged.

    If torch's file cannot be planned, it is streamed through `torchobj.open`, and the reason is logged.

    A folder of safetensors gets the names of `huggingface_hub.save_torch_state_dict`. Its index is written last, and
    the weights that are in the folder are deleted first: after an error the folder has none.

    Args:
        obj: Anything that `torch.save` accepts; for safetensors a dict of contiguous tensors that share no memory.
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`; for a folder of
            safetensors with a slash at the end.
        format: `"safetensors"`, or None: by the suffix `.safetensors` of the URL.
        metadata: Metadata of files of safetensors, such as `{"format": "pt"}`.
        max_shard_bytes: Maximum size of the tensors of a file in a folder of safetensors, unless one is larger. None:
            one file, `model.safetensors`.
        checksum: Whether the file contains the CRC-32 of each tensor, as `torch.save` writes it; not for safetensors.
        overwrite: If False, the object must not exist when the upload finishes.
        if_version: The object must have this version when the upload finishes; not for a folder.
        progress: Receives a `torchobj.files.Progress` as the file is sent, and at the end; True shows a bar on stderr.
            An exception that it raises ends the save: the bucket is unchanged, unless it is raised at the end. At most
            256 MiB are in flight with it, and count as done.
        config: Settings of the store.

    Returns:
        URL, size in bytes and version of the object; for a folder, of the last one: the index, or the only file.

    Raises:
        ConfigError: The URL does not name an object, an argument is not for this format, safetensors cannot represent
            `obj`, or conditions exclude each other.
        CheckpointError: The memory of a tensor was freed, or tensors to save as safetensors share memory.
        PreconditionFailedError: The condition does not hold. This is also a `FileExistsError`.
        StoreError: The store refused a request, or failed after all retries.
        Exception: Pickling failed; nothing was sent.

    Example:
        >>> import torch
        >>> save({"weight": torch.ones(3)}, "memory://example/saved.pt").url
        'memory://example/saved.pt'
    """
    counted = ByteProgress(progress)
    if names.is_safetensors(url, format):
        return _save_safetensors(
            obj,
            url,
            metadata,
            max_shard_bytes,
            overwrite=overwrite,
            if_version=if_version,
            config=config,
            counted=counted,
        )
    if metadata is not None or max_shard_bytes is not None:
        raise ConfigError(f"metadata={metadata!r}, max_shard_bytes={max_shard_bytes!r}: only for format='safetensors'")
    saved, _ = save_counted(
        obj,
        url,
        checksum=checksum,
        overwrite=overwrite,
        if_version=if_version,
        config=config,
        counted=counted,
    )
    return saved


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
) -> tuple[SavedObject, int | None]:
    """`save` of a file of torch as a part of an operation, whose progress is `counted`.

    Arguments and errors are those of `save`. `obj` may also be the plan of a file. Also returns the CRC-32 of the
    object; None if it was streamed.
    """
    check_condition(overwrite, if_version)
    parsed, _ = store_of(url, config, is_written=True)
    try:
        plan = obj if isinstance(obj, Plan) else plan_of(obj, copies_small=True, checksum=checksum)
    except PlanError as reason:
        logger.info("%s: streamed by torch.save: %s", parsed, reason)
        with ObjectWriter(url, config=config, overwrite=overwrite, if_version=if_version) as writer:
            torch.save(obj, writer)
            size = writer.tell()
        counted.add(size)
        saved, crc32 = SavedObject(str(parsed), size, writer.version), None
    else:
        counted.expect(plan.size)
        saved, crc32 = _sent(plan, url, overwrite=overwrite, if_version=if_version, config=config, counted=counted)
    counted.finish()
    return saved, crc32


@profiled("torchobj.save")
def _save_safetensors(
    tensors: Any,
    url: str,
    metadata: Mapping[str, str] | None,
    max_shard_bytes: int | None,
    *,
    overwrite: bool,
    if_version: str | None,
    config: StoreConfig | None,
    counted: ByteProgress,
) -> SavedObject:
    check_condition(overwrite, if_version)
    plans = folder.plans_of(tensors, url, metadata, max_shard_bytes)
    if names.is_folder(url):
        if if_version is not None:
            raise ConfigError(f"if_version={if_version!r}: {url} is a folder, which has no version")
        folder.clear(url, config, overwrite=overwrite)
    counted.expect(sum(plan.size for _, plan in plans))
    for each, plan in plans:
        saved, _ = _sent(plan, each, overwrite=overwrite, if_version=if_version, config=config, counted=counted)
    counted.finish()
    return saved


def _sent(
    plan: Plan,
    url: str,
    *,
    overwrite: bool,
    if_version: str | None,
    config: StoreConfig | None,
    counted: ByteProgress,
) -> tuple[SavedObject, int]:
    """Sends an object. Also returns its CRC-32."""
    parsed, store = store_of(url, config, is_written=True)
    staged = not all(is_reachable(hole.storage.device) for hole in plan.holes)
    # With `progress`, a batch is written when those before it are sent, up to the limit.
    in_blocks = counted.arrived is not None
    limit_bytes = BLOCKS_BYTES // 2 if staged else BLOCKS_BYTES if in_blocks else None
    gather = _torchobj.NativeGather(store, parsed.key, NO_ATTRIBUTES, overwrite, if_version, limit_bytes)
    try:
        for batch in _batches(plan, in_blocks=in_blocks):
            gather.write(batch)
            if in_blocks:
                counted.add(sum(4 if isinstance(piece, tuple) else memoryview(piece).nbytes for piece in batch))
        version, size, crc32 = gather.close()
    except BaseException:
        gather.abort()
        raise
    return SavedObject(str(parsed), size, version), crc32


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
