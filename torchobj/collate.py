"""Collation into recycled shared memory, for workers of a `torchobj.DataLoader`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate

from torchobj.datasets.batch_memory import current_memory

__all__ = ["default_collate", "empty"]


def empty(size: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised tensor on the CPU, for a collate function that fills it.

    In a worker of a `torchobj.DataLoader` the memory is that of the batch: the trainer receives it without a copy. It
    is recycled when the trainer has deleted all tensors that view it. Elsewhere, and if the batch does not fit the
    memory for batches, it is ordinary memory.

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
    shape = (size,) if isinstance(size, int) else tuple(size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor = _in_block(shape, dtype)
    return torch.empty(shape, dtype=dtype) if tensor is None else tensor


def _in_block(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    memory = current_memory()
    if memory is None or any(length <= 0 for length in shape):
        return None
    count = math.prod(shape)
    span = memory.allocate(count * dtype.itemsize)
    if span is None:
        return None
    return torch.frombuffer(span.buffer, dtype=dtype, count=count, offset=span.offset).view(shape)


def default_collate(batch: Sequence[Any]) -> Any:
    """Torch's `default_collate`, with the tensors of the batch in memory that is recycled between batches.

    A `torchobj.DataLoader` uses it by default. Call it from a collate function that changes samples first; torch's own
    function allocates new shared memory for each batch.

    Args:
        batch: The samples.

    Returns:
        What `torch.utils.data.default_collate` returns: the same types, shapes, strides and values. Entries of torch's
        `default_collate_fn_map` are used.

    Raises:
        RuntimeError: As for torch: tensors of different shapes, and others.
        TypeError: As for torch: samples of a type that cannot be combined.

    Example:
        >>> default_collate([{"x": 1, "y": 2.0}, {"x": 3, "y": 4.0}])
        {'x': tensor([1, 3]), 'y': tensor([2., 4.], dtype=torch.float64)}
    """
    functions = dict(torch_collate.default_collate_fn_map)
    if current_memory() is not None and functions.get(torch.Tensor) is torch_collate.collate_tensor_fn:
        functions[torch.Tensor] = _collate_tensors
    return torch_collate.collate(batch, collate_fn_map=functions)


def _collate_tensors(
    batch: Sequence[torch.Tensor], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None
) -> torch.Tensor:
    elem = batch[0]
    if _is_plain(elem) and all(type(other) is torch.Tensor and other.shape == elem.shape for other in batch):
        out = _in_block((len(batch), *elem.shape), elem.dtype)
        if out is not None:
            return torch.stack(tuple(batch), 0, out=out)
    stacked: torch.Tensor = torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    return stacked


def _is_plain(elem: torch.Tensor) -> bool:
    return (
        type(elem) is torch.Tensor
        and elem.device.type == "cpu"
        and elem.layout is torch.strided
        and not (elem.is_nested or elem.is_quantized or elem.is_conj() or elem.is_neg())
    )
