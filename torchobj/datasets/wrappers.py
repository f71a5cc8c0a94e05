"""Looks through the datasets that wrap others: mixtures, and torch's Subset, ConcatDataset and StackDataset.

What is asked of a dataset is asked of the datasets within it: the objects of samples, their configurations, and what
workers inherit. Does no I/O itself.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data

from torchobj.config import PriceOptions, StoreConfig
from torchobj.datasets.base import PerObjectDataset
from torchobj.datasets.containers.stream import StreamDataset
from torchobj.datasets.objects import ObjectDataset
from torchobj.datasets.passes import PassDataset
from torchobj.datasets.samples import MapStyleDataset, is_overridden, positions_of
from torchobj.ranks.sharding import Order
from torchobj.reading.reader import Objects

#: Maximum number of items of a container among which datasets are looked for, and of all values of a dataset that are
#: looked at, before each epoch: more than these are samples.
_MAX_HELD, _MAX_SEARCHED = 1000, 10_000

ObjectFinder = Callable[[Sequence[Any]], Objects]


class Parts(NamedTuple):
    """The datasets that a dataset consists of."""

    datasets: list[Any]
    located: Callable[[Order], tuple[Order, Order]] | None
    """Returns the dataset of each position, by its number, and the position in it. None: a sample consists of one of
    each dataset, at the same position.
    """
    is_exact: bool
    """Whether its samples are those of the parts: a subclass may return others."""
    is_announced: bool = True
    """Whether its samples consist of the objects of the parts."""
    prepare: Callable[[], Any] = lambda: None
    """Creates what workers inherit, once the parts have done so."""


@functools.singledispatch
def parts_of(dataset: Any) -> Parts | None:
    """The datasets that a dataset consists of; None if it does not wrap others. Mixtures register their functions."""
    is_torchs = type(dataset) in _TORCHS
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


def prices_of(dataset: Any) -> PriceOptions:
    """The prices of the stores of a dataset, or of the datasets within it; zero if they differ."""
    prices = {config.prices for inner in datasets_within(dataset) for config in _configs_of(inner)}
    return prices.pop() if len(prices) == 1 else PriceOptions()


def _configs_of(dataset: Any) -> list[StoreConfig]:
    """The configurations of the stores of a dataset of torchobj."""
    if isinstance(dataset, MapStyleDataset):
        return dataset._torchobj.source.configs()
    return dataset._listing.configs if isinstance(dataset, PerObjectDataset | StreamDataset) else []


def objects_are_known(dataset: Any) -> bool:
    """Whether `object_finder` finds objects of the samples. Does no I/O."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return False
    if isinstance(dataset, MapStyleDataset):
        # A subclass of users may return other samples, but of the objects that it names.
        return isinstance(dataset, ObjectDataset) or not is_overridden(dataset, "__getitem__")
    parts = parts_of(dataset)
    return parts is not None and parts.is_announced and any(map(objects_are_known, parts.datasets))


def object_finder(dataset: Any) -> ObjectFinder:
    """A function from indices of `dataset` to objects, for one pass: lists and reads what it depends on now.

    It raises an IndexError or a TypeError for what is not an index. Objects that are not known are left out.
    """
    if not objects_are_known(dataset):
        return lambda _: []
    length, parts = len(dataset), parts_of(dataset)
    if parts is None:
        find = dataset._torchobj.object_finder()
        return lambda indices: find(positions_of(indices, length))
    finders = [object_finder(part) for part in parts.datasets]
    return lambda indices: _objects(parts.located, finders, positions_of(indices, length))


def _objects(
    located: Callable[[Order], tuple[Order, Order]] | None, finders: list[ObjectFinder], positions: list[int]
) -> Objects:
    if located is None:
        return [pair for find in finders for pair in find(positions)]
    members, numbers = located(np.array(positions, dtype=np.int64))
    found: Objects = []
    pairs = zip(members.tolist(), numbers.tolist(), strict=True)
    for member, group in itertools.groupby(pairs, operator.itemgetter(0)):
        found += finders[member]([number for _, number in group])
    return found


def prepare_workers(dataset: Any) -> None:
    """Does what DataLoader workers inherit, before they are started: lists, and starts the prefetcher.

    A dataset of another library, or of the user, may have datasets of torchobj as attributes, in containers too.
    """
    _prepare(dataset, set())


def _prepare(dataset: Any, seen: set[int]) -> None:
    """Prepares the datasets within a dataset, and then itself."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    parts = parts_of(dataset)
    if isinstance(dataset, MapStyleDataset):
        dataset._torchobj.source.prepare()
    elif isinstance(dataset, PassDataset) and parts is None:
        dataset.prepare()
    else:
        for part in _held(dataset, seen) if parts is None else parts.datasets:
            _prepare(part, seen)
        if parts is not None:
            parts.prepare()


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
