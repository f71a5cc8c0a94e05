"""Which objects a sample is made of, and how many samples failed, seen through torch's own wrappers of datasets.

Reads nothing.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.utils.data

from torchobj.config import StoreConfig
from torchobj.datasets.map import ObjectMapDataset
from torchobj.datasets.objects import ObjectDataset, announceable, reads_of

#: Source and index, as the prefetcher knows objects.
Objects = list[tuple[int, int]]
Hints = Callable[[Sequence[int]], Objects]


def hints_of(dataset: Any) -> Hints | None:
    """What makes objects of indices of `dataset`; None where that cannot be known."""
    if isinstance(dataset, ObjectMapDataset):
        # What a subclass makes of an index may be another object.
        own = type(dataset).__getitem__ is ObjectMapDataset.__getitem__
        return dataset.announced if own else None
    if isinstance(dataset, ObjectDataset):
        return partial(announceable, dataset)
    if isinstance(dataset, torch.utils.data.Subset):
        return _subset(dataset)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return _concatenated(dataset)
    if isinstance(dataset, torch.utils.data.StackDataset):
        return _stacked(dataset)
    return None


def failed_samples(dataset: Any) -> int:
    """How many samples failed of a dataset, or of those within it."""
    return sum(int(getattr(inner, "failed_samples", 0)) for inner in _innermost(dataset))


def max_in_flight_of(dataset: Any) -> int | None:
    """The smallest `max_in_flight` that was set for a dataset, or for those within it; None where it is "auto"."""
    configs = [
        reads_of(inner).config if isinstance(inner, ObjectDataset) else getattr(inner, "_config", None)
        for inner in _innermost(dataset)
    ]
    limits = [config.max_in_flight for config in configs if isinstance(config, StoreConfig)]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _innermost(dataset: Any) -> list[Any]:
    """The datasets that torch's own wrappers hold; one that is no wrapper is itself."""
    if isinstance(dataset, torch.utils.data.Subset):
        return _innermost(dataset.dataset)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return [inner for part in dataset.datasets for inner in _innermost(part)]
    if isinstance(dataset, torch.utils.data.StackDataset):
        return [inner for member in _members(dataset) for inner in _innermost(member)]
    return [dataset]


def _members(dataset: "torch.utils.data.StackDataset[Any]") -> Iterable[Any]:
    return dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets


def _subset(dataset: "torch.utils.data.Subset[Any]") -> Hints | None:
    inner = hints_of(dataset.dataset)
    if inner is None:
        return None
    return lambda indices: inner([dataset.indices[index] for index in indices])


def _concatenated(dataset: "torch.utils.data.ConcatDataset[Any]") -> Hints | None:
    parts = [hints_of(part) for part in dataset.datasets]
    if all(part is None for part in parts):
        return None
    ends = dataset.cumulative_sizes

    def objects(indices: Sequence[int]) -> Objects:
        found: Objects = []
        if not indices:
            # Before workers are started: each part makes what they inherit.
            found += [pair for hints in parts if hints is not None for pair in hints([])]
        for index in indices:
            position = index + ends[-1] if index < 0 else index
            part = bisect.bisect_right(ends, position)
            if part < len(parts) and (hints := parts[part]) is not None:
                found += hints([position - (ends[part - 1] if part else 0)])
        return found

    return objects


def _stacked(dataset: "torch.utils.data.StackDataset[Any]") -> Hints | None:
    hints = [found for member in _members(dataset) if (found := hints_of(member)) is not None]
    if not hints:
        return None
    return lambda indices: [pair for found in hints for pair in found(indices)]
