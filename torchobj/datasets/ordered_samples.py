"""Samples of a map-style dataset in a given order, read ahead by the process that uses them."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from torchobj.datasets.map_style import MapStyleDataset
from torchobj.datasets.mixture import Numbers
from torchobj.datasets.read_ahead import sharing
from torchobj.datasets.wrappers import parts_of

__all__ = ["ordered_samples", "samples_of"]

#: Number of samples that a dataset that is not of torchobj returns at a time.
_GROUP_SAMPLES = 32


def ordered_samples(dataset: Any, order: Numbers) -> Iterator[Any]:
    """The samples at these positions. An exception of a sample does not end the iteration.

    The datasets of torchobj and torch's wrappers of these announce what they read next. Samples of other datasets are
    requested in groups, if they have `__getitems__`.
    """
    parts = parts_of(dataset)
    if parts is not None and parts.is_exact and parts.located is not None:
        members, positions = parts.located(order)
        if len(parts.datasets) == 1:
            return ordered_samples(parts.datasets[0], positions)
        samples = [ordered_samples(part, positions[members == at]) for at, part in enumerate(parts.datasets)]
        return _Merged(samples, members)
    if isinstance(dataset, MapStyleDataset) and not dataset._torchobj_is_overridden():
        return dataset._torchobj_in_order(order)
    return _Requested(dataset, order)


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
