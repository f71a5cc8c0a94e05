"""Transfers bytes between the store and devices whose memory it cannot access, through a few blocks on the CPU."""

import itertools
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch

from torchobj._torchobj import crc32_combine
from torchobj.exceptions import CheckpointError
from torchobj.store.tensor_memory import memory_of

__all__ = [
    "BLOCKS_BYTES",
    "BLOCK_BYTES",
    "blocks_of",
    "bytes_of",
    "check_memory",
    "fill",
    "is_reachable",
    "new_block",
    "storage_of",
    "synchronize",
]

#: Also the size of a request.
BLOCK_BYTES = 8 << 20
#: Maximum size of all blocks in use: 32 requests in flight.
BLOCKS_BYTES = 256 << 20

#: Reads (offset in the object, writable memory) pairs, and returns the CRC-32 of each.
Read: TypeAlias = Callable[[Sequence[tuple[int, Any]]], Sequence[int]]
#: The index of a destination, an offset in it, and a number of bytes.
_Part: TypeAlias = tuple[int, int, int]
#: A window, its block, the parts of the block, and the read.
_Pending: TypeAlias = tuple[Sequence[_Part], torch.Tensor, Sequence[torch.Tensor], Future[Sequence[int]]]


def is_reachable(device: torch.device) -> bool:
    """Returns whether the store can access memory of this device directly."""
    return device.type == "cpu"


def storage_of(nbytes: int, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    """Returns a new storage of `nbytes` uninitialised bytes."""
    new: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = new(nbytes, device=device)
    return storage


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns the bytes of a storage: uint8 tensor of shape (nbytes,) on its device, which shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def check_memory(tensor: torch.Tensor, name: str = "a tensor") -> None:
    """Checks that the elements of a tensor are within its storage, which may have been resized to free its memory.

    Raises:
        CheckpointError: They are not; a file with them could not be loaded.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return
    if not tensor.numel() or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    needed, held = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed > held:
        raise CheckpointError(
            f"{name} of {tensor.nbytes} bytes has no memory: its storage has {held} of {needed} bytes; "
            "it was freed by resizing the storage, as FSDP does with gathered parameters"
        )


def blocks_of(storage: torch.UntypedStorage) -> Iterator[Any]:
    """Copies a storage of a device to the CPU: yields new uint8 arrays of at most `BLOCK_BYTES`.

    They are pinned if the device is CUDA; torch's cache of pinned memory recycles dropped blocks.
    """
    source = bytes_of(storage)
    for start in range(0, len(source), BLOCK_BYTES):
        part = source[start : start + BLOCK_BYTES]
        block = new_block(len(part), pinned=storage.device.type == "cuda")
        block.copy_(part)
        yield memory_of(block)


def new_block(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Returns new memory on the CPU: uint8 tensor of shape (nbytes,). Pages return to the system when it is dropped.

    glibc's allocator does not reuse the hole that an aligned block of the same size left: it took 150 MiB for 32 MiB in
    use.
    """
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    # Private: a forked child that makes a staged copy would write into that which its parent is saving.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Huge pages cause fewer page faults during the first copy.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Waits until all streams of the GPUs that these tensors are on have finished what they were given so far."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def fill(destinations: Sequence[tuple[int, torch.Tensor]], read: Read, arrived: Callable[[int], object]) -> list[int]:
    """Reads into memory of devices through blocks on the CPU: some are read while others are copied.

    Args:
        destinations: Offset in the object and target of each range; targets are uint8 tensors of shape (nbytes,).
        read: Called from several threads.
        arrived: Called with numbers of bytes that are in their targets.

    Returns:
        The CRC-32 of each destination; 0 if `read` computes none.
    """
    targets = [target for _, target in destinations]
    pinned = any(target.device.type == "cuda" for target in targets)
    sums = [0] * len(destinations)
    windows = _windows(list(map(len, targets)))
    with ThreadPoolExecutor(BLOCKS_BYTES // BLOCK_BYTES, thread_name_prefix="torchobj-device") as readers:

        def start(window: Sequence[_Part], block: torch.Tensor) -> _Pending:
            lengths = [length for _, _, length in window]
            parts = block[: sum(lengths)].split(lengths)
            offsets = [destinations[index][0] + begin for index, begin, _ in window]
            reading = readers.submit(read, list(zip(offsets, map(memory_of, parts), strict=True)))
            return window, block, parts, reading

        pending = deque(
            start(window, new_block(sum(length for _, _, length in window), pinned=pinned))
            for window in itertools.islice(windows, BLOCKS_BYTES // BLOCK_BYTES)
        )
        while pending:
            window, block, parts, reading = pending.popleft()
            for (index, begin, length), part, crc32 in zip(window, parts, reading.result(), strict=True):
                sums[index] = crc32_combine(sums[index], crc32, length)
                targets[index][begin : begin + length].copy_(part, non_blocking=pinned)
            # The block is read into again, or returns to torch's cache.
            synchronize(targets[index] for index, _, _ in window)
            arrived(sum(length for _, _, length in window))
            if (following := next(windows, None)) is not None:
                pending.append(start(following, block))
    return sums


def _windows(lengths: Sequence[int]) -> Iterator[list[_Part]]:
    """Divides destinations, in order, into windows of `BLOCK_BYTES`; the last one may be smaller.

    Yields:
        For each part of a window the index of its destination, its offset there, and its length.
    """
    window: list[_Part] = []
    left = BLOCK_BYTES
    for index, total in enumerate(lengths):
        begin = 0
        while begin < total:
            length = min(left, total - begin)
            window.append((index, begin, length))
            begin, left = begin + length, left - length
            if not left:
                yield window
                window, left = [], BLOCK_BYTES
    if window:
        yield window
