"""Puts a state that is read into the objects that are to have it: first all checks, then all copies."""

import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from torchobj.checkpoint.admission import check_whole
from torchobj.checkpoint.load import load
from torchobj.checkpoint.rank_states import own
from torchobj.checkpoint.ranks import Ranks
from torchobj.checkpoint.snapshot import state_of
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.stateful import is_stateful

__all__ = ["check", "fill", "restore_file"]

logger = logging.getLogger("torchobj")

#: So many of the names that do not fit are told.
_NAMED = 5


def restore_file(
    into: MutableMapping[str, Any], url: str, config: StoreConfig, ranks: Ranks, *, weights_only: bool, source: str
) -> None:
    """Fills `into` from a file that `torchobj.save` wrote, as `fill` does. Reads no more than it is asked for.

    Tensors and modules are read straight into their memory. What has its state otherwise, as an optimizer that may have
    none yet, gets one that was read into memory of its own.

    Raises:
        CheckpointError: As `fill`; every check comes before the first copy.
        ConfigError: A tensor of `into` is divided among ranks.
    """
    check_whole(state_of(into))
    if not all(isinstance(name, str) for name in into):
        fill(into, own(load(url, "cpu", weights_only, config=config), ranks, source), source)
        return
    memory = {name: value for name, value in into.items() if _is_memory(value)}
    rest = into.keys() - memory.keys()
    work: list[Callable[[], object]] = []
    if rest:
        loaded = own(_entries(url, config, rest, weights_only=weights_only, source=source), ranks, source)
        _plan(into, loaded, "", source, work, names=rest)
    if memory:
        taken: Any = state_of(memory)
        try:
            load(url, None, weights_only, list(memory), into=taken, config=config)
        except ConfigError as error:
            # A module casts what is of another dtype; for what does not fit at all there is a better word below.
            logger.debug("%s: not read in place: %s", source, error)
            taken = _entries(url, config, memory, weights_only=weights_only, source=source)
        _plan(memory, taken, "", source, work)
    for put in work:
        put()


def _entries(url: str, config: StoreConfig, names: Collection[str], *, weights_only: bool, source: str) -> Any:
    """These entries of a file.

    Raises:
        CheckpointError: It has not all of them.
    """
    try:
        return load(url, "cpu", weights_only, sorted(names), config=config)
    except ConfigError:
        there = load(url, "meta", weights_only, config=config)
        gone = sorted(name for name in names if name not in there)
        if not gone:
            raise
        raise CheckpointError(f"{source}: has no {', '.join(gone)}; it has {', '.join(map(str, there))}") from None


def _is_memory(value: Any) -> bool:
    """Whether all of a value is tensors that are there already."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    return isinstance(value, Mapping) and not is_stateful(value) and all(map(_is_memory, value.values()))


def fill(into: Any, loaded: Mapping[Any, Any], source: str) -> None:
    """Puts `loaded` into `into`.

    Tensors are copied into those that are there, objects with `load_state_dict` load theirs, mappings are entered, and
    any other value is replaced. What is loaded and not in `into` is left out, but not within a mapping of it.

    Args:
        into: A dict as it was given to `save`.
        loaded: What was read.
        source: Where from, for errors.

    Raises:
        CheckpointError: A value is missing, too many, or of another shape or dtype. Nothing was changed then, unless a
            `load_state_dict` of another's refused what it got.
    """
    for put in check(into, loaded, source):
        put()


def check(into: Any, loaded: Mapping[Any, Any], source: str) -> list[Callable[[], object]]:
    """What `fill` would do, when all of it was found to fit.

    Raises:
        CheckpointError: As `fill`.
    """
    work: list[Callable[[], object]] = []
    _plan(into, loaded, "", source, work)
    return work


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
            _check_object(value, there, inner, source)
            work.append(partial(_give, value, there, inner, source))
        elif isinstance(value, Mapping):
            _plan(value, there, inner, source, work)
        else:
            work.append(partial(into.__setitem__, key, there))
    if name:
        _check_all_taken(into, loaded, name, source)


def _check_all_taken(here: Mapping[Any, Any], there: Mapping[Any, Any], name: str, source: str) -> None:
    strange = [f"{name}.{key}" for key in there if key not in here]
    if strange:
        raise CheckpointError(f"{source}: has {', '.join(strange[:_NAMED])}, and nothing here takes it")


def _check_tensor(here: torch.Tensor, there: Any, name: str, source: str) -> None:
    if not isinstance(there, torch.Tensor):
        raise CheckpointError(f"{source}: {name} is a {type(there).__name__} there, and a tensor here")
    if (here.shape, here.dtype) != (there.shape, there.dtype):
        there_is, here_is = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (there, here))
        raise CheckpointError(f"{source}: {name} is {there_is} there, and {here_is} here")


def _check_object(value: Any, there: Any, name: str, source: str) -> None:
    if isinstance(value, torch.nn.Module):
        _check_module(value, there, name, source)
    elif isinstance(value, torch.optim.Optimizer):
        _check_optimizer(value, there, name, source)


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


def _check_optimizer(optimizer: torch.optim.Optimizer, there: Any, name: str, source: str) -> None:
    """Compares what `load_state_dict` of torch's optimizers compares."""
    groups = there.get("param_groups") if isinstance(there, Mapping) else None
    if not isinstance(groups, list):
        raise CheckpointError(f"{source}: {name} is a {type(there).__name__} there, and an optimizer here")
    counts_there = [len(group["params"]) for group in groups]
    counts_here = [len(group["params"]) for group in optimizer.param_groups]
    if counts_there != counts_here:
        message = f"{name} has groups of {counts_there} parameters there, and of {counts_here} here"
        raise CheckpointError(f"{source}: {message}")


def _give(value: Any, state: Any, name: str, source: str) -> None:
    try:
        value.load_state_dict(state)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        message = f"{name}: {type(value).__name__} refuses its state; what came before it is restored"
        raise CheckpointError(f"{source}: {message}: {error}") from error


def _copy(here: torch.Tensor, there: torch.Tensor) -> None:
    # What was read in place is there already.
    if here is not there:
        with torch.no_grad():
            here.copy_(there)
