"""Restores objects from a state that was loaded: checks everything first, then copies."""

import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from torchobj.checkpoint.entries import Path, name_of, wrapper_remedy
from torchobj.checkpoint.load import load
from torchobj.checkpoint.ranks import Ranks
from torchobj.checkpoint.state import own_state, take_state
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.stateful import is_stateful

__all__ = ["planned", "restore_file"]

logger = logging.getLogger("torchobj")

#: Maximum number of names in an error.
_LISTED = 5

#: Steps that restore objects, after everything was checked.
Work = list[Callable[[], object]]


def restore_file(
    into: MutableMapping[str, Any], url: str, config: StoreConfig, ranks: Ranks, *, weights_only: bool, source: str
) -> None:
    """Restores `into` from a file of `torchobj.save`, as `planned` does. Reads only the entries of `into`.

    Tensors and modules are read directly into their memory. The states of other objects, such as optimizers, which may
    not have a state yet, are read into new memory.

    Raises:
        CheckpointError: As for `planned`; everything is checked before the first copy.
        ConfigError: A tensor of `into` is sharded among ranks.
    """
    taken = take_state(into)
    taken.check_unsharded()
    # Names that are not strings cannot be selected: then the whole file is loaded.
    has_names = all(isinstance(name, str) for name in into)
    in_place = [name for name, value in into.items() if has_names and _is_memory(value)]
    others = into.keys() - in_place
    work: Work = []
    if others:
        keys = others if has_names else None
        loaded = _load_entries(url, config, keys, weights_only=weights_only, source=source)
        # Without entries that are not asked for, which may be of another number of ranks.
        loaded = {name: loaded[name] for name in others if name in loaded} if isinstance(loaded, dict) else loaded
        work += planned(into, own_state(loaded, ranks, source), source, others)
    if in_place:
        memory: Any = {name: taken.tree[name] for name in in_place}
        try:
            load(url, None, weights_only, in_place, into=memory, config=config)
        except ConfigError as error:
            # A module casts values of another dtype, and ranks may have tensors of their own; `planned` reports other
            # differences.
            logger.debug("%s: not read in place: %s", source, error)
            memory = _load_entries(url, config, in_place, weights_only=weights_only, source=source)
            memory = own_state(memory, ranks, source)
        work += planned(into, memory, source, in_place)
    for step in work:
        step()


def _load_entries(
    url: str, config: StoreConfig, names: Collection[str] | None, *, weights_only: bool, source: str
) -> Any:
    """Loads entries of a file, or all of them.

    Raises:
        CheckpointError: The file does not have all of them.
    """
    if names is None:
        return load(url, "cpu", weights_only, config=config)
    try:
        return load(url, "cpu", weights_only, sorted(names), config=config)
    except ConfigError:
        there = load(url, "meta", weights_only, config=config)
        missing = sorted(name for name in names if name not in there)
        if not missing:
            raise
        raise CheckpointError(f"{source}: has no {', '.join(missing)}; it has {', '.join(map(str, there))}") from None


def _is_memory(value: Any) -> bool:
    """Returns whether a value consists of tensors that exist already."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    return isinstance(value, Mapping) and not is_stateful(value) and all(map(_is_memory, value.values()))


def planned(into: Any, loaded: Mapping[Any, Any], source: str, names: Collection[Any] | None = None) -> Work:
    """Checks that `loaded` fits `into`, and returns the steps that restore it.

    Tensors are copied into existing tensors, objects with `load_state_dict` load their state, mappings are entered, and
    other values are replaced. Entries that `into` does not have are ignored at the top, but not in nested mappings.

    Args:
        into: A dict as passed to `save`.
        loaded: The loaded state.
        source: The checkpoint, for errors.
        names: Restore only these entries; all if None.

    Raises:
        CheckpointError: A value is missing, unknown, or differs in shape or dtype. A step raises it if the
            `load_state_dict` of an object fails.
    """
    _check_mapping(loaded, "the state", source)
    return _planned(into, loaded, (), source, into.keys() if names is None else names)


def _planned(into: Any, loaded: Any, path: Path, source: str, names: Collection[Any]) -> Work:
    work: Work = []
    for key, value in into.items():
        if key not in names:
            continue
        name = name_of((*path, key))
        if key not in loaded:
            remedy = wrapper_remedy(into.keys() - loaded.keys(), loaded.keys() - into.keys())
            raise CheckpointError(f"{source}: has no {name}; it has {', '.join(map(str, loaded)) or 'nothing'}{remedy}")
        there = loaded[key]
        if isinstance(value, torch.Tensor):
            _check_tensor(value, there, name, source)
            work.append(partial(_copy, value, there))
        elif is_stateful(value):
            _check_object(value, there, name, source)
            work.append(partial(_load_state, value, there, name, source))
        elif isinstance(value, Mapping):
            _check_mapping(there, name, source)
            work += _planned(value, there, (*path, key), source, value.keys())
            if unknown := [f"{name}.{below}" for below in there if below not in value]:
                raise CheckpointError(f"{source}: has {', '.join(unknown[:_LISTED])}, which into does not have")
        else:
            work.append(partial(into.__setitem__, key, there))
    return work


def _check_mapping(there: Any, name: str, source: str) -> None:
    if not isinstance(there, Mapping):
        raise _difference(source, name, there, "dict")


def _check_object(value: Any, there: Any, name: str, source: str) -> None:
    if isinstance(value, torch.nn.Module):
        _check_module(value, there, name, source)
    elif isinstance(value, torch.optim.Optimizer):
        _check_optimizer(value, there, name, source)


def _difference(source: str, name: str, there: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"{source}: {name} is a {type(there).__name__} there, and a {expected} here")


def _check_tensor(here: torch.Tensor, there: Any, name: str, source: str) -> None:
    if not isinstance(there, torch.Tensor):
        raise _difference(source, name, there, "tensor")
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        there_is, here_is = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (there, here))
        raise CheckpointError(f"{source}: {name} is {there_is} there, and {here_is} here")


def _check_module(module: torch.nn.Module, there: Any, name: str, source: str) -> None:
    here = module.state_dict()
    if not isinstance(there, Mapping):
        raise _difference(source, name, there, "module")
    missing, unknown = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    if missing or unknown:
        remedy = wrapper_remedy(missing, unknown)
        raise CheckpointError(f"{source}: {name} is of another module: missing {missing}, unknown {unknown}{remedy}")
    for key, tensor in here.items():
        # A module casts other dtypes, but accepts no other shape.
        if isinstance(tensor, torch.Tensor) and getattr(there[key], "shape", None) != tensor.shape:
            shape = tuple(getattr(there[key], "shape", ()))
            raise CheckpointError(f"{source}: {name}.{key} is {shape} there, and {tuple(tensor.shape)} here")


def _check_optimizer(optimizer: torch.optim.Optimizer, there: Any, name: str, source: str) -> None:
    """Checks what `load_state_dict` of torch's optimizers checks."""
    groups = there.get("param_groups") if isinstance(there, Mapping) else None
    if not isinstance(groups, list):
        raise _difference(source, name, there, "optimizer")
    counts_there = [len(group["params"]) for group in groups]
    counts_here = [len(group["params"]) for group in optimizer.param_groups]
    if counts_there != counts_here:
        message = f"{name} has groups of {counts_there} parameters there, and of {counts_here} here"
        raise CheckpointError(f"{source}: {message}")


def _load_state(value: Any, state: Any, name: str, source: str) -> None:
    try:
        value.load_state_dict(state)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        message = f"{name}: {type(value).__name__} refuses its state; earlier entries are restored"
        raise CheckpointError(f"{source}: {message}: {error}") from error


def _copy(here: torch.Tensor, there: torch.Tensor) -> None:
    # The same tensor if it was read in place.
    if here is not there:
        with torch.no_grad():
            here.copy_(there)
