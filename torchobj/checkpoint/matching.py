"""Compares a state that is to be filled with the metadata of a distributed checkpoint. Reads and writes no store.

`torch.distributed.checkpoint` reads the names that it is asked for, and is silent about those that it is not.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchobj.exceptions import CheckpointError
from torchobj.stateful import is_stateful

__all__ = ["match"]

#: So many of the names that do not fit are told.
_NAMED = 5


class _There(NamedTuple):
    """What a checkpoint has."""

    described: dict[str, Any]
    """Size and dtype of tensors, by name."""
    paths: dict[str, tuple[Any, ...]]
    """The keys that lead to what has a name; all strings, but those of lists."""
    source: str


def match(into: Mapping[str, Any], taken: dict[str, Any], metadata: Metadata, source: str) -> None:
    """Gives optimizers and loaders in `taken` the names that the checkpoint has of them, and compares all others.

    An optimizer that has not stepped has no state yet, so it gets memory for the one that was saved. A loader's state
    of layout 1 has a list of tensors where today's has one value.

    Args:
        into: What is to be filled.
        taken: Its state, with containers of its own.
        metadata: Of the checkpoint.
        source: Where from, for errors.

    Raises:
        CheckpointError: Below a name of `into` the checkpoint has more, less, or what is of another shape or dtype.
    """
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    described = metadata.state_dict_metadata
    there = _There(described, {name: paths.get(name) or tuple(name.split(".")) for name in described}, source)
    tops = {path[0] for path in there.paths.values()}
    _match_objects(into, taken, (), there)
    try:
        here = flatten_state_dict(taken)[0]
    except ValueError as error:
        raise CheckpointError(f"{source}: two entries of into have one name: {error}") from error
    for name in taken:
        if str(name) not in tops and any(key == name or key.startswith(f"{name}.") for key in here):
            raise CheckpointError(f"{source}: has no {name}; it has {', '.join(sorted(map(str, tops)))}")
    given = set(map(str, taken))
    plain = {id(tensor) for tensor in _plain(into)}
    wrong = [f"{name} is not there" for name in sorted(here.keys() - described.keys())]
    wrong += [f"{name} is there only" for name, path in there.paths.items() if path[0] in given and name not in here]
    misfits = (_misfit(name, value, described[name], plain) for name, value in here.items() if name in described)
    wrong += [misfit for misfit in misfits if misfit is not None]
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise CheckpointError(f"{source}: does not fit: {'; '.join(wrong[:_NAMED])}{more}")


def _misfit(name: str, value: Any, described: Any, plain: set[int]) -> str | None:
    if not isinstance(described, TensorStorageMetadata):
        # Values of objects may have been tensors elsewhere; a tensor that was given is to be filled.
        return f"{name} is no tensor there, and one here" if id(value) in plain else None
    if not isinstance(value, torch.Tensor):
        size = getattr(value, "size", None)
        return None if callable(size) else f"{name} is a tensor there, and a {type(value).__name__} here"
    there, here = (described.size, described.properties.dtype), (value.size(), value.dtype)
    # A module and an optimizer cast what they load, but take no other shape.
    if there[0] == here[0] and (there[1] == here[1] or id(value) not in plain):
        return None
    there_is, here_is = (f"{tuple(size)} {dtype}" for size, dtype in (there, here))
    return f"{name} is {there_is} there, and {here_is} here"


def _plain(value: Any) -> list[torch.Tensor]:
    """The tensors that are no object's."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping) and not is_stateful(value):
        return [tensor for inner in value.values() for tensor in _plain(inner)]
    return []


def _match_objects(into: Mapping[Any, Any], taken: Any, outer: tuple[str, ...], there: _There) -> None:
    for key, value in into.items():
        path = (*outer, str(key))
        if isinstance(value, torch.optim.Optimizer):
            state = taken[key].get("state")
            if isinstance(state, dict):
                taken[key]["state"] = _state_of(value, state, path, there)
        elif is_stateful(value):
            _match_lists(taken[key], path, there)
        elif isinstance(value, Mapping):
            _match_objects(value, taken[key], path, there)


def _match_lists(state: Any, path: tuple[str, ...], there: _There) -> None:
    """Replaces values of an object's state by lists of tensors, where the checkpoint has those."""
    if not isinstance(state, dict):
        return
    lists: dict[str, dict[int, torch.Tensor]] = {}
    for name, where in there.paths.items():
        described = there.described[name]
        *outer, key, number = where if len(where) > 1 else (None, None)
        if tuple(outer) != path or type(number) is not int or not isinstance(described, TensorStorageMetadata):
            continue
        if key in state and (state[key] is None or isinstance(state[key], bytes)):
            tensor = torch.zeros(described.size, dtype=described.properties.dtype)
            lists.setdefault(key, {})[number] = tensor
    for key, tensors in lists.items():
        state[key] = [tensors[number] for number in sorted(tensors)]


def _state_of(
    optimizer: torch.optim.Optimizer, has: dict[Any, Any], path: tuple[str, ...], there: _There
) -> dict[Any, Any]:
    """The optimizer's state with the names of the checkpoint, in its memory where it has any."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    depth = len(path) + 1
    state: dict[Any, Any] = {}
    for name, where in there.paths.items():
        if where[:depth] != (*path, "state"):
            continue
        number, *inner = where[depth:]
        if not (str(number).isdecimal() and len(inner) == 1):
            # Not as torch's optimizers have it: it must be here already.
            return has
        if int(number) >= len(parameters):
            message = f"{name} is of an optimizer of more than {len(parameters)} parameters"
            raise CheckpointError(f"{there.source}: {message}")
        old = has.get(int(number), {}).get(inner[0])
        room = _room(name, old, parameters[int(number)], there)
        state.setdefault(int(number), {})[inner[0]] = room
    return state


def _room(name: str, old: Any, parameter: torch.Tensor, there: _There) -> Any:
    """A tensor for what is one there."""
    described = there.described[name]
    if not isinstance(described, TensorStorageMetadata):
        return old
    if isinstance(old, torch.Tensor):
        return old
    size, dtype = described.size, described.properties.dtype
    if size == parameter.size():
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and size.numel() > 1:
        message = f"{name} is {tuple(size)}, and its parameter {tuple(parameter.size())}: nothing says how to divide it"
        raise CheckpointError(f"{there.source}: {message}; let the optimizer step once before")
    return torch.zeros(size, dtype=dtype)
