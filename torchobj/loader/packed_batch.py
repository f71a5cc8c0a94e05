"""Sends batches from workers to the trainer with their tensors in recycled memory. torch's queue transfers them.

A worker pickles its batch with a pickler of its own, because reducers of `ForkingPickler` would change the queues of
users too. The pickler lists the storages of all tensors. Storages in the memory of the batch (`torchobj.collate`) stay
where they are, and others are copied there. A storage of which less than half of the bytes are part of the batch is
sent by torch, which moves it into shared memory once and sends it any number of times. The trainer unpickles the batch
with storages that view the memory.
"""

import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_storage

from torchobj import collate
from torchobj._torchobj import Buffer
from torchobj.loader.pass_setup import PassSetup
from torchobj.workers.batch_memory import SMALL_BYTES, BatchMemory, aligned, is_view, view

#: Maximum size of all small storages of a batch that are sent through the queue: the size of its pipe.
_MAX_INLINE_BYTES = 64 << 10
#: Share of a storage's bytes that must be in a batch for it to be copied.
_MIN_SHARE = 0.5

Memory = Buffer | bytearray | torch.UntypedStorage


def pack_batches(setup: PassSetup, memory: BatchMemory) -> None:
    """Makes the workers of a pass send their batches in `memory`."""
    setup.collate_fn = _PackingCollate(setup.collate_fn, memory)
    # Without a batch sampler, what the dataset builds is a batch. What `worker_init_fn` builds is none.
    started = None if setup.loader._auto_collation else memory.allocate_always
    setup.call_in_workers(functools.partial(_start_worker, memory), started)


def _start_worker(memory: BatchMemory) -> None:
    memory.use()
    collate.use_in_worker()
    _copy_batches_when_shared()


class _PackingCollate:
    """A collate function whose batches are packed."""

    def __init__(self, collate_fn: Callable[[Any], Any], memory: BatchMemory) -> None:
        self._collate_fn, self._memory = collate_fn, memory

    def __call__(self, samples: Any) -> "_PackedBatch":
        with self._memory.allocating():
            return pack(self._collate_fn(samples), self._memory)


class _PackedBatch:
    """A pickled batch; unpickling it yields the batch itself."""

    def __init__(self, pickled: bytes, memories: list[Memory], spans: list[tuple[int, int, int]]) -> None:
        self._pickled, self._memories, self._spans = pickled, memories, spans

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self._pickled, self._memories, self._spans)


class _Packer(ForkingPickler):
    """Pickles as for a queue, but lists buffers, and storages of ordinary memory, instead of sharing them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.buffers: list[Buffer] = []
        self.storages: list[torch.UntypedStorage] = []
        # Bytes of the batch's tensors, by storage. Attributes of subclasses are not read: these may override them.
        self._bytes: dict[int, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Buffer:
            self.buffers.append(obj)
            return _listed, (0, len(self.buffers) - 1)
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided and not obj.is_nested:
            storage = obj.untyped_storage()._cdata
            self._bytes[storage] = self._bytes.get(storage, 0) + obj.nbytes
        if type(obj) is not torch.UntypedStorage or obj.device.type != "cpu" or not obj.nbytes() or obj.is_shared():
            return NotImplemented
        self.storages.append(obj)
        return _listed, (1, len(self.storages) - 1)

    def is_part(self, storage: torch.UntypedStorage) -> bool:
        """Whether at least half of the bytes of a storage are in the batch. All are, if no tensor views it."""
        size: int = storage.nbytes()
        return self._bytes.get(storage._cdata, size) >= size * _MIN_SHARE


def pack(batch: Any, memory: BatchMemory) -> _PackedBatch:
    """Pickles a batch, with its tensors in `memory`. Beyond the limit of the memory, torch shares their storages."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(batch)
    storages = packer.storages
    located: list[tuple[Memory, int]] = []
    copied = []
    for number, storage in enumerate(storages):
        span = memory.find(storage.data_ptr(), storage.nbytes())
        located.append(span or (storage, 0))
        if span is None and packer.is_part(storage):
            copied.append(number)
    # Kept until the batch ends: the memory of a deleted part is allocated again.
    parts: list[Buffer] = []
    for number, place in _copies(storages, copied, memory, parts):
        located[number] = place
    memories: list[Memory] = [*packer.buffers]
    indices: dict[int, int] = {}
    spans = []
    for (each, offset), storage in zip(located, storages, strict=True):
        if id(each) not in indices:
            indices[id(each)] = len(memories)
            memories.append(each)
        spans.append((indices[id(each)], offset, storage.nbytes()))
    return _PackedBatch(file.getvalue(), memories, spans)


def _copies(
    storages: list[torch.UntypedStorage], copied: list[int], memory: BatchMemory, parts: list[Buffer]
) -> Iterator[tuple[int, tuple[Memory, int]]]:
    """Copies these storages. Yields their numbers and the places of the copies, as far as the limit allows. Adds their
    memory to `parts`.
    """
    small = [number for number in copied if storages[number].nbytes() <= SMALL_BYTES]
    if sum(storages[number].nbytes() for number in small) <= _MAX_INLINE_BYTES:
        content = bytearray()
        for number in small:
            yield number, (content, len(content))
            content += _bytes_of(storages[number]).numpy().data
            content += bytes(aligned(len(content)) - len(content))
        copied = [number for number in copied if storages[number].nbytes() > SMALL_BYTES]
    following = sum(aligned(storages[number].nbytes()) for number in copied)
    for number in copied:
        size = storages[number].nbytes()
        following -= aligned(size)
        part = memory.allocate(size, following=following)
        if part is not None:
            parts.append(part)
            copy = _view(part, 0, size).copy_(_bytes_of(storages[number]))
            span = memory.find(copy.data_ptr(), size)
            assert span is not None  # noqa: S101  it was just allocated
            yield number, span


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _view(memory: Buffer | bytearray, offset: int, size: int) -> torch.Tensor:
    return view(memory, torch.uint8, offset=offset, count=size)


_unpacking = threading.local()


def _unpack(pickled: bytes, memories: list[Memory], spans: list[tuple[int, int, int]]) -> Any:
    _copy_batches_when_shared()
    storages = []
    for index, offset, size in spans:
        memory = memories[index]
        if not isinstance(memory, torch.UntypedStorage):
            memory = _view(memory, offset, size).untyped_storage()
        storages.append(memory)
    outer, _unpacking.lists = getattr(_unpacking, "lists", None), (memories, storages)
    try:
        return pickle.loads(pickled)  # noqa: S301  of our own worker
    finally:
        _unpacking.lists = outer


def _listed(kind: int, index: int) -> Any:
    """A buffer, kind 0, or storage, kind 1, of the batch that is being unpickled."""
    return _unpacking.lists[kind][index]


def _storage_of(content: bytearray) -> torch.UntypedStorage:
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


@functools.cache
def _copy_batches_when_shared() -> None:
    """Makes queues send a copy of a tensor of a batch.

    torch moves the storage of a tensor that is sent into new shared memory. Views of numpy would stay behind. Other
    tensors are sent as before.
    """
    reduce = ForkingPickler._extra_reducers.get(torch.UntypedStorage, reduce_storage)  # type: ignore[attr-defined]

    def copying_batches(storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or not is_view(storage):
            return reduce(storage)
        if get_spawning_popen() is not None:
            # torch would send a descriptor of the copy, which is deleted before the process starts.
            return _storage_of, (bytearray(_bytes_of(storage).numpy().data),)
        return reduce(_bytes_of(storage).clone().untyped_storage())

    ForkingPickler.register(torch.UntypedStorage, copying_batches)
