"""States of which every rank has its own, as a loader's, within a state that the first rank saves alone.

In the saved state a dict with the states of all ranks stands in the place of such a state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from torchobj.checkpoint.ranks import Ranks
from torchobj.checkpoint.snapshot import is_stateful
from torchobj.exceptions import CheckpointError

__all__ = ["gathered", "own"]

#: The one key of the dict that holds the states of all ranks, in a list.
_RANKS = "torchobj_states_of_ranks"
#: What a loader's state calls the rank of its sampler, which the loader compares itself where it matters.
_RANK = "rank"


def gathered(state: Mapping[Any, Any], taken: dict[Any, Any], ranks: Ranks) -> dict[Any, Any]:
    """`taken`, on the first rank with the states of all ranks for each loader, dataset and sampler of `state`.

    All ranks call it.
    """
    if not ranks.several:
        return taken
    mine = dict(_places(state, taken, ()))
    everyones = ranks.gather(mine)
    for path in mine:
        taken = _with(taken, path, {_RANKS: [states.get(path) for states in everyones]})
    return taken


def own(loaded: Any, ranks: Ranks, source: str) -> Any:
    """A state that was read, with the states of this rank in the places of those of all ranks.

    Raises:
        CheckpointError: The saving job had another number of ranks, and their states differ.
    """
    if type(loaded) is not dict:
        return loaded
    if loaded.keys() != {_RANKS}:
        for name, value in loaded.items():
            loaded[name] = own(value, ranks, source)
        return loaded
    states = loaded[_RANKS]
    if len(states) == ranks.count:
        return states[ranks.number]
    if all(_is_same(state, states[0]) for state in states):
        return states[0]
    raise CheckpointError(
        f"{source}: a loader's state was saved by {len(states)} ranks, each its own, and there are {ranks.count}: "
        "only that of an ElasticDistributedSampler goes on with another number"
    )


def _places(
    state: Mapping[Any, Any], taken: Mapping[Any, Any], above: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for name, value in state.items():
        if is_stateful(value):
            if isinstance(value, DataLoader | Dataset | Sampler):
                yield (*above, name), taken[name]
        elif isinstance(value, Mapping):
            yield from _places(value, taken[name], (*above, name))


def _with(taken: Mapping[Any, Any], path: tuple[Any, ...], value: Any) -> dict[Any, Any]:
    name, *rest = path
    return {**taken, name: _with(taken[name], tuple(rest), value) if rest else value}


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
