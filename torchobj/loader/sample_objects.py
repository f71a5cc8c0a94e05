"""Finds the objects of a sample and the manifest through mixtures and torch's wrappers.

Does no I/O.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.utils.data

from torchobj.config import StoreConfig
from torchobj.datasets.base import ListingDataset
from torchobj.datasets.interleave import InterleaveDataset, MapInterleaveDataset
from torchobj.datasets.map import ObjectMapDataset
from torchobj.datasets.objects import ObjectDataset, configs_at_start, objects_to_announce

#: Pairs of source number and index, which identify objects for the prefetcher.
Objects = list[tuple[int, int]]
ObjectFinder = Callable[[Sequence[int]], Objects]


def object_finder(dataset: Any) -> ObjectFinder | None:
    """A function from indices of `dataset` to objects; None if the objects are not known."""
    if isinstance(dataset, ObjectMapDataset):
        # A subclass may map an index to another object.
        own = type(dataset).__getitem__ is ObjectMapDataset.__getitem__
        return dataset.announced if own else None
    if isinstance(dataset, ObjectDataset):
        return partial(objects_to_announce, dataset)
    return _wrapped(dataset)


def _wrapped(dataset: Any) -> ObjectFinder | None:
    if isinstance(dataset, torch.utils.data.Subset):
        return _subset(dataset)
    if isinstance(dataset, MapInterleaveDataset):
        return _interleaved(dataset)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return _concatenated(dataset)
    if isinstance(dataset, torch.utils.data.StackDataset):
        return _stacked(dataset)
    return None


def manifest_digest(dataset: Any) -> str | None:
    """The digest of the manifest of a dataset, or those of all datasets within it; None if none is of a manifest."""
    listings = [inner._listing for inner in _innermost(dataset) if isinstance(inner, ListingDataset)]
    digests = [digest for listing in listings if (digest := listing.digest()) is not None]
    return "+".join(digests) or None


def max_in_flight_of(dataset: Any) -> int | None:
    """The smallest `max_in_flight` of a dataset, or of the datasets within it; None for "auto"."""
    limits = [config.max_in_flight for inner in _innermost(dataset) for config in _configs_of(inner)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _configs_of(dataset: Any) -> list[StoreConfig]:
    """The configurations of the stores of a dataset of torchobj."""
    if isinstance(dataset, ObjectDataset):
        return configs_at_start(dataset)
    return dataset._listing.configs if isinstance(dataset, ListingDataset) else []


def _innermost(dataset: Any) -> list[Any]:
    """The datasets within torch's wrappers; a dataset that is not a wrapper itself."""
    if isinstance(dataset, torch.utils.data.Subset):
        return _innermost(dataset.dataset)
    if isinstance(dataset, (torch.utils.data.ConcatDataset, InterleaveDataset)):
        return [inner for part in dataset.datasets for inner in _innermost(part)]
    if isinstance(dataset, torch.utils.data.StackDataset):
        return [inner for member in _members(dataset) for inner in _innermost(member)]
    return [dataset]


def _members(dataset: "torch.utils.data.StackDataset[Any]") -> Iterable[Any]:
    return dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets


def _subset(dataset: "torch.utils.data.Subset[Any]") -> ObjectFinder | None:
    inner = object_finder(dataset.dataset)
    if inner is None:
        return None
    return lambda indices: inner([dataset.indices[index] for index in indices])


def _concatenated(dataset: "torch.utils.data.ConcatDataset[Any]") -> ObjectFinder | None:
    parts = [object_finder(part) for part in dataset.datasets]
    if all(part is None for part in parts):
        return None
    ends = dataset.cumulative_sizes

    def objects(indices: Sequence[int]) -> Objects:
        found: Objects = []
        if not indices:
            # Before workers are started: each part creates what they inherit.
            found += [pair for find_objects in parts if find_objects is not None for pair in find_objects([])]
        for index in indices:
            position = index + ends[-1] if index < 0 else index
            part = bisect.bisect_right(ends, position)
            if part < len(parts) and (find_objects := parts[part]) is not None:
                found += find_objects([position - (ends[part - 1] if part else 0)])
        return found

    return objects


def _interleaved(dataset: MapInterleaveDataset[Any]) -> ObjectFinder | None:
    parts = [object_finder(part) for part in dataset.datasets]
    if dataset.is_overridden or all(part is None for part in parts):
        return None

    def objects(indices: Sequence[int]) -> Objects:
        if not indices:
            # Before workers are started: each part creates what they inherit. Forked workers inherit the mixture.
            len(dataset)
            return [pair for find_objects in parts if find_objects is not None for pair in find_objects([])]
        found: Objects = []
        for member, number in dataset.located(indices):
            if (find_objects := parts[member]) is not None:
                found += find_objects([number])
        return found

    return objects


def _stacked(dataset: "torch.utils.data.StackDataset[Any]") -> ObjectFinder | None:
    find_objects = [found for member in _members(dataset) if (found := object_finder(member)) is not None]
    if not find_objects:
        return None
    return lambda indices: [pair for found in find_objects for pair in found(indices)]
