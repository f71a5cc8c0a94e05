"""What a caller gives to be read or written to, as what has the buffer protocol. Never imports torch."""

import sys
from typing import Any

from torchobj.exceptions import ConfigError

__all__ = ["contiguous"]


def contiguous(buffer: Any) -> Any:
    """A tensor of torch as what has the buffer protocol; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(buffer, torch.Tensor):
        return buffer
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ConfigError(f"a tensor on {buffer.device} with strides {buffer.stride()}: must be contiguous, on the CPU")
    from torchobj.checkpoint.memory import memory_of  # noqa: PLC0415  imports numpy

    try:
        return memory_of(buffer.detach())
    except ValueError as error:
        raise ConfigError(str(error)) from None
