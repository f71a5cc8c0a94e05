"""Restores objects from a state that was loaded: checks everything first, then copies."""

import logging
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from torchobj.checkpoint.commit_format import STATE_FILE
from torchobj.checkpoint.entries import Path, name_of, wrapper_remedy
from torchobj.checkpoint.load import load
from torchobj.checkpoint.ranks import Ranks
from torchobj.checkpoint.state import own_state, take_state
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.stateful import is_stateful

__all__ = ["assign", "check", "restore_file"]

logger = logging.getLogger("torchobj")

#: Maximum number of names in an error.
_LISTED = 5


def restore_file(
    into: MutableMapping[str, Any], folder: str, config: StoreConfig, ranks: Ranks, source: str, *, weights_only: bool
) -> None:
    """Restores a state from the file in a folder. Collective. Reads only the entries of `into`.

    Tensors and modules are read directly into their memory. The states of other objects, such as optimizers, which may
    not have a state yet, are read into new memory.

    Raises:
        CheckpointError: As for `check`, before anything is changed, and for `assign`.
        ConfigError: A tensor of `into` is sharded among ranks.
        Exception: A rank could not read. Every error is raised on all ranks.
    """
    url = folder + STATE_FILE
    with ranks.together():
        taken = take_state(into, sharded=False)
        # Names that are not strings cannot be selected: then the whole file is loaded.
        has_names = all(isinstance(name, str) for name in into)
        in_place = {name: value for name, value in into.items() if has_names and _is_memory(value)}
        others = {name: value for name, value in into.items() if name not in in_place}
        loaded: Any = {}
        if others:
            names = others.keys() if has_names else None
            loaded = _load_entries(url, config, names, weights_only=weights_only, source=source)
            if isinstance(loaded, dict):
                # Without entries that are not asked for, which may be of another number of ranks.
                loaded = {name: loaded[name] for name in others if name in loaded}
            loaded = own_state(loaded, ranks, source)
            check(others, loaded, source)
        if in_place:
            memory: Any = {name: taken.tree[name] for name in in_place}
            try:
                load(url, None, weights_only, list(in_place), into=memory, config=config)
            except ConfigError as error:
                # A module casts values of another dtype, and ranks may have tensors of their own; `check` reports other
                # differences.
                logger.debug("%s: not read in place: %s", source, error)
                memory = _load_entries(url, config, in_place, weights_only=weights_only, source=source)
                memory = own_state(memory, ranks, source)
            check(in_place, memory, source)
            loaded |= memory
        assign(into, loaded, source)


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
        saved = load(url, "meta", weights_only, config=config)
        missing = sorted(name for name in names if name not in saved)
        if not missing:
            raise
        raise CheckpointError(f"{source}: has no {', '.join(missing)}; it has {', '.join(map(str, saved))}") from None


def _is_memory(value: Any) -> bool:
    """Returns whether a value consists of tensors that exist already."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    return isinstance(value, Mapping) and not is_stateful(value) and all(map(_is_memory, value.values()))


def check(into: Mapping[Any, Any], saved: Any, source: str) -> None:
    """Checks that a saved state fits the objects to restore.

    Entries that `into` does not have are ignored at the top, but not in nested mappings.

    Args:
        into: A dict as passed to `CheckpointManager.restore`, or a part of it.
        saved: The saved state.
        source: The checkpoint, for errors.

    Raises:
        CheckpointError: A value is missing, unknown, or differs in shape or dtype.
    """
    try:
        _check_entries(into, saved, ())
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _check_entries(into: Mapping[Any, Any], saved: Any, path: Path) -> None:
    if not isinstance(saved, Mapping):
        raise _difference(name_of(path) or "the state", saved, "dict")
    for key, value in into.items():
        name = name_of((*path, key))
        if key not in saved:
            remedy = wrapper_remedy(into.keys() - saved.keys(), saved.keys() - into.keys())
            raise CheckpointError(f"has no {name}; it has {', '.join(map(str, saved)) or 'nothing'}{remedy}")
        if isinstance(value, torch.Tensor):
            _check_tensor(value, saved[key], name)
        elif isinstance(value, torch.nn.Module):
            _check_module(value, saved[key], name)
        elif isinstance(value, torch.optim.Optimizer):
            _check_optimizer(value, saved[key], name)
        elif isinstance(value, Mapping) and not is_stateful(value):
            _check_entries(value, saved[key], (*path, key))
    if path and (unknown := [name_of((*path, key)) for key in saved if key not in into]):
        raise CheckpointError(f"has {', '.join(unknown[:_LISTED])}, which into does not have")


def _difference(name: str, saved: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"{name} is a {type(saved).__name__} there, and a {expected} here")


def _check_tensor(tensor: torch.Tensor, saved: Any, name: str) -> None:
    if not isinstance(saved, torch.Tensor):
        raise _difference(name, saved, "tensor")
    if (tensor.shape, tensor.dtype) != (saved.shape, saved.dtype):
        saved_is, tensor_is = (f"{tuple(each.shape)} {each.dtype}" for each in (saved, tensor))
        raise CheckpointError(f"{name} is {saved_is} there, and {tensor_is} here")


def _check_module(module: torch.nn.Module, saved: Any, name: str) -> None:
    own = module.state_dict()
    if not isinstance(saved, Mapping):
        raise _difference(name, saved, "module")
    missing, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unknown:
        remedy = wrapper_remedy(missing, unknown)
        raise CheckpointError(f"{name} is of another module: missing {missing}, unknown {unknown}{remedy}")
    for key, tensor in own.items():
        # A module casts other dtypes, but accepts no other shape.
        if isinstance(tensor, torch.Tensor) and getattr(saved[key], "shape", None) != tensor.shape:
            shape = tuple(getattr(saved[key], "shape", ()))
            raise CheckpointError(f"{name}.{key} is {shape} there, and {tuple(tensor.shape)} here")


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Any, name: str) -> None:
    """Checks what `load_state_dict` of torch's optimizers checks."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list):
        raise _difference(name, saved, "optimizer")
    saved_counts, counts = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if saved_counts != counts:
        raise CheckpointError(f"{name} has groups of {saved_counts} parameters there, and of {counts} here")


def assign(into: MutableMapping[Any, Any], saved: Mapping[Any, Any], source: str, path: Path = ()) -> None:
    """Restores objects from a saved state that `check` has checked.

    Tensors are copied into existing tensors, objects with `load_state_dict` load their state, mappings are entered, and
    other values are replaced.

    Raises:
        CheckpointError: The `load_state_dict` of an object fails.
    """
    for key, value in list(into.items()):
        if key not in saved:
            continue
        if isinstance(value, torch.Tensor):
            # The same tensor if it was read in place.
            if value is not saved[key]:
                with torch.no_grad():
                    value.copy_(saved[key])
        elif is_stateful(value):
            try:
                value.load_state_dict(saved[key])
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                message = f"{name_of((*path, key))}: {type(value).__name__} refuses its state"
                raise CheckpointError(f"{source}: {message}; earlier entries are restored: {error}") from error
        elif isinstance(value, Mapping):
            assign(value, saved[key], source, (*path, key))  # type: ignore[arg-type]
        else:
            into[key] = saved[key]
