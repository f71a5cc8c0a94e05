"""Transfers bytes between the store and devices whose memory it cannot access, through a few blocks on the CPU."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias
from zlib import crc32

import torch

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
]

BLOCK_BYTES = 8 << 20
#: Maximum size of all blocks in use.
BLOCKS_BYTES = 64 << 20

#: Reads (offset in the object, writable memory) pairs.
Read: TypeAlias = Callable[[Sequence[tuple[int, Any]]], object]


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
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Huge pages cause fewer page faults during the first copy.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def fill(destinations: Sequence[tuple[int, torch.Tensor]], read: Read, *, checksum: bool) -> list[int]:
    """Reads into memory of devices through two windows: one is read while the other is copied.

    Args:
        destinations: Offset in the object and target of each range; targets are uint8 tensors of shape (nbytes,).
        read: Called from another thread, one call at a time.
        checksum: Whether to compute CRC-32.

    Returns:
        The CRC-32 of each destination; 0 without `checksum`.
    """
    cuda_devices = {target.device for _, target in destinations if target.device.type == "cuda"}
    pinned = bool(cuda_devices)
    sums = [0] * len(destinations)
    windows = list(_windows([len(target) for _, target in destinations]))
    with ThreadPoolExecutor(1, thread_name_prefix="torchobj-device") as reader:
        size = min(BLOCKS_BYTES // 2, sum(len(target) for _, target in destinations))
        memory = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in windows[:2]]

        def start(number: int) -> Any:
            lengths = [length for _, _, length in windows[number]]
            blocks = memory[number % 2][: sum(lengths)].split(lengths)
            offsets = [destinations[index][0] + begin for index, begin, _ in windows[number]]
            return blocks, reader.submit(read, list(zip(offsets, map(memory_of, blocks), strict=True)))

        pending: Any = start(0) if windows else None
        for number, window in enumerate(windows):
            blocks, done = pending
            done.result()
            if number + 1 < len(windows):
                pending = start(number + 1)
            for (index, begin, length), block in zip(window, blocks, strict=True):
                if checksum:
                    sums[index] = crc32(memory_of(block), sums[index])
                destinations[index][1][begin : begin + length].copy_(block, non_blocking=pinned)
            # The blocks of this window are filled again by the next read but one.
            for device in cuda_devices:
                torch.cuda.synchronize(device)
    return sums


def _windows(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Divides destinations, in order, into windows of at most half of `BLOCKS_BYTES`.

    Yields:
        For each part of a window the index of its destination, its offset there, and its length.
    """
    window: list[tuple[int, int, int]] = []
    limit = left = BLOCKS_BYTES // 2
    for index, total in enumerate(lengths):
        begin = 0
        while begin < total:
            length = min(left, total - begin)
            window.append((index, begin, length))
            begin, left = begin + length, left - length
            if not left:
                yield window
                window, left = [], limit
    if window:
        yield window
