"""The memory of tensors as arrays of bytes, without torch's own `numpy()`. Does not import torch."""

import ctypes
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    import torch

__all__ = ["memory_of"]

#: Larger than any memory: an array begins where a tensor does, and is cut to its length.
_FAR: Any = ctypes.c_ubyte * (1 << 62)


def memory_of(tensor: "torch.Tensor") -> Any:
    """The memory of a tensor, shared, and kept while the array lives.

    `Tensor.numpy()` would forbid for ever that the tensor's storage is resized, which FSDP and others do to theirs.
    What is resized while the array is used, is used after it was freed.

    Args:
        tensor: A contiguous one on the CPU, of any dtype and shape.

    Returns:
        uint8 array of shape (nbytes,), writable.

    Raises:
        ValueError: Its bytes are no contiguous memory of this machine, or are not what its elements are.

    Example:
        >>> import torch
        >>> memory_of(torch.ones(1)).tolist()
        [0, 0, 128, 63]
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"a tensor on {tensor.device} with strides {tensor.stride()}: its bytes are not as they stand")
    length, address = tensor.nbytes, tensor.data_ptr()
    if not length:
        return numpy.empty(0, numpy.uint8)
    if not address:
        raise ValueError(f"a {type(tensor).__name__} of {length} bytes without memory")
    memory = _FAR.from_address(address)
    memory.owner = tensor
    return numpy.frombuffer(memory, numpy.uint8, length)
