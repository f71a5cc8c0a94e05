"""Views of the memory of tensors as arrays of bytes, without `Tensor.numpy()`. Does not import torch."""

import ctypes
import sys
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    import torch

__all__ = ["advise_huge_pages", "memory_of"]

#: Size of a huge page, and the advice to use them (madvise(2)).
_HUGE_PAGE_BYTES, _MADV_HUGEPAGE = 2 << 20, 14

#: Larger than any memory: an array of this type starts at a tensor's address and is truncated to its length.
_FAR: Any = ctypes.c_ubyte * (1 << 62)


def memory_of(tensor: "torch.Tensor") -> Any:
    """Returns the memory of a tensor as an array, which keeps the tensor alive.

    After `Tensor.numpy()` a tensor's storage could never be resized again, which FSDP and others do. Do not resize it
    while the array is in use: the array would access freed memory.

    Args:
        tensor: A contiguous tensor on the CPU, of any dtype and shape.

    Returns:
        uint8 array of shape (nbytes,), writable.

    Raises:
        ValueError: The tensor is not contiguous memory on the CPU, or its bytes are not those of its elements.

    Example:
        >>> import torch
        >>> memory_of(torch.ones(1)).tolist()
        [0, 0, 128, 63]
    """
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"a tensor on {tensor.device} with strides {tensor.stride()}: it is not contiguous memory on the CPU"
        )
    length, address = tensor.nbytes, tensor.data_ptr()
    if not length:
        return numpy.empty(0, numpy.uint8)
    if not address:
        raise ValueError(f"a {type(tensor).__name__} of {length} bytes has no memory")
    memory = _FAR.from_address(address)
    memory.owner = tensor
    return numpy.frombuffer(memory, numpy.uint8, length)


def advise_huge_pages(memory: Any) -> None:
    """Asks the kernel for huge pages where no page of new memory was touched yet: one fault then maps 2 MiB.

    Reads of the store do so themselves; this is for memory that is copied to.

    Args:
        memory: uint8 array of shape (nbytes,).
    """
    if sys.platform != "linux":
        return
    address = memory.ctypes.data
    first = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = (address + memory.nbytes - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if length > 0:
        # Advice only: the contents of the pages do not change, and an error is of no consequence.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
