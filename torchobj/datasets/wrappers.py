"""Looks through the datasets that wrap others: mixtures, and torch's Subset, ConcatDataset and StackDataset.

What is asked of a dataset is asked of the datasets within it: the objects of samples, their configurations, and what
workers inherit. Does no I/O itself.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data

from torchobj.datasets.base import PerObjectDataset, Sample_co, positions_of
from torchobj.datasets.map_style import MapStyleDataset
from torchobj.datasets.objects import ObjectDataset
from torchobj.datasets.passes import PassDataset
from torchobj.ranks.sharding import Order

#: Maximum number of items of a container among which datasets are looked for, and of all values of a dataset that are
#: looked at, before each epoch: more than these are samples.
_MAX_HELD, _MAX_SEARCHED = 1000, 10_000

#: Pairs of source number and index, which identify objects for the prefetcher.
Objects = list[tuple[int, int]]
ObjectFinder = Callable[[Sequence[int]], Objects]


class CompositeDataset(torch.utils.data.Dataset[Sample_co]):
    """A dataset whose samples are those of other datasets."""

    #: The other datasets.
    datasets: list[Any]

    def prepare(self) -> None:
        """Creates what workers inherit, once the other datasets have done so."""

    def _is_overridden(self) -> bool:
        """Whether a subclass of users may return other samples."""
        return False

    def _located(self, positions: Order) -> tuple[Order, Order]:
        """The dataset of each position, by its number, and the position in it. For map-style datasets."""
        raise NotImplementedError


class Parts(NamedTuple):
    """The datasets that a dataset consists of."""

    datasets: list[Any]
    located: Callable[[Order], tuple[Order, Order]] | None
    """Returns the dataset of each position, by its number, and the position in it. None: a sample consists of one of
    each dataset, at the same position.
    """
    is_exact: bool
    """Whether its samples are those of the parts: a subclass may return others."""


def parts_of(dataset: Any) -> Parts | None:
    """The datasets that a dataset consists of; None if it does not wrap others."""
    is_torchs = type(dataset) in _TORCHS
    if isinstance(dataset, CompositeDataset):
        return Parts(dataset.datasets, dataset._located, not dataset._is_overridden())
    if isinstance(dataset, torch.utils.data.Subset):
        return Parts([dataset.dataset], functools.partial(_in_subset, dataset), is_torchs)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return Parts(list(dataset.datasets), functools.partial(_in_concatenated, dataset), is_torchs)
    if isinstance(dataset, torch.utils.data.StackDataset):
        members = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return Parts(list(members), None, is_torchs)
    return None


_TORCHS = (torch.utils.data.Subset, torch.utils.data.ConcatDataset, torch.utils.data.StackDataset)


def _in_subset(dataset: "torch.utils.data.Subset[Any]", positions: Order) -> tuple[Order, Order]:
    indices = dataset.indices
    found = [operator.index(indices[position]) for position in positions.tolist()]
    return np.zeros(len(positions), dtype=np.int64), np.array(found, dtype=np.int64)


def _in_concatenated(dataset: "torch.utils.data.ConcatDataset[Any]", positions: Order) -> tuple[Order, Order]:
    ends = np.array(dataset.cumulative_sizes)
    members = np.searchsorted(ends, positions, side="right")
    return members, positions - np.concatenate([[0], ends])[members]


def datasets_within(dataset: Any) -> list[Any]:
    """The datasets within wrappers; a dataset that is not a wrapper itself."""
    parts = parts_of(dataset)
    return [dataset] if parts is None else [inner for part in parts.datasets for inner in datasets_within(part)]


def manifest_digest(dataset: Any) -> str | None:
    """The digest of the manifest of a dataset, or those of all datasets within it; None if none is of a manifest."""
    listings = [inner._listing for inner in datasets_within(dataset) if isinstance(inner, PerObjectDataset)]
    digests = [digest for listing in listings if (digest := listing.digest()) is not None]
    return "+".join(digests) or None


def max_in_flight_of(dataset: Any) -> int | None:
    """The smallest `max_in_flight` of a dataset, or of the datasets within it; None for "auto"."""
    limits = [config.max_in_flight for inner in datasets_within(dataset) for config in _configs_of(inner)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _configs_of(dataset: Any) -> list[Any]:
    """The configurations of the stores of a dataset of torchobj."""
    if isinstance(dataset, MapStyleDataset):
        return dataset._torchobj_configs()
    return dataset._listing.configs if isinstance(dataset, PerObjectDataset) else []


def object_finder(dataset: Any) -> ObjectFinder | None:
    """A function from indices of `dataset` to objects; None if the objects are not known.

    It raises an IndexError or a TypeError for what is not an index.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return None
    if isinstance(dataset, MapStyleDataset):
        # A subclass of users may return other samples, but of the objects that it names.
        is_known = isinstance(dataset, ObjectDataset) or not dataset._torchobj_is_overridden()
        return (lambda indices: dataset._torchobj_to_announce(positions_of(indices, dataset))) if is_known else None
    parts = parts_of(dataset)
    if parts is None or (isinstance(dataset, CompositeDataset) and not parts.is_exact):
        return None
    finders = [object_finder(part) for part in parts.datasets]
    if all(find is None for find in finders):
        return None
    return lambda indices: _objects(parts, finders, positions_of(indices, dataset))


def _objects(parts: Parts, finders: list[ObjectFinder | None], positions: list[int]) -> Objects:
    if parts.located is None:
        return [pair for find in finders if find is not None for pair in find(positions)]
    members, numbers = parts.located(np.array(positions, dtype=np.int64))
    found: Objects = []
    located = zip(members.tolist(), numbers.tolist(), strict=True)
    for member, group in itertools.groupby(located, key=operator.itemgetter(0)):
        if (find := finders[member]) is not None:
            found += find([number for _, number in group])
    return found


def prepare_workers(dataset: Any) -> None:
    """Does what DataLoader workers inherit, before they are started: lists, and starts the prefetcher.

    A dataset of another library, or of the user, may have datasets of torchobj as attributes, in containers too.
    """
    for each in _all_within(dataset, set()):
        if isinstance(each, MapStyleDataset):
            each._torchobj_prepare()
        else:
            each.prepare()


def _all_within(dataset: Any, seen: set[int]) -> Iterator[Any]:
    """The datasets of torchobj within a dataset, and itself, from the inside."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    parts = parts_of(dataset)
    is_own = isinstance(dataset, (MapStyleDataset, PassDataset, CompositeDataset))
    inner = parts.datasets if parts is not None else [] if is_own else _held(dataset, seen)
    for part in inner:
        yield from _all_within(part, seen)
    if is_own:
        yield dataset


def _held(dataset: Any, seen: set[int]) -> list[Any]:
    """The datasets that a dataset of another library has as attributes, and in containers within each other.

    Containers of samples may have millions of others within them: the search goes from the outside to the inside, at
    each level from the smallest to the largest container, and ends after a number of values.
    """
    found: list[Any] = []
    level: list[Any] = [getattr(dataset, "__dict__", {})]
    left = _MAX_SEARCHED
    # Containers of users may raise anything at any access.
    with contextlib.suppress(Exception):
        while level:
            inner: list[Any] = []
            for container in sorted(level, key=len):
                values = container.values() if isinstance(container, dict) else container
                for each in itertools.islice(values, min(_MAX_HELD, left)):
                    left -= 1
                    if isinstance(each, torch.utils.data.Dataset):
                        found.append(each)
                    elif isinstance(each, (dict, list, tuple)) and id(each) not in seen:
                        seen.add(id(each))
                        inner.append(each)
            level = inner
    return found
