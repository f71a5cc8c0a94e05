"""Decodes tensors of `torch.save` and safetensors."""

import pickle
import struct
from typing import TYPE_CHECKING, Any

from torchobj.decode.data import Data, file_of, memory_of
from torchobj.decode.libraries import library, required

if TYPE_CHECKING:
    import torch

#: The first bytes of an object of `torch.save`: a zip archive, or a pickle of an older version.
_PT_STARTS = (b"PK\x03\x04", b"\x80")


def pt(data: Data, map_location: Any = "cpu") -> Any:
    """Decodes what `torch.save` wrote: tensors, and containers of these and of plain values.

    Args:
        data: The object.
        map_location: Where tensors are placed, as for `torch.load`.

    Raises:
        pickle.UnpicklingError: It contains other classes, which are not loaded, or is damaged.
        ValueError: It is not an object of `torch.save`, is truncated or damaged, or `map_location` is not available.
    """
    file, torch = file_of(data), library("torch")
    start = file.read(4)
    file.seek(0)
    if not start.startswith(_PT_STARTS):
        raise ValueError(f"not an object of torch.save: it begins with {start!r}")
    try:
        return torch.load(file, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, torch.OutOfMemoryError):
        raise
    # What torch raises for a damaged file, which is of many types.
    except (
        RuntimeError,
        ValueError,
        TypeError,
        EOFError,
        AttributeError,
        LookupError,
        AssertionError,
        struct.error,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"an object that torch.load cannot load: {type(error).__name__}: {reason}") from error


def safetensors(data: Data) -> "dict[str, torch.Tensor]":
    """Decodes the tensors of a safetensors file, by name, on the CPU.

    Raises:
        ConfigError: safetensors is not installed.
        safetensors.SafetensorError: It is not a safetensors file.
    """
    load = required("safetensors.torch", "safetensors", "safetensors").load
    tensors: dict[str, torch.Tensor] = load(bytes(memory_of(data)))
    return tensors
