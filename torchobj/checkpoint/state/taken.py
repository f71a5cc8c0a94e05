"""Takes the state of objects for a save, with a state of each rank where ranks differ. Reads and writes no store.

One pass over the objects also finds the values that a save or a restore may refuse, so that they are reported when the
checkpoint is saved.

Who saves what, if there are several ranks:
- Modules and optimizers, also as state dicts and within the states of other objects, come from the first of the ranks
  whose states have the same parameters (`parts`): from the first rank with data parallelism, from each stage of a
  pipeline. Their values are not compared: statistics of BatchNorm differ on every rank. A DDP model of 1 GiB adds 20 ms
  to a save, on two ranks.
- Parts whose entries have names of their own are saved side by side, with the parameter groups of each rank. Otherwise,
  as with optimizers that number their parameters, each part is saved below the number of its first rank.
- Tensors that are sharded among ranks come from their owners.
- The ranks compare digests of all other values, which takes 0.7 s for each GiB of their tensors, on all ranks at the
  same time. The first rank saves those that are equal.
- In place of a value that differs, and of the state of each loader, dataset and sampler, a dict with the values of all
  ranks is saved; `own_state` selects that of this rank again.
"""

import collections
import itertools
import logging
import pickle
import pickletools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torchobj.checkpoint.archive.device_memory import check_memory
from torchobj.checkpoint.archive.entries import Path, name_of
from torchobj.checkpoint.archive.pickling import refused_global
from torchobj.checkpoint.state.digest import digest_of
from torchobj.checkpoint.state.parts import (
    PARAM_GROUPS,
    Description,
    describe,
    first_of_parts,
    groups_of_own,
    have_own_names,
    is_flat_optimizer,
    is_optimizer,
    is_sharded,
    names_of_parameters,
    paths_of_tensors,
)
from torchobj.checkpoint.state.ranks import Ranks
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.stateful import is_stateful
from torchobj.warn_once import PROCESS, warn_once

__all__ = [
    "PARTS",
    "TakenState",
    "is_list_of_firsts",
    "own_state",
    "state_to_save",
    "take_state",
    "with_rank_states",
]

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

#: The only key of a dict with the parts that ranks have, by the number of the first rank of each.
PARTS = "torchobj_parts"
#: In this dict, a dict whose only key lists the number for each rank, which a reader has before it reads values.
_FIRSTS = "firsts"

_EACH_RANK = "%s differs among the ranks: each rank's value is saved, and only as many ranks can restore it"

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
    described: dict[Path, Any]
    """States of modules and optimizers, sharded tensors, and lists of them, of which ranks may have parts, by path."""
    owners: dict[Path, Any]
    """Modules and optimizers, by path."""
    tensors: list[tuple[str, torch.Tensor]]
    unusual: list[tuple[str, Any]]
    """Values that are neither plain nor in a plain container, by name."""


def state_to_save(state: Mapping[Any, Any], ranks: Ranks, *, sharded: bool) -> TakenState:
    """Takes the state of the objects of a save. Collective.

    Warns of values that a restore with `weights_only=True` will refuse; once for each entry.

    A value that only some ranks have, and that is equal on these, is left to `torch.distributed.checkpoint`. An
    optimizer's state is left to the first rank that has it: one of replicas may have no state for some parameters.

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
                warn_once(PROCESS, "restore needs weights_only=False for entry %r (%s)", name, kind)
    return _gathered(taken, ranks, sharded=sharded) if ranks.several else taken


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
    taken = TakenState({}, [], {}, {}, {}, [], [])
    for name, value in state.items():
        taken.tree[name] = _take(value, (name,), taken)
    for name, tensor in () if sharded else taken.tensors:
        if (shards := _shard_count(tensor)) > 1:
            raise ConfigError(f"{name} is sharded over {shards} ranks; use CheckpointManager(..., sharded=True)")
    return taken


def _state_of(value: Any, path: Path) -> Any:
    # Accelerate's loader has the methods, but a state only if it was asked for.
    if isinstance(value, DataLoader) and getattr(value, "use_stateful_dataloader", True) is False:
        raise ConfigError(
            f"{name_of(path)}: a loader that Accelerate prepared has no state; create "
            "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), which needs "
            "torchdata, or leave it out of the state"
        )
    return value.state_dict()


def _take(value: Any, path: Path, taken: TakenState) -> Any:
    if is_stateful(value):
        state = _state_of(value, path)
        is_of_rank = isinstance(value, DataLoader | Dataset | Sampler)
        is_module = isinstance(value, torch.nn.Module)
        if is_of_rank:
            taken.of_ranks.append(path)
        elif is_module or is_optimizer(state):
            taken.owners[path] = value
        is_compared = not is_of_rank and not is_module
        if not _visit(state, path, taken, is_compared=is_compared, may_be_stateful=False) and is_compared:
            taken.compared[path] = state
        elif is_module:
            taken.described[path] = state
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
        is_compared: Whether to add parts of it that ranks compare, and those of which ranks may have parts.
        may_be_stateful: Whether to refuse objects with a state in it.

    Returns:
        What it contains: sharded tensors, states of replicas, or nothing of these.

    Raises:
        ConfigError: The value contains an object with a state, which is refused.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        taken.tensors.append((name_of(path), value))
        if is_compared and is_sharded(value):
            taken.described[path] = value
        return _SHARDED if is_sharded(value) else _NOTHING
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
    contents |= _OF_REPLICAS if is_of_replicas else _NOTHING
    if is_compared and contents and not enters:
        taken.described[path] = value
    return contents


def _is_of_replicas(value: Any) -> bool:
    """Returns whether a value is the state dict of a module or of an optimizer."""
    if not isinstance(value, Mapping):
        return False
    return hasattr(value, "_metadata") or is_optimizer(value) or is_flat_optimizer(value)


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


def _gathered(taken: TakenState, ranks: Ranks, *, sharded: bool) -> TakenState:
    """Returns the state to save, as `state_to_save` describes it."""
    with ranks.together():
        own_digests = {path: digest_of(value) for path, value in taken.compared.items()}
        own = _described(taken, taken.described)
        modules = {path: found.digest() for path, found in own.items() if not found.groups}
        modules |= dict.fromkeys(paths_of_tensors(taken.compared), b"")
        described = {path: digest_of((found, found.has_names or modules)) for path, found in own.items()}
    of_all = ranks.gather((own_digests, taken.of_ranks, described))
    digests, loaders, descriptions = zip(*of_all, strict=True)
    paths, replicated = (dict.fromkeys(itertools.chain(*each)) for each in (digests, descriptions))
    differing = dict.fromkeys(itertools.chain(*loaders)) | _differing(digests) | _differing(descriptions)
    # A value of one rank may be a mapping on another one: then the whole is kept for each rank.
    both = paths | replicated
    differing |= {path: None for path in paths if path in replicated}
    differing |= {outer: None for path in both for outer in _outer(path) if outer in both}
    if not sharded:
        differing |= _of_some(
            [found.keys() | of_rank.keys() for found, of_rank in zip(digests, descriptions, strict=True)]
        )
    kept = [path for path in differing if not any(outer in differing for outer in _outer(path))]
    parts = _parts(taken, [path for path in kept if path in replicated], modules, ranks, sharded=sharded)
    kept = [path for path in kept if (path in parts and not sharded) or path not in replicated]
    tree = taken.tree
    for path, found in own.items():
        # One of replicas may have no state for some parameters: all of it comes from the first of them.
        is_later = any(path in of_rank for of_rank in descriptions[: ranks.number])
        if path not in parts and is_later and found.groups and not found.is_sharded:
            tree = _without(tree, path)
    for path, part in parts.items() if sharded else ():
        tree = _with_part(tree, path, part, ranks)
    firsts = {path: part.firsts for path, part in parts.items()}
    firsts |= {(*path, PARAM_GROUPS): part.firsts for path, part in parts.items() if part.has_own_groups}
    kept += [path for path in firsts if path not in parts and sharded]
    each = range(ranks.count)
    own_values = {path: _at(taken.tree, path) for path in kept if firsts.get(path, each)[ranks.number] == ranks.number}
    states = ranks.gather(own_values, on_first=True)
    for path in kept:
        count = sum(path in of_rank for of_rank in loaders)
        if not count and ranks.is_first and path[-1] != PARAM_GROUPS:
            warn_once(PROCESS, _EACH_RANK, name_of(path))
        if 0 < count < ranks.count:
            message = "%s: given by %d of %d ranks; the others will restore the state of the first of these"
            logger.warning(message, name_of(path), count, ranks.count)
        if ranks.is_first:
            values = (None if first is None else states[first][path] for first in firsts.get(path, each))
            tree = _with(tree, path, {_RANKS: tuple(values)})
        else:
            tree = _without(tree, path)
    return taken._replace(tree=tree)


def _differing(of_all: Sequence[Mapping[Path, bytes]]) -> dict[Path, None]:
    """Returns the paths whose digests differ among the ranks that have them."""
    paths = dict.fromkeys(itertools.chain(*of_all))
    return {path: None for path in paths if len({found[path] for found in of_all if path in found}) > 1}


def _of_some(of_all: Sequence[AbstractSet[Path]]) -> dict[Path, None]:
    """Returns the paths that are kept for each rank because one file has the other entries of the first rank only.

    These are the paths that the first rank does not have, and those in a mapping that has other entries on some rank.
    """
    outer_of_all = [{path[:-1] for path in of_rank if len(path) > 1} for of_rank in of_all]
    return {
        path: None
        for path in itertools.chain(*of_all)
        if path not in of_all[0]
        or any(path not in of_rank and path[:-1] in outer for of_rank, outer in zip(of_all, outer_of_all, strict=True))
    }


def _described(taken: TakenState, paths: Iterable[Path]) -> dict[Path, Description]:
    """Describes the values of this rank at these paths."""
    names = names_of_parameters(taken.owners)
    found = ((path, _at(taken.tree, path)) for path in paths)
    return {path: describe(value, taken.owners.get(path), names) for path, value in found if value is not None}


class _Parts(NamedTuple):
    """The parts of a state that ranks have."""

    firsts: list[int | None]
    """For each rank the first rank that has the same part; None for ranks without the state."""
    is_beside: bool
    """Whether the parts are saved side by side, under the names of their entries."""
    has_own_groups: bool
    """Whether they are, and have groups of parameters, which have the same names in all parts."""
    is_sharded: bool
    """Whether the part of this rank is sharded among ranks."""


def _parts(
    taken: TakenState, paths: list[Path], modules: Mapping[Path, bytes], ranks: Ranks, *, sharded: bool
) -> dict[Path, _Parts]:
    """Returns the parts of the states at these paths, unless they are replicas. Collective."""
    if not paths:
        return {}
    with ranks.together():
        own = _described(taken, paths)
    of_all, modules_of_all = zip(*ranks.gather((own, modules)), strict=True)
    parts = {}
    for path in paths:
        described = [of_rank.get(path) for of_rank in of_all]
        firsts = first_of_parts(described, modules_of_all)
        of_parts = [found for rank, found in enumerate(described) if found is not None and firsts[rank] == rank]
        if len(of_parts) > 1 or (None in firsts and not sharded):
            is_beside = have_own_names(of_parts)
            has_groups = is_beside and any((PARAM_GROUPS, 0) in found.groups for found in of_parts)
            is_sharded = path in own and own[path].is_sharded
            parts[path] = _Parts(firsts, is_beside, has_groups, is_sharded)
    return parts


def _with_part(tree: dict[Any, Any], path: Path, part: _Parts, ranks: Ranks) -> dict[Any, Any]:
    """Returns the state that this rank writes, with what it writes of a state that has parts."""
    first, value = part.firsts[ranks.number], _at(tree, path)
    is_writer = first is not None and (part.is_sharded or first == ranks.number)
    if part.is_beside:
        return tree if is_writer else _without(tree, path)
    if ranks.is_first:
        warn_once(PROCESS, _EACH_RANK, name_of(path))
    below = {str(first): value} if is_writer else {}
    if ranks.is_first:
        below |= {_FIRSTS: {",".join("" if each is None else str(each) for each in part.firsts): None}}
    return _with(tree, path, {PARTS: below}) if below else _without(tree, path)


def _outer(path: Path) -> Iterator[Path]:
    return (path[:end] for end in range(1, len(path)))


def with_rank_states(tree: dict[Any, Any], metadata: Metadata, ranks: Ranks, source: str) -> dict[Any, Any]:
    """Returns the state to fill from a distributed checkpoint, with the entries that have the states of several ranks.

    Args:
        tree: The state of the objects to fill.
        metadata: The checkpoint's metadata.
        ranks: The ranks that restore.
        source: The checkpoint, for errors.

    Raises:
        CheckpointError: A state was saved in parts, by another number of ranks or by other ranks; the message names it.
    """
    paths = metadata.planner_data or {}
    for name in metadata.state_dict_metadata:
        path = paths.get(name) or tuple(name.split("."))
        top = next((top for top in tree if str(top) == path[0]), None)
        if path[-1] == _RANKS and top is not None:
            # The groups of an optimizer that this rank does not have are of no use.
            if path[-2:-1] != (PARAM_GROUPS,) or _at(tree, path[:-1]) is not None:
                tree = _with(tree, path[:-1], {_RANKS: None})
        elif is_list_of_firsts(path) and (value := _at(tree, path[:-3])) is not None:
            firsts = path[-1].split(",")
            if len(firsts) != ranks.count or not firsts[ranks.number]:
                saved = sum(map(bool, firsts))
                raise _of_other_ranks(path[:-3], saved, ranks, source)
            tree = _with(tree, path[:-3], {PARTS: {firsts[ranks.number]: value}})
    return tree


def is_list_of_firsts(path: Path) -> bool:
    """Returns whether the entry at a path of a checkpoint lists the ranks of parts, and has no value."""
    return path[-3:-1] == (PARTS, _FIRSTS)


def own_state(loaded: Any, ranks: Ranks, source: str, existing: Mapping[Any, Any] | None = None) -> Any:
    """Replaces the states of all ranks in a loaded state by that of this rank. Modifies its dicts.

    Args:
        loaded: The state.
        ranks: The ranks that restore.
        source: The checkpoint, for errors.
        existing: The state to fill, as it was before `with_rank_states`; None to return what this rank saved.

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
        for name, value in list(outer.items()):
            if type(value) is not dict:
                continue
            inner = (name, names)
            if value.keys() == {_RANKS}:
                own = None if existing is None else _at(existing, _path(inner))
                if name == PARAM_GROUPS and isinstance(own, list):
                    outer[name] = groups_of_own(value[_RANKS], own, source, _path(inner))
                elif existing is not None and own is None and _is_absent(value[_RANKS], ranks):
                    del outer[name]
                else:
                    outer[name] = _own(value[_RANKS], ranks, source, inner)
            elif existing is not None and value.keys() == {PARTS} and isinstance(value[PARTS], dict):
                # Only that of this rank was read.
                [part] = list(value[PARTS].values())[:1] or [None]
                outer[name] = None if isinstance(part, str) and part == _NONE else part
            elif id(value) not in visited:
                visited.add(id(value))
                stack.append((value, inner))
    return root[None]


def _path(names: Any) -> Path:
    """Returns the path below the root that names lead to, innermost first."""
    path: Path = ()
    while names is not None:
        path, names = (names[0], *path), names[1]
    return path[1:]


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
    is_loader = isinstance(given[0], Mapping) and "within_epoch" in given[0]
    advice = "; the loader of an ElasticDistributedSampler has one state for all ranks" if is_loader else ""
    raise _of_other_ranks(_path(names), len(given), ranks, source, advice)


def _of_other_ranks(path: Path, saved: int, ranks: Ranks, source: str, advice: str = "") -> CheckpointError:
    return CheckpointError(
        f"{source}: {name_of(path) or 'the state'} was saved by {saved} ranks, each its own, and there are "
        f"{ranks.count}: leave it out of into={advice}"
    )


def _is_absent(states: Any, ranks: Ranks) -> bool:
    """Returns whether other ranks saved a state, and this rank none."""
    return isinstance(states, list | tuple) and len(states) == ranks.count and states[ranks.number] is None


def _at(tree: Any, path: Path) -> Any:
    """Returns the value at a path as it is kept among those of all ranks; None if there is none."""
    for name in path:
        if not isinstance(tree, Mapping) or (key := _key(tree, name)) not in tree:
            return None
        tree = tree[key]
    return _NONE if tree is None else tree


def _key(tree: Mapping[Any, Any], name: Any) -> Any:
    """Returns the key with a name, which may be that of a checkpoint, a string; the name if no key has it."""
    return name if name in tree else next((found for found in tree if str(found) == name), name)


def _with(tree: Mapping[Any, Any], path: Path, value: Any) -> dict[Any, Any]:
    """Returns a tree with a value at a path."""
    name, *rest = _key(tree, path[0]), *path[1:]
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
