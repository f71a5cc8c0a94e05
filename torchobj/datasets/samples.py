"""`Samples`: reads and builds the samples of a source, in batches or in order, and replaces those that fail.

A map-style dataset has its samples in one private attribute; an iterable dataset of objects creates them for each pass.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeAlias

import torch.utils.data
from typing_extensions import TypeVar

from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.datasets.failures import Failure, FailurePolicy, neighbours, stopped
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


class Unnamed(list[Any]):
    """In place of the objects of a sample that cannot be named: none, and the exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class SampleSource(Protocol[Key]):
    """What the samples of a dataset are made of."""

    def __len__(self) -> int:
        """Number of samples."""

    def prepare(self) -> None:
        """Creates what workers inherit, before they are started: lists, and starts the prefetcher."""

    def reader(self) -> DatasetReader[Key]:
        """Reads the objects."""

    def keys(self, positions: list[int]) -> Sequence[Sequence[Key]]:
        """The objects of each sample; `Unnamed` for a sample whose objects cannot be named."""

    def build(self, position: int, readers: Sequence[ObjectReader]) -> Any:
        """Builds a sample from the readers of its objects."""

    def configs(self) -> list[StoreConfig]:
        """The configurations of the stores of the objects, as far as they are known."""


#: What a sample is built from: its position, the keys of its objects, a reader of each object, or the exception if it
#: cannot be read, and what has read them.
ReadSample: TypeAlias = tuple[int, Sequence[Any], Sequence[Any], DatasetReader[Any]]


class Samples(Generic[Key]):
    """The samples of a source.

    Args:
        source: What they are made of.
        failures: Returns samples in place of those that fail.
        step: Describes `source.build` in the notes of its exceptions.
    """

    def __init__(self, source: SampleSource[Key], failures: FailurePolicy, step: str = "in the transform") -> None:
        self.source, self.failures, self._step = source, failures, step

    def at(self, positions: list[int], reader: DatasetReader[Key]) -> list[Any]:
        """The samples at these positions. `reader`, which is that of the source, reads their objects concurrently."""
        built = self._read(positions, reader)
        with profiled("torchobj.decode"):
            return [self._replaced(each) if isinstance(each, Failure) else each for each in built]

    def in_order(self, order: Order) -> Iterator[Any]:
        """The samples at these positions. Objects of the next ones are announced."""
        # Not a generator, which would end with the first exception of a sample.
        return map(self.sample, self.read_in_order(order, self.source.reader()))

    def sample(self, read: ReadSample) -> Any:
        """The sample of what was read for it, or one in place of it if it failed."""
        position, keys, readers, reader = read
        sample = self._built(position, keys, readers, reader)
        return self._replaced(sample) if isinstance(sample, Failure) else sample

    def _replaced(self, failure: Failure) -> Any:
        return self.failures.sample(failure, self._others(failure.sample))

    def _others(self, position: int) -> Iterator[Any | Failure]:
        """The samples that `replace` tries. A generator, because the length of a listing in progress is not known."""
        for other in neighbours(position, len(self.source)):
            yield from self._read([other], self.source.reader())

    def _read(self, positions: list[int], reader: DatasetReader[Key]) -> Iterator[Any | Failure]:
        """Reads the objects of samples. The samples are built by the iterator."""
        named = self.source.keys(positions)
        parts = _parts(reader.read(_all(named)), named)
        return map(self._built, positions, named, parts, itertools.repeat(reader))

    def _built(
        self, position: int, keys: Sequence[Key], readers: Sequence[Any], reader: DatasetReader[Key]
    ) -> Any | Failure:
        """The sample that is built from what was read, or the failure."""
        for each in readers:
            if isinstance(each, Exception):
                return Failure.noted(position, reader.url_of(keys[readers.index(each)]), each, "in the read")
        if not keys and isinstance(keys, Unnamed):
            raise stopped(keys.error)
        try:
            return self.source.build(position, readers)
        except Exception as failed:  # noqa: BLE001  raised, unless on_error handles it
            return Failure.noted(position, reader.url_of(keys[0]) if keys else "without objects", failed, self._step)

    def read_in_order(self, order: Order, reader: DatasetReader[Key]) -> Iterator[ReadSample]:
        """What the samples at these positions are built from. Objects of the next ones are announced."""
        if not reader.is_whole:
            for position in order.tolist():
                [keys] = self.source.keys([position])
                yield position, keys, reader.read(keys), reader
            return

        def sized(begin: int) -> Iterator[tuple[tuple[int, Sequence[Key]], int]]:
            positions = order[begin : begin + _GROUP_SAMPLES].tolist()
            named = self.source.keys(positions)
            sizes = map(sum, _parts(reader.sizes(_all(named)), named))
            return zip(zip(positions, named, strict=True), sizes, strict=True)

        def groups(limit: int) -> Iterator[Group[Key]]:
            each = itertools.chain.from_iterable(map(sized, range(0, len(order), _GROUP_SAMPLES)))
            for group, size in grouped(each, _GROUP_SAMPLES, min(reader.group_bytes, int(limit * _GROUP_SHARE))):
                yield Group(_all(map(operator.itemgetter(1), group)), size, group)

        for group, readers in read_ahead(reader, groups):
            for position, keys in group.content:
                yield position, keys, tuple(itertools.islice(readers, len(keys))), reader

    def object_finder(self) -> Callable[[list[int]], Objects]:
        """The function from positions to objects, as a loader announces them. Called when a pass begins."""
        find, keys = self.source.reader().object_finder(), self.source.keys
        # A sample whose objects cannot be named raises when it is read.
        return lambda positions: find(_all(keys(positions)))


def _all(named: Iterable[Sequence[Key]]) -> list[Key]:
    """The objects of several samples."""
    return list(itertools.chain.from_iterable(named))


def _parts(of_all: list[Any], named: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """What belongs to the objects of each sample, of what belongs to those of all."""
    if {*map(len, named)} == {1}:
        # The same, without a call for each sample.
        return zip(of_all)
    each = iter(of_all)
    return (tuple(itertools.islice(each, len(keys))) for keys in named)


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
        return _samples_at(self, [index], is_batch=process.in_worker())[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch, read concurrently. Called by DataLoader."""
        if is_overridden(self, "__getitem__"):
            return [self[index] for index in indices]
        return _samples_at(self, indices, is_batch=True)

    @property
    def failed_samples(self) -> int:
        """Number of samples that failed so far, in this process and its DataLoader workers."""
        return self._torchobj.failures.count


def is_overridden(dataset: torch.utils.data.Dataset[Any], method: str) -> bool:
    """Whether a subclass of users has its own method, and may return other samples by it."""
    defined_by = next(cls for cls in type(dataset).__mro__ if method in vars(cls))
    return not defined_by.__module__.startswith("torchobj.")


def _samples_at(dataset: MapStyleDataset[Sample_co], indices: Sequence[Any], *, is_batch: bool) -> list[Sample_co]:
    samples = dataset._torchobj
    reader = samples.source.reader()
    if is_batch and HAS_PREFETCHER and reader.is_whole:
        lookahead_warning.note_batch(dataset)
    return samples.at(positions_of(indices, len(dataset)), reader)
