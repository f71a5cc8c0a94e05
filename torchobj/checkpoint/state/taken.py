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
  ranks is saved; `rank_states.own_state` selects that of this rank again.
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
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torchobj.checkpoint.archive.device_memory import check_memory
from torchobj.checkpoint.archive.pickling import refused_global
from torchobj.checkpoint.matching import Path, name_of
from torchobj.checkpoint.state.digest import digest_of
from torchobj.checkpoint.state.parts import (
    PARAM_GROUPS,
    Description,
    describe,
    first_of_parts,
    have_own_names,
    is_flat_optimizer,
    is_optimizer,
    is_sharded,
    names_of_parameters,
    paths_of_tensors,
)
from torchobj.checkpoint.state.rank_states import FIRSTS, PARTS, RANKS, value_at, with_value, without_value
from torchobj.exceptions import ConfigError
from torchobj.ranks.meeting import Ranks
from torchobj.stateful import is_stateful
from torchobj.warn_once import PROCESS, warn_once

__all__ = ["StateToSave", "TakenState", "state_to_save", "take_state"]

logger = logging.getLogger("torchobj")

#: Types that every restore accepts.
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Tensor)
_CONTAINERS = (dict, collections.OrderedDict, collections.Counter, list, tuple, set)

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


class StateToSave(NamedTuple):
    """What this rank saves of the state."""

    tree: dict[Any, Any]
    """The state without the values that are kept for each rank; on the first rank None in place of them."""
    tensors: list[tuple[str, torch.Tensor]]
    """All tensors by name."""
    values: dict[Path, Any]
    """The values of this rank among those that are kept for each rank, by path."""
    kept: dict[Path, Sequence[int | None]]
    """For each of these paths, the number of the rank whose value each rank gets; None for ranks without one."""

    def with_values(self, tree: dict[Any, Any], of_all: Sequence[Mapping[Path, Any]]) -> dict[Any, Any]:
        """Returns what the first rank saves.

        Args:
            tree: `tree`, or a copy of it.
            of_all: `values` of all ranks, by rank number.
        """
        for path, firsts in self.kept.items():
            values = (None if first is None else of_all[first][path] for first in firsts)
            tree = with_value(tree, path, {RANKS: tuple(values)})
        return tree


def state_to_save(state: Mapping[Any, Any], ranks: Ranks, *, sharded: bool) -> StateToSave:
    """Takes the state of the objects of a save. Collective: one meeting, or two if ranks may have parts.

    Warns of values that a restore with `weights_only=True` will refuse; once for each entry.

    A value that only some ranks have, and that is equal on these, is left to `torch.distributed.checkpoint`. An
    optimizer's state is left to the first rank that has it: one of replicas may have no state for some parameters.

    Args:
        state: The objects, as passed to `CheckpointManager.save`.
        ranks: The ranks that save.
        sharded: Whether each rank saves its state shard, or the first rank saves all.

    Returns:
        The state to save. The first rank adds the values of all ranks where they differ (`with_values`).

    Raises:
        ConfigError: As for `take_state`.
        CheckpointError: The memory of a tensor was freed; the message names it.
        Exception: A state cannot be pickled. Every error is raised on all ranks.
    """
    with ranks.meeting() as meeting:
        # On all ranks: `state_dict` may be collective.
        taken = take_state(state, sharded=sharded)
        # Only what this rank writes.
        for name, tensor in taken.tensors if sharded or ranks.is_first else ():
            check_memory(tensor, name)
        for name, value in taken.unusual if sharded or ranks.is_first else ():
            if _is_refused(value):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                warn_once(PROCESS, "restore needs weights_only=False for entry %r (%s)", name, kind)
        found = _compared(taken) if ranks.several else _Compared(_OfRank({}, {}, []), {}, {})
        of_all = meeting.gather(found.sent)
        if of_all is not None:
            meeting.result = _differences(of_all, sharded=sharded)
    return _to_save(taken, found, meeting.result, ranks, sharded=sharded)


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


class _OfRank(NamedTuple):
    """What ranks compare."""

    digests: dict[Path, bytes]
    """Of the values that may differ among ranks."""
    described: dict[Path, bytes]
    """Of the descriptions of states of modules and optimizers, and of sharded tensors."""
    loaders: list[Path]
    """Loaders, datasets and samplers, whose states differ among ranks."""


class _Compared(NamedTuple):
    sent: _OfRank
    descriptions: dict[Path, Description]
    modules: dict[Path, bytes]
    """Digests of the modules, by path."""


def _compared(taken: TakenState) -> _Compared:
    digests = {path: digest_of(value) for path, value in taken.compared.items()}
    own = _described(taken, taken.described)
    modules = {path: found.digest() for path, found in own.items() if not found.groups}
    modules |= dict.fromkeys(paths_of_tensors(taken.compared), b"")
    described = {path: digest_of((found, found.has_names or modules)) for path, found in own.items()}
    return _Compared(_OfRank(digests, described, taken.of_ranks), own, modules)


class _Differences(NamedTuple):
    """What differs among ranks."""

    kept: dict[Path, int]
    """Paths of values that differ, none below another one, with the number of ranks that have a loader there."""
    replicated: dict[Path, int]
    """Paths of what ranks have described, with the first rank that has."""


def _differences(of_all: Sequence[_OfRank], *, sharded: bool) -> _Differences:
    digests, descriptions, loaders = zip(*of_all, strict=True)
    replicated: dict[Path, int] = {}
    for number, of_rank in enumerate(descriptions):
        for path in of_rank:
            replicated.setdefault(path, number)
    paths = dict.fromkeys(itertools.chain(*digests))
    differing = dict.fromkeys(itertools.chain(*loaders)) | _differing(digests) | _differing(descriptions)
    # A value of one rank may be a mapping on another one: then the whole is kept for each rank.
    both = paths | replicated
    differing |= {path: None for path in paths if path in replicated}
    differing |= {outer: None for path in both for outer in _outer(path) if outer in both}
    if not sharded:
        differing |= _of_some([found.digests.keys() | found.described.keys() for found in of_all])
    kept = [path for path in differing if not any(outer in differing for outer in _outer(path))]
    return _Differences({path: sum(path in of_rank for of_rank in loaders) for path in kept}, replicated)


def _to_save(
    taken: TakenState, found: _Compared, differences: _Differences, ranks: Ranks, *, sharded: bool
) -> StateToSave:
    """Returns what this rank saves, as `state_to_save` describes it. Collective if some ranks may have parts."""
    kept, replicated = differences
    parts = _parts(taken, [path for path in kept if path in replicated], found.modules, ranks, sharded=sharded)
    tree = taken.tree
    for path, description in found.descriptions.items():
        # One of replicas may have no state for some parameters: all of it comes from the first of them.
        is_later = replicated.get(path, ranks.number) < ranks.number
        if path not in parts and is_later and description.groups and not description.is_sharded:
            tree = without_value(tree, path)
    for path, part in parts.items() if sharded else ():
        tree = _with_part(tree, path, part, ranks)
    firsts = {path: part.firsts for path, part in parts.items()}
    firsts |= {(*path, PARAM_GROUPS): part.firsts for path, part in parts.items() if part.has_own_groups}
    each = [path for path in kept if (path in parts and not sharded) or path not in replicated]
    each += [path for path in firsts if path not in parts and sharded]
    of_each: dict[Path, Sequence[int | None]] = {path: firsts.get(path, range(ranks.count)) for path in each}
    for path in of_each:
        count = kept.get(path, 0)
        if not count and ranks.is_first and path[-1] != PARAM_GROUPS:
            warn_once(PROCESS, _EACH_RANK, name_of(path))
        if 0 < count < ranks.count:
            message = "%s: given by %d of %d ranks; the others will restore the state of the first of these"
            logger.warning(message, name_of(path), count, ranks.count)
        # Its own value is neither copied nor compared with other names: it is one of the values of all ranks.
        tree = with_value(tree, path, None) if ranks.is_first else without_value(tree, path)
    sent = (path for path, of_path in of_each.items() if of_path[ranks.number] == ranks.number)
    values = {path: value_at(taken.tree, path) for path in sent}
    return StateToSave(tree, taken.tensors, values, of_each)


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
    found = ((path, value_at(taken.tree, path)) for path in paths)
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
    with ranks.meeting() as meeting:
        meeting.result = meeting.gather((_described(taken, paths), modules))
    of_all, modules_of_all = zip(*meeting.result, strict=True)
    own = of_all[ranks.number]
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
    first, value = part.firsts[ranks.number], value_at(tree, path)
    is_writer = first is not None and (part.is_sharded or first == ranks.number)
    if part.is_beside:
        return tree if is_writer else without_value(tree, path)
    if ranks.is_first:
        warn_once(PROCESS, _EACH_RANK, name_of(path))
    below = {str(first): value} if is_writer else {}
    if ranks.is_first:
        below |= {FIRSTS: {",".join("" if each is None else str(each) for each in part.firsts): None}}
    return with_value(tree, path, {PARTS: below}) if below else without_value(tree, path)


def _outer(path: Path) -> Iterator[Path]:
    return (path[:end] for end in range(1, len(path)))
