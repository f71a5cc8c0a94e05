"""Puts a state that was read into the objects that are to have it: first all checks, then all copies."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from torchobj.checkpoint.snapshot import is_stateful
from torchobj.exceptions import CheckpointError

__all__ = ["fill"]


def fill(into: Any, loaded: Mapping[Any, Any], source: str) -> None:
    """Puts `loaded` into `into`.

    Tensors are copied into those that are there, objects with `load_state_dict` load theirs, dicts are entered, and any
    other value is replaced. What is loaded and not in `into` is left out.

    Args:
        into: A dict as it was given to `save`.
        loaded: What was read.
        source: Where from, for errors.

    Raises:
        CheckpointError: A value is missing, or of another shape or dtype. Nothing was changed then, unless a
            `load_state_dict` of another's refused what it got.
    """
    work: list[Callable[[], object]] = []
    _plan(into, loaded, "", source, work)
    for put in work:
        put()


def _plan(into: Any, loaded: Any, name: str, source: str, work: list[Callable[[], object]]) -> None:
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{source}: {name or 'the state'} is a {type(loaded).__name__} there, and a dict here")
    for key, value in into.items():
        inner = f"{name}.{key}" if name else str(key)
        if key not in loaded:
            raise CheckpointError(f"{source}: has no {inner}; it has {', '.join(map(str, loaded)) or 'nothing'}")
        there = loaded[key]
        if isinstance(value, torch.Tensor):
            _check_tensor(value, there, inner, source)
            work.append(partial(_copy, value, there))
        elif is_stateful(value):
            if isinstance(value, torch.nn.Module):
                _check_module(value, there, inner, source)
            work.append(partial(value.load_state_dict, there))
        elif type(value) is dict:
            _plan(value, there, inner, source, work)
        else:
            work.append(partial(into.__setitem__, key, there))


def _check_tensor(here: torch.Tensor, there: Any, name: str, source: str) -> None:
    if not isinstance(there, torch.Tensor):
        raise CheckpointError(f"{source}: {name} is a {type(there).__name__} there, and a tensor here")
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        there_is, here_is = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (there, here))
        raise CheckpointError(f"{source}: {name} is {there_is} there, and {here_is} here")


def _check_module(module: torch.nn.Module, there: Any, name: str, source: str) -> None:
    here = module.state_dict()
    if not isinstance(there, Mapping):
        raise CheckpointError(f"{source}: {name} is a {type(there).__name__} there, and a module here")
    missing, strange = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    if missing or strange:
        raise CheckpointError(f"{source}: {name} is of another module: missing {missing}, unknown {strange}")
    for key, tensor in here.items():
        # A module casts what it loads, but takes no other shape.
        if isinstance(tensor, torch.Tensor) and getattr(there[key], "shape", None) != tensor.shape:
            shape = tuple(getattr(there[key], "shape", ()))
            raise CheckpointError(f"{source}: {name}.{key} is {shape} there, and {tuple(tensor.shape)} here")


def _copy(here: torch.Tensor, there: torch.Tensor) -> None:
    # What torch.distributed.checkpoint filled is there already.
    if here is not there:
        with torch.no_grad():
            here.copy_(there)
