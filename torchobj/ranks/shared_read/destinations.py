"""What a read fills: writable buffers, and uint8 tensors of devices that the store cannot access."""

from typing import Any

import torch

from torchobj.store.tensor_memory import memory_of

__all__ = ["destination_of", "fill", "part_of"]


def destination_of(target: torch.Tensor) -> Any:
    """Returns the memory of a uint8 tensor on the CPU; the tensor itself if it is on another device."""
    return memory_of(target) if target.is_cpu else target


def part_of(destination: Any, start: int, length: int) -> Any:
    """Returns `length` bytes of a destination, which are a destination too."""
    whole = destination if isinstance(destination, torch.Tensor) else memoryview(destination).cast("B")
    return whole[start : start + length]


def fill(destination: Any, data: Any) -> None:
    """Copies bytes, of any buffer, into a destination of the same length."""
    if isinstance(destination, torch.Tensor):
        # torch warns of memory that is read-only.
        writable = bytearray(data) if memoryview(data).readonly else data
        destination.copy_(torch.frombuffer(writable, dtype=torch.uint8))
    else:
        memoryview(destination).cast("B")[:] = data
