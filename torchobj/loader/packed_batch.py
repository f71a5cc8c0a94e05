"""Sends batches from workers to the trainer with their tensors in recycled memory. torch's queue transfers them.

A worker pickles its batch with a pickler of its own, because reducers of `ForkingPickler` would change the queues of
users too. The pickler lists the storages of all tensors. Storages in the memory of the batch (`torchobj.collate`) stay
where they are, others are copied there. The trainer unpickles the batch with storages that view the memory.
"""

import functools
import io
import pickle
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data._utils.collate import default_collate as torch_default_collate

from torchobj import _torchobj
from torchobj._torchobj import Buffer
from torchobj.collate import default_collate
from torchobj.datasets.batch_memory import BatchMemory, Span
from torchobj.loader.unwrap import changed_view

__all__ = ["collating_loader", "pack", "packing_loader"]

#: Up to this number of bytes, tensors are sent through the queue: less than a block costs.
_INLINE_BYTES = 4096

Memory = Buffer | bytearray | torch.UntypedStorage


def collating_loader(loader: Any) -> Any:
    """A view of a loader for torch's iterator, whose default collate function is that of torchobj."""
    return changed_view(loader, collate_fn=default_collate) if loader.collate_fn is torch_default_collate else loader


def packing_loader(loader: Any, memory: BatchMemory) -> Any:
    """A view of a loader for torch's iterator, whose workers send their batches in `memory`."""
    return changed_view(
        loader,
        collate_fn=_PackingCollate(loader.collate_fn, memory),
        worker_init_fn=functools.partial(_start_worker, memory, loader.worker_init_fn),
    )


def _start_worker(memory: BatchMemory, worker_init_fn: Callable[[int], Any] | None, worker: int) -> None:
    memory.use()
    _copy_blocks_when_shared()
    if worker_init_fn is not None:
        worker_init_fn(worker)


class _PackingCollate:
    """A collate function whose batches are packed."""

    def __init__(self, collate_fn: Callable[[Any], Any], memory: BatchMemory) -> None:
        self._collate_fn, self._memory = collate_fn, memory

    def __call__(self, samples: Any) -> "_PackedBatch":
        try:
            return pack(self._collate_fn(samples), self._memory)
        finally:
            self._memory.end_batch()


class _PackedBatch:
    """A pickled batch; unpickling it yields the batch itself."""

    def __init__(self, pickled: bytes, memories: list[Memory], spans: list[tuple[int, int, int]]) -> None:
        self._pickled, self._memories, self._spans = pickled, memories, spans

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._pickled, self._memories, self._spans)


class _Packer(ForkingPickler):
    """Pickles as for a queue, but lists the storages that are ordinary memory instead of sharing them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[torch.UntypedStorage] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.UntypedStorage or obj.device.type != "cpu" or not obj.nbytes() or obj.is_shared():
            return NotImplemented
        self.storages.append(obj)
        return _storage, (len(self.storages) - 1,)


def pack(batch: Any, memory: BatchMemory) -> _PackedBatch:
    """Pickles a batch, with its tensors in `memory`. Beyond the limit of the memory, torch shares their storages."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(batch)
    found = [memory.find(storage.data_ptr(), storage.nbytes()) for storage in packer.storages]
    missing = sum(storage.nbytes() for storage, span in zip(packer.storages, found, strict=True) if span is None)
    inline = bytearray() if missing <= _INLINE_BYTES else None
    memories: dict[int, tuple[int, Memory]] = {}
    spans = []
    for storage, span in zip(packer.storages, found, strict=True):
        place, offset = _place(storage, span, inline, memory)
        index, _ = memories.setdefault(id(place), (len(memories), place))
        spans.append((index, offset, storage.nbytes()))
    return _PackedBatch(file.getvalue(), [place for _, place in memories.values()], spans)


def _place(
    storage: torch.UntypedStorage, span: Span | None, inline: bytearray | None, memory: BatchMemory
) -> tuple[Memory, int]:
    if span is not None:
        return span
    if inline is not None:
        offset = -(-len(inline) // 16) * 16
        inline.extend(bytes(offset - len(inline)))
        inline.extend(_bytes_of(storage).numpy().data)
        return inline, offset
    allocated = memory.allocate(storage.nbytes())
    if allocated is None:
        return storage, 0
    _view(*allocated, storage.nbytes()).copy_(_bytes_of(storage))
    return allocated


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _view(memory: Buffer | bytearray, offset: int, size: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=size)


_unpacking = threading.local()


def _unpack(pickled: bytes, memories: list[Memory], spans: list[tuple[int, int, int]]) -> Any:
    _copy_blocks_when_shared()
    storages = []
    for index, offset, size in spans:
        memory = memories[index]
        if not isinstance(memory, torch.UntypedStorage):
            memory = _view(memory, offset, size).untyped_storage()
        storages.append(memory)
    outer, _unpacking.storages = getattr(_unpacking, "storages", None), storages
    try:
        return pickle.loads(pickled)  # noqa: S301  of our own worker
    finally:
        _unpacking.storages = outer


def _storage(index: int) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = _unpacking.storages[index]
    return storage


@functools.cache
def _copy_blocks_when_shared() -> None:
    """Makes queues send a copy of a tensor in a block.

    torch moves the storage of a tensor that is sent into new shared memory. Views of numpy would keep the address in
    the block, which is recycled then. Other tensors are sent as before.
    """
    reduce = ForkingPickler._extra_reducers.get(torch.UntypedStorage, reduce_storage)  # type: ignore[attr-defined]

    def copying_blocks(storage: torch.UntypedStorage) -> Any:
        if storage.device.type == "cpu" and _torchobj.NativeBlocks.contain(storage.data_ptr()):
            return reduce(_bytes_of(storage).clone().untyped_storage())
        return reduce(storage)

    ForkingPickler.register(torch.UntypedStorage, copying_blocks)
