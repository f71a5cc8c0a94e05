"""Allocates the tensors of batches from blocks of recycled shared memory. Does not build batches."""

import itertools
import resource
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.data

from torchobj import _torchobj
from torchobj._torchobj import Buffer
from torchobj.warn_once import FORKED, warn_once
from torchobj.workers import process
from torchobj.workers.descriptors import Descriptors
from torchobj.workers.memory_budget import start_prefetcher

#: Minimum limit of open files. Below, the blocks would take the descriptors that torch and the program need.
_MIN_OPEN_FILES = 96

#: Tensors of up to this size are sent through the queue: that costs less than a block.
SMALL_BYTES = 4096

#: Maximum size of a further block of a batch, unless a tensor is larger.
_MAX_GROWTH_BYTES = 4 << 20

#: Alignment of each tensor in bytes: that of torch's own CPU allocator.
_ALIGNMENT = 64


def aligned(size: int) -> int:
    """Bytes that `size` bytes take in a block."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Span(NamedTuple):
    """A part of a buffer."""

    buffer: Buffer
    offset: int
    """Start in bytes."""


class _Block:
    """A block of the current batch, of which tensors take parts. A part is free again when its tensor is deleted."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.start = buffer, torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        # Start, end and tensor memory of the parts that were taken, in order.
        self._parts: list[tuple[int, int, weakref.ref[Buffer]]] = []
        # Gets the part that was deleted last. Does not reference the block, whose memory would wait for the garbage
        # collector.
        self._deleted: deque[weakref.ref[Buffer]] = deque(maxlen=1)
        # Size of a part for which there was no gap.
        self._refused_bytes = len(buffer) + 1
        #: Largest end of a part.
        self.used_bytes = 0

    def take(self, size: int) -> Buffer | None:
        """Memory of `size` bytes that no other tensor has; None if the block has no space."""
        index, start = len(self._parts), self._parts[-1][1] if self._parts else 0
        if start + size > len(self.buffer):
            # Only a full block looks for parts of deleted tensors.
            index, start = self._gap(size)
            if index < 0:
                return None
        part = self.buffer.view(start, start + size)
        self._parts.insert(index, (start, start + aligned(size), weakref.ref(part, self._deleted.append)))
        self.used_bytes = max(self.used_bytes, start + aligned(size))
        return part

    def _gap(self, size: int) -> tuple[int, int]:
        """Index and start of a free part of at least this size; -1 if the block has no space."""
        if size >= self._refused_bytes and not self._deleted:
            return -1, 0
        self._deleted.clear()
        self._parts = [part for part in self._parts if part[2]() is not None]
        end = 0
        for index, (start, after, _) in enumerate(self._parts):
            if start - end >= size:
                return index, end
            end = after
        if end + size <= len(self.buffer):
            return len(self._parts), end
        self._refused_bytes = size
        return -1, 0

    def kept_bytes(self) -> int:
        """Bytes of the tensors that were not deleted."""
        return sum(end - start for start, end, part in self._parts if part() is not None)


#: Numbers of the memories of this process. Each has numbers for this many workers.
_numbers = itertools.count(1)
_MAX_WORKERS = 1024


class BatchMemory:
    """Allocates the tensors of one batch after the other from blocks, which the process of the loader grants.

    Only while `allocating`: other tensors, such as those that a transform collates, live as long as their samples, and
    would keep the memory of the batch. Within a batch, the memory of a tensor that was deleted is used again. The
    blocks are reused after the trainer has deleted all tensors of the batch. Usually one block holds a whole batch: the
    first block of a batch has the size of the previous batch. Threads of a collate function may allocate.
    """

    def __init__(self, native: "_torchobj.NativeBlocks") -> None:
        self._native: _torchobj.NativeBlocks | None = native
        self._descriptors: Descriptors | None = None
        self._lock = threading.RLock()
        self._reset()
        # Workers of other iterators have other numbers, also one with the process id of a worker that has exited.
        self._first_number = next(_numbers) * _MAX_WORKERS % 2**32
        self._is_allocating = self._is_always_allocating = False
        self._previous_bytes = 0

    def _reset(self) -> None:
        # The blocks of the current batch; the last one is not full.
        self._blocks: list[_Block] = []
        self._refused = False

    def allocate_always(self) -> None:
        """Allocates also while no batch is collated: what the dataset returns is a batch."""
        self._is_allocating = self._is_always_allocating = True

    @classmethod
    def start(cls) -> "BatchMemory | None":
        """Memory of this process for the workers of an iterator; None if the system has none, or refuses it."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= limit < _MIN_OPEN_FILES:
            warn_once(
                FORKED,
                "batches take memory that is not recycled: this process may open %d files, and recycled memory needs "
                "%d; raise the limit (ulimit -n)",
                limit,
                _MIN_OPEN_FILES,
                key="few open files",
            )
            return None
        return cls(_torchobj.NativeBlocks()) if start_prefetcher() else None

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Within the block, `allocate` has memory. At its end the current batch ends: the next one is elsewhere."""
        self._is_allocating = True
        try:
            yield
        finally:
            self._is_allocating = self._is_always_allocating
            with self._lock:
                self._previous_bytes = sum(block.used_bytes for block in self._blocks) or self._previous_bytes
                self._reset()

    def allocate(self, size: int, *, following: int = 0) -> Buffer | None:
        """Memory of `size` bytes in the current batch, with undefined content, until it is deleted. None if the limit
        does not allow it, and while no batch is being built.

        Args:
            size: Number of bytes; at least 1.
            following: Number of bytes, aligned, that will be allocated next: a new block has space for them.
        """
        if not self._is_allocating:
            return None
        with self._lock:
            for block in reversed(self._blocks):
                if (part := block.take(size)) is not None:
                    return part
            if self._refused:
                return None
            # The owner reuses them, and may grant larger ones.
            self._blocks = [block for block in self._blocks if block.kept_bytes()]
            # Many small tensors have few blocks.
            kept = sum(block.kept_bytes() for block in self._blocks)
            previous = min(kept, _MAX_GROWTH_BYTES) if self._blocks else self._previous_bytes
            added = self._block(size, preferred=max(aligned(size) + following, previous))
            if added is None:
                return None
            self._blocks.append(added)
            return added.take(size)

    def _block(self, size: int, *, preferred: int) -> _Block | None:
        if self._native is None:
            return None
        info = torch.utils.data.get_worker_info()
        buffer = self._native.block(size, preferred, self._first_number + (0 if info is None else info.id))
        self._refused = buffer is None
        return None if buffer is None else _Block(buffer)

    def find(self, address: int, size: int) -> Span | None:
        """The part of the current batch's blocks with this address; None if it is elsewhere."""
        with self._lock:
            for block in self._blocks:
                if block.start <= address and address + size <= block.start + len(block.buffer):
                    return Span(block.buffer, address - block.start)
        return None

    def use(self) -> None:
        """Makes this the memory of the current process, a worker."""
        if self._descriptors is not None:
            process.exit_with_trainer()
            try:
                file, eventfd = self._descriptors.copies()
                self._native = _torchobj.NativeBlocks.attach(self._owner, file, eventfd)
            except OSError:
                # The address space and the open files of a spawned worker may be limited separately: torch's own memory
                # is used.
                self._native = None
            self._descriptors = None
        _of_process.clear()
        _of_process[_torchobj.process_number()] = self

    def reclaim(self, workers: Sequence[Any]) -> None:
        """Recycles what these processes, if they have exited, had sent: the iterator that would receive it is gone."""
        if self._native is not None and self._native.owner == _torchobj.process_number():
            exited = [
                number for number, worker in enumerate(workers, self._first_number) if worker.exitcode is not None
            ]
            self._native.reclaim(exited)

    def __getstate__(self) -> dict[str, Any]:
        if self._native is None or not process.is_pickling_for_spawn():
            raise TypeError("the memory of a loader can be sent to the loader's workers only")
        descriptors = Descriptors.to_new_process(*self._native.descriptors())
        return {"owner": self._native.owner, "descriptors": descriptors, "first_number": self._first_number}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._native, self._owner, self._descriptors = None, state["owner"], state["descriptors"]
        self._lock = threading.RLock()
        self._is_allocating = self._is_always_allocating = False
        self._previous_bytes, self._first_number = 0, state["first_number"]
        self._reset()


#: By number of the process, because a fork copies it.
_of_process: dict[int, BatchMemory] = {}


def current_memory() -> BatchMemory | None:
    """The memory of batches, in a worker of a `torchobj.DataLoader`; None in any other process."""
    return _of_process.get(_torchobj.process_number())


def view(memory: Buffer | bytearray, dtype: torch.dtype, *, offset: int, count: int) -> torch.Tensor:
    """A tensor of one dimension that views `memory`, which is kept until its storage is deleted.

    `share_memory_` moves the storage; the reference keeps the earlier memory for arrays that view it.
    """
    tensor = torch.frombuffer(memory, dtype=dtype, offset=offset, count=count)
    tensor.untyped_storage()._torchobj_memory = memory  # type: ignore[attr-defined]
    return tensor


def is_view(storage: torch.UntypedStorage) -> bool:
    """Whether a storage views memory of a batch."""
    if storage.is_shared():
        return False
    return hasattr(storage, "_torchobj_memory") or _torchobj.NativeBlocks.contains(storage.data_ptr())
