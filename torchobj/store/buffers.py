"""Converts arguments to objects with the buffer protocol. Does not import torch itself."""

import sys
from typing import Any

from torchobj.exceptions import ConfigError

__all__ = ["contiguous"]


def contiguous(buffer: Any) -> Any:
    """The memory of a torch tensor, as an object with the buffer protocol; other objects unchanged."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(buffer, torch.Tensor):
        return buffer
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ConfigError(f"a tensor on {buffer.device} with strides {buffer.stride()}: must be contiguous, on the CPU")
    from torchobj.store.tensor_memory import memory_of  # noqa: PLC0415  imports numpy

    try:
        return memory_of(buffer.detach())
    except ValueError as error:
        raise ConfigError(str(error)) from None
