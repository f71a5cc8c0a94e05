"""Collation into recycled shared memory, for workers of a `torchobj.DataLoader`.

torch's `default_collate` stacks tensors in this memory while these workers collate a batch, also when a collate
function calls it.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.data
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from torchobj.reading.ragged import RaggedBatch
from torchobj.workers.batch_memory import SMALL_BYTES, current_memory, view

__all__ = ["RaggedBatch", "default_collate", "empty"]

#: torch's own function, for collate functions that change the samples first.
default_collate: Callable[[Any], Any] = torch.utils.data.default_collate


def empty(size: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor on the CPU, for a collate function that fills it.

    In the collate function of a `torchobj.DataLoader` with workers the memory is that of the batch: the trainer
    receives it without a copy, unless the worker keeps the tensor. It is reused after the trainer has deleted all
    tensors and arrays that view it, and that of a tensor that the function deletes at once. Call this function for each
    batch: a tensor that is filled again changes the batches that were sent. With `batch_size=None` the same holds in
    the dataset, whose samples are the batches. Elsewhere, such as in a transform, up to 4 KiB, and beyond the limit on
    the memory of batches, it is ordinary memory.

    Args:
        size: The shape.
        dtype: None: torch's default dtype.

    Returns:
        A tensor of that shape. Different tensors never share memory.

    Example:
        >>> def padded(samples):
        ...     batch = empty((len(samples), max(map(len, samples))), dtype=torch.uint8).zero_()
        ...     for row, sample in zip(batch, samples):
        ...         row[: len(sample)] = sample
        ...     return batch
        >>> padded([torch.ones(1, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)]).tolist()
        [[1, 0, 0], [1, 1, 1]]
    """
    try:
        shape: tuple[int, ...] = (operator.index(size),)  # type: ignore[arg-type]  # a sequence raises
    except TypeError:
        # Not numpy's integers, whose product may overflow.
        shape = tuple(map(operator.index, size))  # type: ignore[arg-type]
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor = _allocate(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu") if tensor is None else tensor


def _allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """An uninitialised tensor; None if the memory of the batch has no space for it."""
    memory, count = current_memory(), math.prod(shape)
    # Larger tensors only: a small one that is kept, such as labels, would keep the memory of its batch.
    if memory is None or count * dtype.itemsize <= SMALL_BYTES or min(shape) < 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    part = memory.allocate(count * dtype.itemsize)
    return None if part is None else view(part, dtype, offset=0, count=count).view(shape)


#: torch refuses to allocate these, or fails while it stacks them.
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def use_in_worker() -> None:
    """Makes torch's `default_collate` stack tensors in the memory of batches. Called once in each worker."""
    if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
        default_collate_fn_map[torch.Tensor] = _collate_tensors


def _collate_tensors(
    batch: Sequence[torch.Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> torch.Tensor:
    elem = batch[0]
    if _is_plain(elem) and all(type(other) is torch.Tensor and other.shape == elem.shape for other in batch):
        out = _allocate((len(batch), *elem.shape), elem.dtype)
        if out is not None:
            return torch.stack(tuple(batch), 0, out=out)
    stacked: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    return stacked


def _is_plain(elem: torch.Tensor) -> bool:
    return (
        type(elem) is torch.Tensor
        and elem.device.type == "cpu"
        and elem.layout is torch.strided
        and elem.dtype not in _QUANTIZED
        and not (elem.is_nested or elem.is_conj() or elem.is_neg())
    )
