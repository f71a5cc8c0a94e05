"""Allocates the tensors of batches from blocks of recycled shared memory. Does not build batches."""

import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchobj import _torchobj
from torchobj._torchobj import Buffer
from torchobj.datasets import worker_process
from torchobj.datasets.descriptors import Descriptors
from torchobj.datasets.memory_budget import start_prefetcher

#: Tensors of up to this size are sent through the queue: that costs less than a block.
SMALL_BYTES = 4096

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


class BatchMemory:
    """Allocates the tensors of one batch after the other from blocks, which the process of the loader grants.

    The blocks of a batch are reused after the trainer has deleted all of its tensors. Usually one block holds a whole
    batch: the first block of a batch has the size of the previous batch. Threads of a collate function may allocate.
    """

    def __init__(self, native: "_torchobj.NativeBlocks") -> None:
        self._native: _torchobj.NativeBlocks | None = native
        self._descriptors: Descriptors | None = None
        self._lock = threading.RLock()
        self._reset()
        self._previous_bytes = 0

    def _reset(self) -> None:
        # Blocks of the current batch with their addresses; the last one is not full.
        self._blocks: list[tuple[int, Buffer]] = []
        self._end, self._bytes, self._refused = 0, 0, False

    @classmethod
    def start(cls) -> "BatchMemory | None":
        """The memory of this process; None if the system has no such memory, or refuses it."""
        return cls(_torchobj.NativeBlocks()) if start_prefetcher() else None

    def allocate(self, size: int, *, following: int = 0) -> Span | None:
        """Memory for `size` bytes of the current batch, with undefined content. None if the limit does not allow it.

        Args:
            size: Number of bytes; at least 1.
            following: Number of bytes, aligned, that will be allocated next: a new block has space for them.
        """
        with self._lock:
            start = self._end
            if not self._blocks or start + size > len(self._blocks[-1][1]):
                previous = 0 if self._blocks else self._previous_bytes
                block = self._block(size, preferred=max(aligned(size) + following, previous))
                if block is None:
                    return None
                self._blocks.append(block)
                start = 0
            self._end = start + aligned(size)
            self._bytes += aligned(size)
            return Span(self._blocks[-1][1], start)

    def _block(self, size: int, *, preferred: int) -> tuple[int, Buffer] | None:
        if self._refused or self._native is None:
            return None
        buffer = self._native.block(size, preferred)
        self._refused = buffer is None
        return None if buffer is None else (_address_of(buffer), buffer)

    def find(self, address: int, size: int) -> Span | None:
        """The part of the current batch's blocks with this address; None if it is elsewhere."""
        with self._lock:
            for start, buffer in self._blocks:
                if start <= address and address + size <= start + len(buffer):
                    return Span(buffer, address - start)
        return None

    def end_batch(self) -> None:
        """Ends the current batch: the next one is allocated elsewhere."""
        with self._lock:
            if self._bytes:
                self._previous_bytes = self._bytes
            self._reset()

    def use(self) -> None:
        """Makes this the memory of the current process, a worker."""
        if self._descriptors is not None:
            worker_process.exit_with_trainer()
            file, eventfd = self._descriptors.copies()
            try:
                self._native = _torchobj.NativeBlocks.attach(self._owner, file, eventfd)
            except OSError:
                # The address space of a spawned worker may be limited separately: torch's own memory is used.
                self._native = None
            self._descriptors = None
        _of_process.clear()
        _of_process[os.getpid()] = self

    def reclaim(self, workers: Sequence[Any]) -> None:
        """Recycles what these processes, if they have exited, had sent: the iterator that would receive it is gone."""
        if self._native is not None and self._native.owner == os.getpid():
            self._native.reclaim([worker.pid for worker in workers if worker.exitcode is not None])

    def __getstate__(self) -> dict[str, Any]:
        if self._native is None or not worker_process.is_pickling_for_spawn():
            raise TypeError("the memory of a loader can be sent to the loader's workers only")
        return {"owner": self._native.owner, "descriptors": Descriptors.to_new_process(*self._native.descriptors())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._native, self._owner, self._descriptors = None, state["owner"], state["descriptors"]
        self._lock = threading.RLock()
        self._previous_bytes = 0
        self._reset()


#: By process, because a fork copies it.
_of_process: dict[int, BatchMemory] = {}


def current_memory() -> BatchMemory | None:
    """The memory of batches, in a worker of a `torchobj.DataLoader`; None in any other process."""
    return _of_process.get(os.getpid())


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


def _address_of(buffer: Buffer) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
