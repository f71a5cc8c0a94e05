"""Copies of a state that `torch.distributed.checkpoint` writes later: of each tensor, or of this rank's part of it.

It writes tensors one by one, so they are copied one by one, and little of a large storage stays little. torch's own
stager asks the system for new memory at each save, which takes five to ten times as long as the copy; and that of torch
2.6 copies nothing that is on the CPU.
"""

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from torchobj.checkpoint.snapshot import Snapshots

__all__ = ["copied", "with_containers"]


def copied(state: Mapping[Any, Any], snapshots: Snapshots) -> dict[Any, Any]:
    """The state with tensors of its own on the CPU, in the memory that `snapshots` has.

    Args:
        state: Dicts, lists and tuples of tensors, and other values.
        snapshots: Takes nothing else until the copy is no longer used.

    Raises:
        Exception: What keeps a value from being copied, as `copy.deepcopy` raises it.
    """
    own: dict[Hashable, torch.Tensor] = {}

    def note(value: Any) -> None:
        local = _local(value)
        if local is not None:
            own.setdefault(_place(local), local)

    def copy_of(value: Any) -> Any:
        local = _local(value)
        if local is None:
            return _other(value)
        made = copies[_place(local)]
        # `from_local` would move it to where the ranks compute.
        return DTensor(made, value._spec, requires_grad=False) if isinstance(value, DTensor) else made

    with_containers(state, note)
    copies = dict(zip(own, snapshots.copies(list(own.values())), strict=True))
    made: dict[Any, Any] = with_containers(state, copy_of)
    return made


def _local(value: Any) -> torch.Tensor | None:
    """What this rank has of a tensor, as memory; None where it is something else."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        return None
    is_memory = local.layout is torch.strided and not local.is_quantized and local.device.type in ("cpu", "cuda")
    return local.detach() if is_memory else None


def _place(local: torch.Tensor) -> Hashable:
    """The same for two tensors that are one, as tied weights are."""
    kind = (local.dtype, local.device, local.is_conj(), local.is_neg())
    return local.data_ptr(), *kind, tuple(local.shape), local.stride()


def _other(value: Any) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, torch.Tensor):
        return BlockingAsyncStager().stage({"value": value})["value"]
    return copy.deepcopy(value)


def with_containers(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with what is in its mappings, lists and tuples changed, and containers of its own.

    They are of the same types, but for mappings that are no dicts: a copy of such may share what it maps.
    """
    made: Any
    if isinstance(value, Mapping):
        made = copy.copy(value) if isinstance(value, dict) else {}
        for key, inner in value.items():
            made[key] = with_containers(inner, change)
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
