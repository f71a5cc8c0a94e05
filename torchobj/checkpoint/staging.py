"""Bytes between memory that the store can reach and devices that it cannot, by way of a few blocks of memory."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import torch

from torchobj.checkpoint.memory import memory_of

__all__ = ["BLOCK_BYTES", "STAGING_BYTES", "Landing", "bytes_of", "fill", "is_reachable", "room", "storage_of", "taken"]

BLOCK_BYTES = 8 << 20
#: All blocks that are in use at once.
STAGING_BYTES = 64 << 20

#: Reads (offset in the object, writable memory) pairs.
Read: TypeAlias = Callable[[Sequence[tuple[int, Any]]], None]


class Landing(NamedTuple):
    """Bytes of an object, and where they belong: a uint8 tensor of shape (nbytes,), on any device."""

    offset: int
    target: torch.Tensor


def is_reachable(device: torch.device) -> bool:
    """Whether memory of this device can be read and written as it is."""
    return device.type == "cpu"


def storage_of(nbytes: int, device: torch.device | str = "cpu") -> torch.UntypedStorage:
    """A new storage of `nbytes` bytes, which hold anything."""
    new: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = new(nbytes, device=device)
    return storage


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes: uint8 tensor of shape (nbytes,) on its device, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def taken(storage: torch.UntypedStorage) -> Iterator[Any]:
    """The bytes of a storage on a device, copied block by block: uint8 arrays of at most `BLOCK_BYTES`, each its own.

    They are pinned where the device is CUDA; torch's own cache of pinned memory reuses those that were dropped.
    """
    source = bytes_of(storage)
    for start in range(0, len(source), BLOCK_BYTES):
        part = source[start : start + BLOCK_BYTES]
        block = room(len(part), pinned=storage.device.type == "cuda")
        block.copy_(part)
        yield memory_of(block)


def room(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """New memory: uint8 tensor of shape (nbytes,), on the CPU. The system has it back when it is dropped.

    Not so what glibc gives: it finds no room for an aligned block in the hole that one of the same size left, and took
    150 MiB for 32 MiB that were in use.
    """
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Large pages, where the system has them: fewer faults at the first copy.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def fill(landings: Sequence[Landing], read: Read, *, checksum: bool) -> list[int]:
    """Reads into memory that cannot be reached, through two windows of memory: one is read while the other is copied.

    Args:
        landings: What is wanted, of any number and size.
        read: Called from another thread, never twice at once.
        checksum: Whether to compute CRC-32.

    Returns:
        The CRC-32 of each landing, in their order; zeros where none was asked for.
    """
    pinned = any(landing.target.device.type == "cuda" for landing in landings)
    sums = [0] * len(landings)
    windows = list(_windows(landings))
    with ThreadPoolExecutor(1, thread_name_prefix="torchobj-staging") as reader:
        size = min(STAGING_BYTES // 2, max((_length(window) for window in windows), default=0))
        memory = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in windows[:2]]

        def start(number: int) -> Any:
            pieces = _pieces(windows[number], memory[number % 2])
            segments = [(landings[which].offset + begin, memory_of(block)) for which, begin, block in pieces]
            return pieces, reader.submit(read, segments)

        coming = [start(0)] if windows else []
        for number in range(len(windows)):
            pieces, done = coming.pop()
            done.result()
            if number + 1 < len(windows):
                coming.append(start(number + 1))
            for which, begin, block in pieces:
                if checksum:
                    sums[which] = crc32(memory_of(block), sums[which])
                landings[which].target[begin : begin + len(block)].copy_(block, non_blocking=pinned)
            if pinned:
                torch.cuda.synchronize()
    return sums


#: Bytes of landings: (which landing, from where in it, how many).
_Window: TypeAlias = list[tuple[int, int, int]]


def _windows(landings: Sequence[Landing]) -> Iterator[_Window]:
    """The landings' bytes, in order, in lots of at most half of `STAGING_BYTES`."""
    window: _Window = []
    free = STAGING_BYTES // 2
    for which, landing in enumerate(landings):
        begin = 0
        while begin < len(landing.target):
            length = min(free, len(landing.target) - begin)
            window.append((which, begin, length))
            begin, free = begin + length, free - length
            if not free:
                yield window
                window, free = [], STAGING_BYTES // 2
    if window:
        yield window


def _length(window: _Window) -> int:
    return sum(length for _, _, length in window)


def _pieces(window: _Window, memory: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
    """Each piece of a window with its place in memory."""
    pieces, at = [], 0
    for which, begin, length in window:
        pieces.append((which, begin, memory[at : at + length]))
        at += length
    return pieces
