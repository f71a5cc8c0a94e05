"""Copies of a state that `torch.distributed.checkpoint` writes later: of each tensor, or of this rank's part of it.

It writes tensors one by one, so they are copied one by one, and little of a large storage stays little. torch's own
stager asks the system for new memory at each save, which takes five to ten times as long as the copy; and that of torch
2.6 copies nothing that is on the CPU.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torchobj.checkpoint.snapshot import Snapshots
from torchobj.exceptions import CheckpointError

__all__ = ["copied", "with_containers"]


def copied(state: Mapping[Any, Any], snapshots: Snapshots) -> dict[Any, Any]:
    """The state with tensors of its own on the CPU, in the memory that `snapshots` has.

    Args:
        state: Dicts, lists and tuples of tensors, and other values.
        snapshots: Takes nothing else until the copy is no longer used.

    Raises:
        CheckpointError: A tensor has no memory: it was given back, as FSDP gives back what it has gathered.
        Exception: What keeps a value from being copied, as `copy.deepcopy` raises it.
    """
    own = {_place(local): local for local in map(_local, _leaves(state)) if local is not None}

    def copy_of(value: Any) -> Any:
        local = _local(value)
        if local is None:
            return _other(value)
        made = copies[_place(local)]
        # `from_local` would move it to where the ranks compute.
        return DTensor(made, value._spec, requires_grad=False) if isinstance(value, DTensor) else made

    copies = dict(zip(own, snapshots.copies(list(own.values())), strict=True))
    made: dict[Any, Any] = with_containers(state, copy_of)
    return made


def _local(value: Any) -> torch.Tensor | None:
    """What this rank has of a tensor, as memory; None where it is something else."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return None
    is_odd = local.is_quantized or local.is_nested or local.layout is not torch.strided
    is_memory = not is_odd and local.device.type in ("cpu", "cuda")
    if is_memory and local.nbytes and not local.data_ptr():
        raise CheckpointError(f"a tensor of {local.nbytes} bytes has no memory")
    return local.detach() if is_memory else None


def _place(local: torch.Tensor) -> Hashable:
    """The same for two tensors that are one, as tied weights are."""
    kind = (local.dtype, local.device, local.is_conj(), local.is_neg())
    return local.data_ptr(), *kind, tuple(local.shape), local.stride()


@torch.no_grad()
def _other(value: Any) -> Any:
    """A copy of what is no memory: of other values, and of tensors of other layouts and subclasses."""
    if isinstance(value, DTensor):
        return DTensor(_other(value._local_tensor), value._spec, requires_grad=False)
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner)
    else:
        yield value


def with_containers(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with what is in its mappings, lists and tuples changed, and containers of its own.

    They are of the same types, but for mappings that are no dicts: a copy of such may share what it maps.
    """
    made: Any
    if isinstance(value, Mapping):
        made = copy.copy(value) if isinstance(value, dict) else {}
        for key, inner in value.items():
            # Some look at what they are given.
            dict.__setitem__(made, key, with_containers(inner, change))
        return made
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [with_containers(inner, change) for inner in value]
        return made
    if isinstance(value, tuple):
        made = [with_containers(inner, change) for inner in value]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return value._make(made) if hasattr(value, "_make") else tuple(made)
    return change(value)
