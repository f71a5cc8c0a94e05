"""Samples of a map-style dataset in a given order, read ahead by the process that uses them."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch.utils.data

from torchobj.datasets.base import Sample_co
from torchobj.datasets.map import ObjectMapDataset
from torchobj.datasets.mixture import Numbers
from torchobj.datasets.objects import ObjectDataset, announced_samples, objects_to_announce
from torchobj.datasets.passes import PassDataset
from torchobj.datasets.read_ahead import IndexedReader, read_ahead, sharing

__all__ = ["CompositeDataset", "ordered_samples", "prepare_workers", "samples_of"]

#: Maximum number of items of a container among which datasets are looked for: larger ones hold samples.
_MAX_HELD = 1000

#: Number of samples that a dataset that is not of torchobj returns at a time.
_GROUP_SAMPLES = 32

Located: TypeAlias = tuple[list[Any], Numbers, Numbers]


class CompositeDataset(torch.utils.data.Dataset[Sample_co]):
    """A map-style dataset whose samples are those of other map-style datasets."""

    #: The other datasets.
    datasets: list[Any]

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass of users may return other samples."""
        raise NotImplementedError

    def _located(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """The dataset of each position, by its number, and the position in it."""
        raise NotImplementedError


def prepare_workers(dataset: Any) -> None:
    """Does what DataLoader workers inherit, before they are started: lists, and starts the prefetcher.

    A dataset of another library, or of the user, may have datasets of torchobj as attributes, in containers too.
    """
    _prepare(dataset, set())


def _prepare(dataset: Any, seen: set[int]) -> None:
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    inner = _within(dataset, np.array([], dtype=np.int64))
    if inner is not None or isinstance(dataset, CompositeDataset):
        for part in dataset.datasets if inner is None else inner[0]:
            _prepare(part, seen)
    elif isinstance(dataset, ObjectMapDataset):
        len(dataset)
        dataset.announced([])
    elif isinstance(dataset, ObjectDataset):
        objects_to_announce(dataset, [])
    elif isinstance(dataset, PassDataset):
        dataset.prepare()
    else:
        for held in _held(dataset):
            _prepare(held, seen)


def _held(value: Any) -> list[Any]:
    """The datasets that a dataset of another library has as attributes, and containers, which may hold some."""
    if isinstance(value, (list, tuple)):
        found: Iterable[Any] = value
    elif isinstance(value, dict):
        found = value.values()
    else:
        found = list(getattr(value, "__dict__", {}).values())
    some = itertools.islice(found, _MAX_HELD)
    return [each for each in some if isinstance(each, (torch.utils.data.Dataset, dict, list, tuple))]


def ordered_samples(dataset: Any, order: Numbers) -> Iterator[Any]:
    """The samples at these positions. An exception of a sample does not end the iteration.

    The datasets of torchobj and torch's wrappers of these announce what they read next. Samples of other datasets are
    requested in groups, if they have `__getitems__`.
    """
    inner = _within(dataset, order)
    if inner is not None:
        parts, members, positions = inner
        if len(parts) == 1:
            return ordered_samples(parts[0], positions)
        return _Merged([ordered_samples(part, positions[members == at]) for at, part in enumerate(parts)], members)
    own = getattr(type(dataset), "__getitem__", None)
    if own is ObjectMapDataset.__getitem__:
        return _ListedSamples(dataset, order)
    if own is ObjectDataset.__getitem__:
        return announced_samples(dataset, order)
    return _Requested(dataset, order)


def _within(dataset: Any, positions: Numbers) -> Located | None:
    """The datasets that a dataset consists of, with the number of one and the position in it for each position."""
    if isinstance(dataset, CompositeDataset) and not dataset.is_overridden:
        return dataset.datasets, *dataset._located(positions)
    if type(dataset) is torch.utils.data.Subset:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return [dataset.dataset], np.zeros(len(positions), dtype=np.int64), indices[positions]
    if type(dataset) is torch.utils.data.ConcatDataset:
        ends = np.array(dataset.cumulative_sizes)
        members = np.searchsorted(ends, positions, side="right")
        return list(dataset.datasets), members, positions - np.concatenate([[0], ends])[members]
    return None


def samples_of(dataset: Any, positions: list[int]) -> Sequence[Any]:
    """The samples at these positions, read concurrently if the dataset can."""
    together = getattr(dataset, "__getitems__", None)
    return together(positions) if callable(together) else [dataset[position] for position in positions]


class _Merged(Iterator[Any]):
    """Takes each next sample from the iterator that `members` names."""

    def __init__(self, samples: list[Iterator[Any]], members: Numbers) -> None:
        self._samples, self._members = samples, iter(members.tolist())

    def __next__(self) -> Any:
        with sharing(len(self._samples)):
            return next(self._samples[next(self._members)])


class _ListedSamples(Iterator[Any]):
    """Samples of an `ObjectMapDataset`. Not a generator, which would end with the first exception of a sample."""

    def __init__(self, dataset: ObjectMapDataset[Any], order: Numbers) -> None:
        self._dataset = dataset
        self._readers: Iterator[IndexedReader] = read_ahead(dataset._listing, order, dataset._reader_constructor)

    def __next__(self) -> Any:
        index, reader = next(self._readers)
        return self._dataset._sample(index, reader)


class _Requested(Iterator[Any]):
    """Samples of any other dataset."""

    def __init__(self, dataset: Any, order: Numbers) -> None:
        self._dataset, self._order, self._begin = dataset, order, 0
        self._together = callable(getattr(dataset, "__getitems__", None))
        self._samples: collections.deque[Any] = collections.deque()
        # Of a group that failed: its samples are requested one by one.
        self._single = 0

    def __next__(self) -> Any:
        if self._samples:
            return self._samples.popleft()
        if self._begin == len(self._order):
            raise StopIteration
        group = self._order[self._begin : self._begin + _GROUP_SAMPLES].tolist()
        if self._together and not self._single:
            try:
                samples = list(self._dataset.__getitems__(group))
            except Exception:  # noqa: BLE001  raised when its sample is requested alone
                self._single = len(group)
            else:
                self._begin += len(group)
                self._samples.extend(samples)
                return self._samples.popleft()
        self._single = max(0, self._single - 1)
        self._begin += 1
        return self._dataset[group[0]]
