"""`torchobj.stream_tensors`: yields tensors of files of safetensors as they arrive, with bounded memory."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeAlias

import torch

from torchobj.checkpoint.archive import device_memory, entries
from torchobj.checkpoint.safetensors.file import SafetensorsFile, TensorRead, read
from torchobj.checkpoint.safetensors.header import StoredTensor
from torchobj.checkpoint.safetensors.load import tensor_of
from torchobj.checkpoint.safetensors.weights import Weights, open_weights
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.ranks.shared_read.reads import Reads, ShareOption, sharing
from torchobj.store.concurrency import CallPool
from torchobj.store.transfers import ByteProgress

__all__ = ["stream_tensors"]

#: Maximum size of the tensors that are read or wait for the caller, unless a single one is larger.
_IN_FLIGHT_BYTES = 256 << 20

#: Tensors are read together up to this size, so that small ones share requests.
_GROUP_BYTES = 32 << 20

#: Maximum number of groups that are read at the same time.
_GROUPS = 16

#: Consecutive tensors of one file.
_Group: TypeAlias = list[tuple[SafetensorsFile, StoredTensor]]


def stream_tensors(
    urls: str | Iterable[str],
    *,
    device: torch.device | str | int | None = None,
    keys: Sequence[str] | None = None,
    config: StoreConfig | None = None,
    share: ShareOption = None,
    process_group: "torch.distributed.ProcessGroup | None" = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of files of safetensors as they arrive, each with memory of its own.

    At most 256 MiB, or one larger tensor, are in flight in addition to the tensors that the caller keeps. Reading
    starts at the first tensor, and pauses while the caller does not ask for more. Closing the iterator ends it.

    Args:
        urls: A URL or several: files of safetensors, their `model.safetensors.index.json`, or folders, which end with
            a slash. A name is in one of them only.
        device: Device of the tensors. None: the CPU.
        keys: Yields only these tensors, as `load` selects them; files that have none of them are not read.
        config: Settings of the store.
        share: Which ranks read the bytes once for all of them, as for `load`; by default none. With `"host"` and
            `"job"` all ranks iterate over the same tensors, and close the iterator, if they do, after the same one; the
            slowest one determines the pace. `"auto"` is of use if ranks iterate at the same pace.
        process_group: The ranks of `"host"` and `"job"`. None: all.

    Yields:
        `(name, tensor)`, in no order.

    Raises:
        ConfigError: A URL does not name an object, or a key selects nothing.
        CheckpointError: A file is not one of safetensors, or is damaged; an index contradicts its files; or two files
            have a tensor of one name.
        ObjectChangedError: A file was replaced meanwhile.
        StoreError: The store refused a request, or failed after all retries.

    Example:
        >>> import torch, torchobj
        >>> _ = torchobj.save({"a": torch.ones(2)}, "memory://example/streamed.safetensors")
        >>> for name, tensor in stream_tensors("memory://example/streamed.safetensors"):
        ...     print(name, tensor)
        a tensor([1., 1.])
    """
    wanted = None if keys is None else entries.checked_keys(keys)
    target = torch.device("cpu" if device is None else device)
    if target.type == "meta":
        raise ConfigError("device='meta': tensors on meta have no values; load(url, 'meta') returns them")
    names = [urls] if isinstance(urls, str) else list(urls)
    if names:
        with sharing(share, names[0], config, process_group) as reads:
            yield from _arriving(open_weights(names, wanted, config), target, reads)


def _arriving(weights: Weights, target: torch.device, reads: Reads) -> Iterator[tuple[str, torch.Tensor]]:
    queue = deque(_groups(weights))
    # Collective reads follow each other.
    pool = CallPool(1 if reads.is_collective else _GROUPS, "torchobj-stream")
    running: dict[Future[deque[tuple[str, torch.Tensor]]], int] = {}
    try:
        while queue or running:
            while queue and (not running or sum(running.values()) + _size(queue[0]) <= _IN_FLIGHT_BYTES):
                group = queue.popleft()
                running[pool.submit(_read, group, target, reads)] = _size(group)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                arrived = future.result()
                while arrived:
                    # The future keeps no tensor that the caller drops.
                    yield arrived.popleft()
                del running[future]
    finally:
        # Nothing is running unless the caller has stopped, or a read has failed.
        pool.cancel()
        pool.leave(None)


def _groups(weights: Weights) -> Iterator[_Group]:
    group: _Group = []
    size = 0
    in_order = sorted(weights.tensors.values(), key=lambda each: (each[0].url, each[1].start))
    for file, stored in in_order:
        nbytes = stored.end - stored.start
        if group and (group[-1][0] is not file or size + nbytes > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append((file, stored))
        size += nbytes
    if group:
        yield group


def _size(group: _Group) -> int:
    return sum(stored.end - stored.start for _, stored in group)


def _read(group: _Group, device: torch.device, reads: Reads) -> deque[tuple[str, torch.Tensor]]:
    storages = [device_memory.storage_of(stored.end - stored.start, device) for _, stored in group]
    pairs = list(zip(group, storages, strict=True))
    tensors = [TensorRead(file, stored.start, device_memory.bytes_of(storage)) for (file, stored), storage in pairs]
    read(tensors, ByteProgress(None), reads)
    return deque((stored.name, tensor_of(storage, stored)) for (_, stored), storage in pairs)
