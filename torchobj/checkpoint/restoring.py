"""Puts a state that is read into the objects that are to have it: first all checks, then all copies."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from torchobj.checkpoint.load import load
from torchobj.checkpoint.snapshot import is_stateful, state_of
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError

__all__ = ["fill", "restore_file"]

logger = logging.getLogger("torchobj")


def restore_file(into: dict[str, Any], url: str, config: StoreConfig, *, weights_only: bool, source: str) -> None:
    """Fills `into` from a file that `torchobj.save` wrote, as `fill` does. Reads no more than it is asked for.

    Tensors and modules are read straight into their memory. What has its state otherwise, as an optimizer that may have
    none yet, gets one that was read into memory of its own.

    Raises:
        CheckpointError: As `fill`; every check comes before the first copy.
        ConfigError: The file has no such name.
    """
    if not all(isinstance(name, str) for name in into):
        fill(into, load(url, "cpu", weights_only, config=config), source)
        return
    memory = {name: value for name, value in into.items() if _is_memory(value)}
    rest = into.keys() - memory.keys()
    work: list[Callable[[], object]] = []
    if rest:
        _plan(into, load(url, "cpu", weights_only, sorted(rest), config=config), "", source, work, names=rest)
    if memory:
        taken: Any = state_of(memory)
        try:
            load(url, None, weights_only, list(memory), into=taken, config=config)
        except ConfigError as error:
            # A module casts what is of another dtype; for what does not fit at all there is a better word below.
            logger.debug("%s: not read in place: %s", source, error)
            taken = load(url, "cpu", weights_only, list(memory), config=config)
        _plan(memory, taken, "", source, work)
    for put in work:
        put()


def _is_memory(value: Any) -> bool:
    """Whether all of a value is tensors that are there already."""
    if type(value) is dict:
        return all(map(_is_memory, value.values()))
    return isinstance(value, torch.Tensor | torch.nn.Module)


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


def _plan(
    into: Any,
    loaded: Any,
    name: str,
    source: str,
    work: list[Callable[[], object]],
    *,
    names: Collection[Any] | None = None,
) -> None:
    """Checks, and adds to `work` what is then to be done; at this level for these names only."""
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{source}: {name or 'the state'} is a {type(loaded).__name__} there, and a dict here")
    for key, value in into.items():
        if names is not None and key not in names:
            continue
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
    # What was read in place is there already.
    if here is not there:
        with torch.no_grad():
            here.copy_(there)
