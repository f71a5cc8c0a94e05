"""States of which every rank has its own, as a loader's, within a state that is saved once. Reads and writes no store.

In the saved state a dict with the states of all ranks, in their order, stands in the place of such a state.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.data import DataLoader, Dataset, Sampler

from torchobj.checkpoint.ranks import Ranks
from torchobj.exceptions import CheckpointError
from torchobj.loader.nested import innermost
from torchobj.loader.sampler import ElasticDistributedSampler
from torchobj.stateful import is_stateful

__all__ = ["gathered", "own", "placed"]

logger = logging.getLogger("torchobj")

#: The one key of the dict that holds the states of all ranks: in a tuple, which a distributed checkpoint keeps as one
#: value whatever it holds.
_RANKS = "torchobj_states_of_ranks"
#: What a loader's state calls the rank of its sampler, which the loader compares itself where it matters.
_RANK = "rank"


def gathered(state: Mapping[Any, Any], taken: dict[Any, Any], ranks: Ranks) -> dict[Any, Any]:
    """`taken` with the states of all ranks in the place of that of each loader, dataset and sampler of `state`.

    All ranks call it. Where only some of them have such an object, the state of the first of these stands for all.

    Raises:
        Exception: What pickling one of the states raises, on all ranks.
    """
    if not ranks.several:
        return taken
    mine = {path: state for path, _, state in _places(state, taken, ())}
    everyones = ranks.gather(mine)
    for path in mine:
        states = tuple(states[path] for states in everyones if path in states)
        if len(states) < ranks.count:
            name = ".".join(map(str, path))
            logger.warning("%s: given by %d of %d ranks; its first state is saved", name, len(states), ranks.count)
            states = states[:1]
        taken = _with(taken, path, {_RANKS: states})
    return taken


def placed(into: Mapping[Any, Any], taken: dict[Any, Any], metadata: Metadata, source: str) -> dict[Any, Any]:
    """`taken` with a place for the states of all ranks wherever a distributed checkpoint has them.

    Args:
        into: What is to be filled.
        taken: Its state.
        metadata: Of the checkpoint.
        source: Where from, for errors.

    Raises:
        CheckpointError: The checkpoint has one rank's state, or parts of several ranks', where each had its own.
    """
    names = metadata.state_dict_metadata
    files = {getattr(info, "relative_path", "") for info in (metadata.storage_data or {}).values()}
    is_of_several = any(not name.rpartition("/")[2].startswith("__0_") for name in files)
    for path, value, _ in _places(into, taken, ()):
        name = ".".join(map(str, path))
        if f"{name}.{_RANKS}" in names:
            taken = _with(taken, path, {_RANKS: None})
        elif is_of_several and not _is_elastic(value) and any(f"{key}.".startswith(f"{name}.") for key in names):
            raise CheckpointError(
                f"{source}: {name} was saved by several ranks with a version that kept the state of only one of them: "
                "leave it out of into and begin its epoch anew"
            )
    return taken


def own(loaded: Any, ranks: Ranks, source: str) -> Any:
    """A state that was read, with the states of this rank in the places of those of all ranks. Changes its dicts.

    Raises:
        CheckpointError: The saving job had another number of ranks, and their states differ; or they are damaged.
    """
    whole = {None: loaded}
    entered: set[int] = set()
    # No recursion: a file may nest dicts at will, and within themselves.
    waiting: list[dict[Any, Any]] = [whole]
    while waiting:
        around = waiting.pop()
        for name, value in around.items():
            if type(value) is not dict:
                continue
            if value.keys() == {_RANKS}:
                around[name] = _chosen(value[_RANKS], ranks, source)
            elif id(value) not in entered:
                entered.add(id(value))
                waiting.append(value)
    return whole[None]


def _chosen(states: Any, ranks: Ranks, source: str) -> Any:
    """Of the states of all ranks the one of this rank."""
    if not isinstance(states, list | tuple) or not states:
        kind = type(states).__name__
        raise CheckpointError(f"{source}: the states of the ranks are damaged: a {kind} that holds none; save again")
    if len(states) == ranks.count and states[ranks.number] is not None:
        return states[ranks.number]
    # None is of a rank that gave no state.
    given = [state for state in states if state is not None]
    if not given or _are_same(given):
        return given[0] if given else None
    raise CheckpointError(
        f"{source}: a loader's state was saved by {len(given)} ranks, each its own, and there are {ranks.count}: "
        "only that of an ElasticDistributedSampler goes on with another number"
    )


def _is_elastic(value: Any) -> bool:
    """Whether the state of any one rank is that of all."""
    if isinstance(value, DataLoader):
        value = value.sampler if value.batch_sampler is None else value.batch_sampler
    return isinstance(innermost(value), ElasticDistributedSampler)


def _places(
    state: Mapping[Any, Any], taken: Mapping[Any, Any], above: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """The loaders, datasets and samplers of a state, each between its path and its state."""
    for name, value in state.items():
        if is_stateful(value):
            if isinstance(value, DataLoader | Dataset | Sampler):
                yield (*above, name), value, taken[name]
        elif isinstance(value, Mapping):
            yield from _places(value, taken[name], (*above, name))


def _with(taken: Mapping[Any, Any], path: tuple[Any, ...], value: Any) -> dict[Any, Any]:
    name, *rest = path
    return {**taken, name: _with(taken[name], tuple(rest), value) if rest else value}


def _are_same(states: list[Any]) -> bool:
    try:
        return all(_is_same(state, states[0]) for state in states[1:])
    except (RecursionError, RuntimeError, TypeError, ValueError):
        # What cannot be compared, as a state that holds itself, is not known to be the same.
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Whether two states are the same but for the number of their rank."""
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
