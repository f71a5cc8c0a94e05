"""`Samples`: reads and builds the samples of a source, in batches or in order, and replaces those that fail.

A map-style dataset has its samples in one private attribute; an iterable dataset of objects creates them for each pass.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias

import torch.utils.data
from typing_extensions import TypeVar

from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.datasets.failures import Failure, FailurePolicy, neighbours
from torchobj.ranks.sharding import Order
from torchobj.reading import lookahead_warning
from torchobj.reading.read_ahead import Group, grouped, read_ahead
from torchobj.reading.reader import DatasetReader, Key, Objects
from torchobj.telemetry.ranges import profiled
from torchobj.workers import process
from torchobj.workers.memory_budget import HAS_PREFETCHER

#: Type of the samples of a dataset, for type checkers.
Sample_co = TypeVar("Sample_co", covariant=True, default=Any)

#: Maximum number of samples whose objects are requested together when samples are read in order, and maximum share of
#: the announced bytes that these take, which are held until the samples are used.
_GROUP_SAMPLES, _GROUP_SHARE = 32, 0.25


def positions_of(indices: Sequence[Any], length: int) -> list[int]:
    """The positions of samples, starting at 0, in a dataset of this length. Negative indices count from the end.

    Raises:
        TypeError: An index is not an integer.
        IndexError: There is no such sample.
    """
    positions = []
    for index in indices:
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"index {index!r}: must be an int") from None
        if not -length <= number < length:
            raise IndexError(f"index {number} of {length} samples")
        positions.append(number % length)
    return positions


class SampleSource(Protocol[Key]):
    """What the samples of a dataset are made of."""

    def __len__(self) -> int:
        """Number of samples."""

    def prepare(self) -> None:
        """Creates what workers inherit, before they are started: lists, and starts the prefetcher."""

    def reader(self) -> DatasetReader[Key]:
        """Reads the objects."""

    def keys(self, position: int) -> Sequence[Key]:
        """The objects of a sample."""

    def build(self, position: int, readers: Sequence[ObjectReader]) -> Any:
        """Builds a sample from the readers of its objects."""

    def configs(self) -> list[StoreConfig]:
        """The configurations of the stores of the objects, as far as they are known."""


class ReadSample(NamedTuple):
    """What a sample is built from."""

    position: int
    keys: Sequence[Any]
    readers: Sequence[Any]
    """A reader of each object, or the exception if it cannot be read."""
    reader: DatasetReader[Any]
    """Has read them."""
    error: Exception | None = None
    """The exception of `SampleSource.keys`."""


#: The position of a sample, the keys of its objects, and the exception of `SampleSource.keys`.
_Named: TypeAlias = tuple[int, Sequence[Any], Exception | None]


class Samples(Generic[Key]):
    """The samples of a source.

    Args:
        source: What they are made of.
        failures: Returns samples in place of those that fail.
        step: Describes `source.build` in the notes of its exceptions.
    """

    def __init__(self, source: SampleSource[Key], failures: FailurePolicy, step: str = "in the transform") -> None:
        self.source, self.failures, self._step = source, failures, step

    def at(self, positions: list[int]) -> list[Any]:
        """The samples at these positions. Reads their objects concurrently."""
        named, reader, found = self._read(positions)
        samples, begin = [], 0
        with profiled("torchobj.decode"):
            for position, keys in zip(positions, named, strict=True):
                end = begin + len(keys)
                sample = self._built(position, keys, found[begin:end], reader)
                begin = end
                samples.append(self._replaced(position, sample) if isinstance(sample, Failure) else sample)
        return samples

    def in_order(self, order: Order) -> Iterator[Any]:
        """The samples at these positions. Objects of the next ones are announced."""
        # Not a generator, which would end with the first exception of a sample.
        return map(self.sample, self.read_in_order(order, self.source.reader()))

    def sample(self, read: ReadSample) -> Any:
        """The sample of what was read for it, or one in place of it if it failed."""
        position, keys, readers, reader, error = read
        sample = Failure(None, error) if error is not None else self._built(position, keys, readers, reader)
        return self._replaced(position, sample) if isinstance(sample, Failure) else sample

    def _replaced(self, position: int, failure: Failure) -> Any:
        return self.failures.sample(position, failure, self._others(position))

    def _others(self, position: int) -> Iterator[Any | Failure]:
        """The samples that `replace` tries. A generator, because the length of a listing in progress is not known."""
        for other in neighbours(position, len(self.source)):
            [keys], reader, found = self._read([other])
            yield self._built(other, keys, found, reader)

    def _built(
        self, position: int, keys: Sequence[Key], readers: Sequence[Any], reader: DatasetReader[Key]
    ) -> Any | Failure:
        """The sample of the readers of its objects, or exceptions in place of them; or why there is none."""
        for number, each in enumerate(readers):
            if isinstance(each, Exception):
                return Failure.noted(each, "in the read", reader.url_of(keys[number]), position)
        try:
            return self.source.build(position, readers)
        except Exception as failed:  # noqa: BLE001  raised, unless on_error handles it
            url = reader.url_of(keys[0]) if keys else "without objects"
            return Failure.noted(failed, self._step, url, position)

    def _read(self, positions: list[int]) -> tuple[list[Sequence[Key]], DatasetReader[Key], list[Any]]:
        """The keys of each sample, the reader, and what it returns for all of them."""
        named, reader = list(map(self.source.keys, positions)), self.source.reader()
        return named, reader, reader.read(list(itertools.chain.from_iterable(named)))

    def read_in_order(self, order: Order, reader: DatasetReader[Key]) -> Iterator[ReadSample]:
        """What the samples at these positions are built from. Objects of the next ones are announced."""
        if not reader.is_whole:
            for position, keys, error in self._named(order):
                yield ReadSample(position, keys, reader.read(keys), reader, error)
            return

        def sized() -> Iterator[tuple[_Named, int]]:
            for begin in range(0, len(order), _GROUP_SAMPLES):
                group = list(self._named(order[begin : begin + _GROUP_SAMPLES]))
                sizes = iter(reader.sizes([key for _, keys, _ in group for key in keys]))
                yield from ((each, sum(itertools.islice(sizes, len(each[1])))) for each in group)

        def groups(limit: int) -> Iterator[Group[Key]]:
            for group, size in grouped(sized(), _GROUP_SAMPLES, min(reader.group_bytes, int(limit * _GROUP_SHARE))):
                yield Group([key for _, keys, _ in group for key in keys], size, group)

        for group, readers in read_ahead(reader, groups):
            for position, keys, error in group.content:
                yield ReadSample(position, keys, list(itertools.islice(readers, len(keys))), reader, error)

    def _named(self, order: Order) -> Iterator[_Named]:
        """The keys of the samples at these positions."""
        for position in order.tolist():
            try:
                yield position, self.source.keys(position), None
            except Exception as error:  # noqa: BLE001  raised in the place of the sample
                yield position, (), error

    def object_finder(self) -> Callable[[list[int]], Objects]:
        """The function from positions to objects, as a loader announces them. Called when a pass begins."""
        find = self.source.reader().object_finder()

        def found(positions: list[int]) -> Objects:
            keys: list[Key] = []
            for position in positions:
                try:
                    keys += self.source.keys(position)
                except Exception:  # noqa: BLE001, S112  raised when the sample is read
                    continue
            return find(keys)

        return found


class MapStyleDataset(torch.utils.data.Dataset[Sample_co]):
    """Base class of the map-style datasets of torchobj. It has one private name: `_torchobj`."""

    _torchobj: Samples[Any]

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__(): the number of samples")

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`. Negative indices count from the end.

        Raises:
            IndexError: There is no such sample.
            StoreError: An object of it cannot be read.
        """
        if process.in_worker():
            _note_batch(self)
        sample: Sample_co = self._torchobj.at(positions_of([index], len(self)))[0]
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch, read concurrently. Called by DataLoader."""
        if is_overridden(self):
            return [self[index] for index in indices]
        _note_batch(self)
        return self._torchobj.at(positions_of(indices, len(self)))

    @property
    def failed_samples(self) -> int:
        """Number of samples that failed so far, in this process and its DataLoader workers."""
        return self._torchobj.failures.count


def is_overridden(dataset: MapStyleDataset[Any]) -> bool:
    """Whether a subclass of users returns other samples."""
    return type(dataset).__getitem__ is not MapStyleDataset.__getitem__


def _note_batch(dataset: MapStyleDataset[Any]) -> None:
    if HAS_PREFETCHER and dataset._torchobj.source.reader().is_whole:
        lookahead_warning.note_batch(dataset)
