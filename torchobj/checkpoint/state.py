"""Takes the state of objects for a save, with a state of each rank where ranks differ. Reads and writes no store.

One pass over the objects also finds the values that a save or a restore may refuse, so that they are reported when the
checkpoint is saved.

Who saves what, if there are several ranks:
- Modules and optimizers, also as state dicts and within the states of other objects, come from the first rank. They are
  not compared: statistics of BatchNorm differ on every rank. A DDP model of 1 GiB adds 20 ms to a save, on two ranks.
- Tensors that are sharded among ranks come from their owners.
- The ranks compare digests of all other values, which takes 0.7 s for each GiB of their tensors, on all ranks at the
  same time. The first rank saves those that are equal.
- In place of a value that differs, and of the state of each loader, dataset and sampler, a dict with the values of all
  ranks is saved; `own_state` selects that of this rank again.
"""

import collections
import functools
import itertools
import logging
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torchobj.checkpoint.device_memory import check_memory
from torchobj.checkpoint.digest import digest_of
from torchobj.checkpoint.entries import Path, name_of
from torchobj.checkpoint.pickling import refused_global
from torchobj.checkpoint.ranks import Ranks
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.stateful import is_stateful

__all__ = ["TakenState", "own_state", "state_to_save", "take_state", "with_rank_states"]

logger = logging.getLogger("torchobj")

#: Types that every restore accepts.
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Tensor)
_CONTAINERS = (dict, collections.OrderedDict, collections.Counter, list, tuple, set)

#: The only key of a dict with the states of all ranks, which are in a tuple: a distributed checkpoint keeps a tuple as
#: one value.
_RANKS = "torchobj_states_of_ranks"
#: The rank in the state of a sampler; its loader compares it where it matters.
_RANK = "rank"
#: In place of a value that is None, because None stands for a rank without a value.
_NONE = "torchobj_none"

#: What a value contains: tensors that `torch.distributed` manages, states of modules and optimizers.
_SHARDED, _OF_REPLICAS, _NOTHING = frozenset({"sharded"}), frozenset({"of replicas"}), frozenset[str]()


class TakenState(NamedTuple):
    """The state of the objects of a save or a restore."""

    tree: dict[Any, Any]
    """The state, with what `state_dict` returned in place of objects."""
    of_ranks: list[Path]
    """Loaders, datasets and samplers, whose states differ among ranks."""
    compared: dict[Path, Any]
    """Values that may differ among ranks: the largest parts that contain nothing of modules, of optimizers, or of
    sharded tensors, by path."""
    optimizers: list[Path]
    """States of optimizers without sharded tensors."""
    tensors: list[tuple[str, torch.Tensor]]
    unusual: list[tuple[str, Any]]
    """Values that are neither plain nor in a plain container, by name."""


def state_to_save(state: Mapping[Any, Any], ranks: Ranks, *, sharded: bool) -> TakenState:
    """Takes the state of the objects of a save. Collective.

    Warns of values that a restore with `weights_only=True` will refuse; once for each entry.

    A value that only some ranks have, and that is equal on these, is left to `torch.distributed.checkpoint`. An
    optimizer's state is left to the first rank that has it: one of replicas may have entries for other parameters.

    Args:
        state: The objects, as passed to `CheckpointManager.save`.
        ranks: The ranks that save.
        sharded: Whether each rank saves its state shard, or the first rank saves all.

    Returns:
        The state to save. The first rank has the states of all ranks in place of those that differ, and the others have
        none of these.

    Raises:
        ConfigError: As for `take_state`.
        CheckpointError: The memory of a tensor was freed; the message names it.
        Exception: A state cannot be pickled. Every error is raised on all ranks.
    """
    with ranks.together():
        # On all ranks: `state_dict` may be collective.
        taken = take_state(state, sharded=sharded)
        # Only what this rank writes.
        for name, tensor in taken.tensors if sharded or ranks.is_first else ():
            check_memory(tensor, name)
        for name, value in taken.unusual if sharded or ranks.is_first else ():
            if _is_refused(value):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                _warn_once("restore needs weights_only=False for entry %r (%s)", name, kind)
    return _gathered(taken, ranks) if ranks.several else taken


def take_state(state: Mapping[Any, Any], *, sharded: bool) -> TakenState:
    """Takes the state of each value that has `state_dict` and `load_state_dict`.

    Args:
        state: The objects.
        sharded: Whether tensors may be sharded among ranks. One file would contain the shard of one rank only.

    Raises:
        ConfigError: `state` is not a mapping, or has such a value in a list, where it would not be recognised; or a
            tensor is sharded, and may not be.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state is a {type(state).__name__}: must be a dict, as {{'model': model, 'step': 3}}")
    taken = TakenState({}, [], {}, [], [], [])
    for name, value in state.items():
        taken.tree[name] = _take(value, (name,), taken)
    for name, tensor in () if sharded else taken.tensors:
        if (shards := _shard_count(tensor)) > 1:
            raise ConfigError(f"{name} is sharded over {shards} ranks; use CheckpointManager(..., sharded=True)")
    return taken


def _take(value: Any, path: Path, taken: TakenState) -> Any:
    if is_stateful(value):
        state = value.state_dict()
        is_of_rank = isinstance(value, DataLoader | Dataset | Sampler)
        if is_of_rank:
            taken.of_ranks.append(path)
        is_compared = not is_of_rank and not isinstance(value, torch.nn.Module)
        if not _visit(state, path, taken, is_compared=is_compared, may_be_stateful=False) and is_compared:
            taken.compared[path] = state
        return state
    if not isinstance(value, Mapping) or _is_of_replicas(value):
        if not _visit(value, path, taken, is_compared=True, may_be_stateful=type(value) in (list, tuple)):
            taken.compared[path] = value
        return value
    inner = {key: _take(below, (*path, key), taken) for key, below in value.items()}
    # A mapping of another type is pickled in its own way, and kept unless an object in it was replaced.
    if type(value) is dict or any(inner[key] is not below for key, below in value.items()):
        return inner
    if type(value) not in _CONTAINERS:
        taken.unusual.append((name_of(path), value))
    return value


def _visit(value: Any, path: Path, taken: TakenState, *, is_compared: bool, may_be_stateful: bool) -> frozenset[str]:
    """Adds what is in a value to `taken`. The caller adds the value to those that are compared if it contains nothing.

    Args:
        value: The value.
        path: Its path.
        taken: Gets the tensors, the unusual values, and the parts to compare.
        is_compared: Whether to add parts of it that ranks compare, and states of optimizers.
        may_be_stateful: Whether to refuse objects with a state in it.

    Returns:
        What it contains: sharded tensors, states of replicas, or nothing of these.

    Raises:
        ConfigError: The value contains an object with a state, which is refused.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        taken.tensors.append((name_of(path), value))
        return _SHARDED if isinstance(value, ShardedTensor | DTensor) else _NOTHING
    if kind not in _PLAIN and kind not in _CONTAINERS:
        if may_be_stateful and is_stateful(value):
            raise ConfigError(f"{name_of(path)} is a {kind.__name__} in a list: put it into a dict to save its state")
        taken.unusual.append((name_of(path), value))
    is_mapping, is_of_replicas = isinstance(value, Mapping), _is_of_replicas(value)
    is_sequence = isinstance(value, list | tuple | set) and kind not in _PLAIN
    # What is in a list, or in a state of replicas, is not compared on its own.
    enters = is_compared and is_mapping and not is_of_replicas
    special = {}
    for key, inner in value.items() if is_mapping else enumerate(value) if is_sequence else ():
        may_be_stateful = may_be_stateful and kind is not set
        found = _visit(inner, (*path, key), taken, is_compared=enters, may_be_stateful=may_be_stateful)
        if found:
            special[key] = found
    contents = _NOTHING.union(*special.values())
    if enters and special:
        taken.compared.update({(*path, key): inner for key, inner in value.items() if key not in special})
    if is_compared and _is_of_optimizer(value) and not contents & _SHARDED:
        taken.optimizers.append(path)
    return contents | _OF_REPLICAS if is_of_replicas else contents


def _is_of_replicas(value: Any) -> bool:
    """Returns whether a value is the state dict of a module or of an optimizer."""
    return isinstance(value, Mapping) and (hasattr(value, "_metadata") or _is_of_optimizer(value))


def _is_of_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)


@functools.cache
def _warn_once(message: str, *arguments: str) -> None:
    logger.warning(message, *arguments)


def _is_refused(value: Any) -> bool:
    kind = type(value)
    if kind.__module__ != "numpy":
        return refused_global([f"{kind.__module__}.{kind.__qualname__}"]) is not None
    # The pickle of a numpy value does not name its class. The elements of an array make no difference.
    data = pickle.dumps(value[:0] if getattr(value, "ndim", 0) else value, protocol=2)
    names = [str(argument).replace(" ", ".") for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"]
    return refused_global(names) is not None


def _shard_count(tensor: torch.Tensor) -> int:
    """Returns the number of ranks that a tensor is sharded over."""
    if isinstance(tensor, ShardedTensor):
        return torch.distributed.get_world_size(tensor._process_group)
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        return int(torch.Size(size for placement, size in sizes if not placement.is_replicate()).numel())
    return 1


def _gathered(taken: TakenState, ranks: Ranks) -> TakenState:
    """Returns the state to save, as `state_to_save` describes it."""
    with ranks.together():
        own_digests = {path: digest_of(value) for path, value in taken.compared.items()}
    of_all = ranks.gather((own_digests, taken.of_ranks, taken.optimizers))
    digests, loaders, optimizers = zip(*of_all, strict=True)
    paths = dict.fromkeys(itertools.chain(*digests))
    differing = dict.fromkeys(itertools.chain(*loaders))
    differing |= {path: None for path in paths if len({found[path] for found in digests if path in found}) > 1}
    # A value of one rank may be a mapping on another one: then the whole is kept for each rank.
    differing |= {outer: None for path in paths for outer in _outer(path) if outer in paths}
    tree, kept = taken.tree, [path for path in differing if not any(outer in differing for outer in _outer(path))]
    states = ranks.gather({path: _at(tree, path) for path in kept}, on_first=True)
    for path in kept:
        count = sum(path in of_rank for of_rank in loaders)
        if not count and ranks.is_first:
            message = "%s differs among the ranks: each rank's value is saved, and only as many ranks can restore it"
            _warn_once(message, name_of(path))
        if 0 < count < ranks.count:
            message = "%s: given by %d of %d ranks; the others will restore the state of the first of these"
            logger.warning(message, name_of(path), count, ranks.count)
        own = {_RANKS: tuple(of_rank[path] for of_rank in states)}
        tree = _with(tree, path, own) if ranks.is_first else _without(tree, path)
    for path in taken.optimizers:
        if any(path in of_rank for of_rank in optimizers[: ranks.number]):
            tree = _without(tree, path)
    return taken._replace(tree=tree)


def _outer(path: Path) -> Iterator[Path]:
    return (path[:end] for end in range(1, len(path)))


def with_rank_states(tree: dict[Any, Any], metadata: Metadata) -> dict[Any, Any]:
    """Returns the state to fill from a distributed checkpoint, with entries for the states of all ranks.

    Args:
        tree: The state of the objects to fill.
        metadata: The checkpoint's metadata.
    """
    paths = metadata.planner_data or {}
    for name in metadata.state_dict_metadata:
        path = paths.get(name) or tuple(name.split("."))
        if path[-1] == _RANKS and any(str(top) == path[0] for top in tree):
            tree = _with(tree, path[:-1], {_RANKS: None})
    return tree


def own_state(loaded: Any, ranks: Ranks, source: str) -> Any:
    """Replaces the states of all ranks in a loaded state by that of this rank. Modifies its dicts.

    Raises:
        CheckpointError: A state was saved by another number of ranks, each its own; the message names it. Or it is
            damaged.
    """
    root = {None: loaded}
    visited: set[int] = set()
    # A stack, not recursion: a file may nest dicts at will. Each dict with the names that lead to it, innermost first.
    stack: list[tuple[dict[Any, Any], Any]] = [(root, None)]
    while stack:
        outer, names = stack.pop()
        for name, value in outer.items():
            if type(value) is not dict:
                continue
            inner = (name, names)
            if value.keys() == {_RANKS}:
                outer[name] = _own(value[_RANKS], ranks, source, inner)
            elif id(value) not in visited:
                visited.add(id(value))
                stack.append((value, inner))
    return root[None]


def _own(states: Any, ranks: Ranks, source: str, names: Any) -> Any:
    if not isinstance(states, list | tuple) or not states:
        kind = type(states).__name__
        raise CheckpointError(f"{source}: the states of the ranks are damaged: expected a list, found a {kind}")
    # None stands for a rank without the object.
    given = [state for state in states if state is not None]
    own = states[ranks.number] if len(states) == ranks.count else None
    if own is None and (not given or _are_same(given)):
        own = given[0] if given else None
    if own is not None or not given:
        return None if isinstance(own, str) and own == _NONE else own
    path: Path = ()
    while names is not None:
        path, names = (names[0], *path), names[1]
    is_loader = isinstance(given[0], Mapping) and "within_epoch" in given[0]
    advice = "; the loader of an ElasticDistributedSampler has one state for all ranks" if is_loader else ""
    raise CheckpointError(
        f"{source}: {name_of(path[1:]) or 'the state'} was saved by {len(given)} ranks, each its own, and there are "
        f"{ranks.count}: leave it out of into={advice}"
    )


def _at(tree: Any, path: Path) -> Any:
    """Returns the value at a path as it is kept among those of all ranks; None if there is none."""
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return _NONE if tree is None else tree


def _with(tree: Mapping[Any, Any], path: Path, value: Any) -> dict[Any, Any]:
    """Returns a tree with a value at a path, whose names may be those of a checkpoint, which are strings."""
    name, *rest = path
    if name not in tree:
        name = next((found for found in tree if str(found) == name), name)
    inner = tree.get(name)
    return {**tree, name: _with(inner if isinstance(inner, Mapping) else {}, tuple(rest), value) if rest else value}


def _without(tree: Mapping[Any, Any], path: Path) -> dict[Any, Any]:
    name, *rest = path
    left = {key: value for key, value in tree.items() if key != name}
    return {**left, name: _without(tree[name], tuple(rest))} if rest and name in tree else left


def _are_same(states: list[Any]) -> bool:
    """Returns whether states are equal except for their rank."""
    if len(states) == 1:
        return True
    try:
        return len({digest_of(_without_rank(state)) for state in states}) == 1
    except Exception:  # noqa: BLE001  of any object that is pickled
        # States that cannot be compared, such as one that contains itself, count as different.
        return False


def _without_rank(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _without_rank(value) for name, value in state.items() if name != _RANK}
    return list(map(_without_rank, state)) if type(state) in (list, tuple) else state
