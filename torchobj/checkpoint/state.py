"""Takes the state of objects for a save, with a state of each rank where ranks differ. Reads and writes no store.

One pass over the objects also finds the values that a save or a restore may refuse, so that they are reported when the
checkpoint is saved. In a saved state a dict with the states of all ranks replaces the state of each loader, dataset and
sampler; `own_state` selects those of this rank again.
"""

import collections
import functools
import logging
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.data import DataLoader, Dataset, Sampler

from torchobj.checkpoint.entries import Path, name_of
from torchobj.checkpoint.pickling import refused_global
from torchobj.checkpoint.ranks import Ranks
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.loader.sampler import ElasticDistributedSampler
from torchobj.loader.unwrap import innermost
from torchobj.stateful import is_stateful

__all__ = ["State", "gathered", "own_state", "take_state", "with_rank_states"]

logger = logging.getLogger("torchobj")

#: Types that every restore accepts.
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Tensor)
_CONTAINERS = (dict, collections.OrderedDict, collections.Counter, list, tuple, set)

#: The only key of a dict with the states of all ranks, which are in a tuple: a distributed checkpoint keeps a tuple as
#: one value.
_RANKS = "torchobj_states_of_ranks"
#: The rank in the state of a sampler; its loader compares it where it matters.
_RANK = "rank"


class State(NamedTuple):
    """The state of the objects of a save."""

    tree: dict[Any, Any]
    """The state, with what `state_dict` returned in place of objects."""
    of_ranks: dict[Path, tuple[Any, Any]]
    """Loaders, datasets and samplers, which differ among ranks, by path: the object and its state."""
    tensors: list[tuple[str, torch.Tensor]]
    odd: list[tuple[str, Any]]
    """Values that are neither plain nor in a plain container, by name."""

    def check_unsharded(self) -> None:
        """Checks that no tensor is sharded among ranks: one file would contain the shard of one rank only.

        Raises:
            ConfigError: A tensor is sharded; the message names it.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        for name, tensor in self.tensors:
            shards = _shard_count(tensor)
            if shards > 1:
                raise ConfigError(f"{name} is sharded over {shards} ranks; use CheckpointManager(..., sharded=True)")

    def warn_of_refused(self) -> None:
        """Warns of values that a restore with `weights_only=True` will refuse; once for each entry."""
        for name, value in self.odd:
            if _is_refused(value):
                _warn(name, f"{type(value).__module__}.{type(value).__qualname__}")


def take_state(state: Mapping[Any, Any]) -> State:
    """Takes the state of each value that has `state_dict` and `load_state_dict`.

    Raises:
        ConfigError: `state` is not a mapping, or has such a value in a list, where it would not be recognised.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state is a {type(state).__name__}: must be a dict, as {{'model': model, 'step': 3}}")
    taken = State({}, {}, [], [])
    for name, value in state.items():
        taken.tree[name] = _take(value, (name,), taken)
    return taken


def _take(value: Any, path: Path, taken: State) -> Any:
    if is_stateful(value):
        state = value.state_dict()
        if isinstance(value, DataLoader | Dataset | Sampler):
            taken.of_ranks[path] = (value, state)
        _inspect(state, path, taken, may_be_stateful=False)
        return state
    if not isinstance(value, Mapping):
        _inspect(value, path, taken, may_be_stateful=type(value) in (list, tuple))
        return value
    inner = {key: _take(below, (*path, key), taken) for key, below in value.items()}
    # A mapping of another type is pickled in its own way, and kept unless an object in it was replaced.
    if type(value) is dict or any(inner[key] is not below for key, below in value.items()):
        return inner
    if type(value) not in _CONTAINERS:
        taken.odd.append((name_of(path), value))
    return value


def _inspect(value: Any, path: Path, taken: State, *, may_be_stateful: bool) -> None:
    """Adds the tensors and odd values in a value to `taken`.

    Raises:
        ConfigError: With `may_be_stateful`: the value contains an object with a state.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        taken.tensors.append((name_of(path), value))
    elif kind not in _PLAIN and kind not in _CONTAINERS:
        if may_be_stateful and is_stateful(value):
            raise ConfigError(f"{name_of(path)} is a {kind.__name__} in a list: put it into a dict to save its state")
        taken.odd.append((name_of(path), value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _inspect(inner, (*path, key), taken, may_be_stateful=may_be_stateful)
    elif isinstance(value, list | tuple | set) and kind not in _PLAIN:
        for number, inner in enumerate(value):
            _inspect(inner, (*path, number), taken, may_be_stateful=may_be_stateful and kind is not set)


@functools.cache
def _warn(name: str, kind: str) -> None:
    logger.warning("restore needs weights_only=False for entry %r (%s)", name, kind)


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
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # noqa: PLC0415  with torch.distributed only
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    if isinstance(tensor, ShardedTensor):
        return torch.distributed.get_world_size(tensor._process_group)
    if isinstance(tensor, DTensor):
        sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        return int(torch.Size(size for placement, size in sizes if not placement.is_replicate()).numel())
    return 1


def gathered(taken: State, ranks: Ranks) -> State:
    """Replaces the state of each loader, dataset and sampler by the states of all ranks. Collective.

    If only some ranks have such an object, the state of the first of them is saved for all.

    Raises:
        Exception: A state cannot be pickled; raised on all ranks.
    """
    if not ranks.several:
        return taken
    mine = {path: state for path, (_, state) in taken.of_ranks.items()}
    of_all, tree = ranks.gather(mine), taken.tree
    for path in mine:
        states = tuple(states[path] for states in of_all if path in states)
        if len(states) < ranks.count:
            count = len(states)
            logger.warning("%s: given by %d of %d ranks; its first state is saved", name_of(path), count, ranks.count)
            states = states[:1]
        tree = _with(tree, path, {_RANKS: states})
    return taken._replace(tree=tree)


def with_rank_states(taken: State, metadata: Metadata, source: str) -> dict[Any, Any]:
    """Returns the state to fill from a distributed checkpoint, with entries for the states of all ranks.

    Args:
        taken: The state of the objects to fill.
        metadata: The checkpoint's metadata.
        source: The checkpoint, for errors.

    Raises:
        CheckpointError: Ranks had states of their own, and the checkpoint has only some of them.
    """
    names = metadata.state_dict_metadata
    files = {getattr(info, "relative_path", "") for info in (metadata.storage_data or {}).values()}
    is_of_several = any(not name.rpartition("/")[2].startswith("__0_") for name in files)
    tree = taken.tree
    for path, (value, _) in taken.of_ranks.items():
        name = name_of(path)
        if f"{name}.{_RANKS}" in names:
            tree = _with(tree, path, {_RANKS: None})
        elif is_of_several and not _is_elastic(value) and any(f"{key}.".startswith(f"{name}.") for key in names):
            raise CheckpointError(
                f"{source}: {name} was saved by several ranks with a version that kept the state of only one of them: "
                "leave it out of into, and restart its epoch"
            )
    return tree


def own_state(loaded: Any, ranks: Ranks, source: str) -> Any:
    """Replaces the states of all ranks in a loaded state by that of this rank. Modifies its dicts.

    Raises:
        CheckpointError: The state was saved by another number of ranks, whose states differ; or it is damaged.
    """
    root = {None: loaded}
    visited: set[int] = set()
    # A stack, not recursion: a file may nest dicts at will.
    stack: list[dict[Any, Any]] = [root]
    while stack:
        outer = stack.pop()
        for name, value in outer.items():
            if type(value) is not dict:
                continue
            if value.keys() == {_RANKS}:
                outer[name] = _own(value[_RANKS], ranks, source)
            elif id(value) not in visited:
                visited.add(id(value))
                stack.append(value)
    return root[None]


def _own(states: Any, ranks: Ranks, source: str) -> Any:
    if not isinstance(states, list | tuple) or not states:
        kind = type(states).__name__
        raise CheckpointError(f"{source}: the states of the ranks are damaged: expected a list, found a {kind}")
    if len(states) == ranks.count and states[ranks.number] is not None:
        return states[ranks.number]
    # None stands for a rank without the object.
    given = [state for state in states if state is not None]
    if not given or _are_same(given):
        return given[0] if given else None
    raise CheckpointError(
        f"{source}: a loader's state was saved by {len(given)} ranks, each its own, and there are {ranks.count}: "
        "use an ElasticDistributedSampler to resume with another number of ranks"
    )


def _is_elastic(value: Any) -> bool:
    """Returns whether all ranks have the same state."""
    if isinstance(value, DataLoader):
        value = value.sampler if value.batch_sampler is None else value.batch_sampler
    return isinstance(innermost(value), ElasticDistributedSampler)


def _with(tree: Mapping[Any, Any], path: Path, value: Any) -> dict[Any, Any]:
    name, *rest = path
    return {**tree, name: _with(tree[name], tuple(rest), value) if rest else value}


def _are_same(states: list[Any]) -> bool:
    try:
        return all(_is_same(state, states[0]) for state in states[1:])
    except (RecursionError, RuntimeError, TypeError, ValueError):
        # States that cannot be compared, such as one that contains itself, count as different.
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two states are equal except for their rank."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(_is_same(value, other[name]) for name, value in one.items() if name != _RANK)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)
