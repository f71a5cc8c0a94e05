"""Iterable datasets whose samples are read from shards, one after the other: order, division, shuffling and resuming.

A subclass reads the samples of segments, which are parts of its units: tar files, or row groups of Parquet files.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from torchobj.config.checks import check, check_callable
from torchobj.datasets.containers.shuffle_buffer import ShuffleBuffer
from torchobj.datasets.failures import Failure, OnIterableError, add_sample_note
from torchobj.datasets.listing import Listing
from torchobj.datasets.passes import PassDataset, PassIterator
from torchobj.datasets.samples import Sample_co
from torchobj.exceptions import ConfigError
from torchobj.manifest import Manifest
from torchobj.ranks import broadcast
from torchobj.ranks.sample_ranks import SampleRanks
from torchobj.ranks.sharding import (
    Division,
    Order,
    Segment,
    Shard,
    divided,
    equal_segments,
    in_order,
    resampled,
    shuffled,
    worker_part,
)
from torchobj.reading.reader import RefReader
from torchobj.stateful import Position

logger = logging.getLogger("torchobj")


class SampleId(NamedTuple):
    """Identifies a sample, so that it can be read again."""

    unit: int
    sample: int
    """Number of the sample in its unit."""
    begin: int = 0
    """Where it begins in its unit, in bytes."""
    end: int = 0


class StreamItem(NamedTuple):
    """A sample of a stream, or the exception in its place."""

    id: SampleId
    value: Any
    after: tuple[int, int | None, int]
    """The place after it: number of the segment that contains the next sample; number of that sample in its unit, None
    at the start of the segment; and where it begins there, in bytes, 0 if that is unknown.
    """


def failed_items(url: str, unit: int, segment: int, samples: range, error: Exception) -> Iterator[StreamItem]:
    """Items in place of samples of a segment that cannot be read; the last one ends the segment.

    Args:
        url: URL of the shard.
        unit: Number of the unit.
        segment: Number of the segment.
        samples: Numbers of the samples in the unit.
        error: The exception in their place, to which a note that names the first one is added.
    """
    add_sample_note(error, "in the read", url, samples.start)
    for number in samples:
        after = (segment, number + 1) if number + 1 < samples.stop else (segment + 1, None)
        yield StreamItem(SampleId(unit, number), error, (*after, 0))


class StreamDataset(PassDataset[Sample_co]):
    """Base class of datasets that read shards as streams.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.
        seed, uneven, on_error: The arguments. They can be assigned, with effect from the next `iter`; persistent
            workers keep the values that they were started with.
    """

    #: What is divided among ranks and workers, in messages.
    _unit_name = "shards"
    #: Why the samples may not be counted, in messages.
    _uncounted = ""

    def _set_up(
        self,
        listing: Listing,
        *,
        transform: Callable[[Any], Any] | None,
        shuffle: bool,
        seed: int,
        uneven: str | None,
        on_error: OnIterableError,
        ranks: SampleRanks,
        shuffle_buffer: int = 0,
    ) -> None:
        is_size = isinstance(shuffle_buffer, int) and not isinstance(shuffle_buffer, bool) and shuffle_buffer >= 0
        check("shuffle_buffer", shuffle_buffer, "a number of samples, 0 or more", ok=is_size)
        check("shuffle", shuffle, "True or False", ok=isinstance(shuffle, bool))
        check_callable("transform", transform)
        self._listing, self._transform = listing, transform
        self._shuffle, self._shuffle_buffer = shuffle, shuffle_buffer
        self.seed, self.uneven = seed, uneven
        self._reader = RefReader(listing.config)
        self._set_up_passes(on_error, ranks)
        self._check()

    def __repr__(self) -> str:
        # A subclass may not have called super().__init__().
        if "_listing" not in self.__dict__:
            return f"<{type(self).__name__} not set up>"
        order = f"shuffle_buffer={self._shuffle_buffer}, seed={self.seed}, uneven={self.uneven!r}"
        return f"<{type(self).__name__} {self._listing!r}, {order}, epoch {self._epoch.next()}>"

    @property
    def manifest(self) -> Manifest:
        """The shards, listed at the first access. An access before the loop lists once for all workers."""
        return self._listing.manifest()

    @override
    def prepare(self) -> None:
        self._reader.source()
        self._units()
        if self.uneven is not None:
            self._known_counts()

    def _units(self) -> int:
        """Number of units. The first call reads what determines it."""
        return len(self.manifest)

    def _unit_url(self, unit: int) -> str:
        """URL of the shard that contains a unit."""
        return self.manifest.url(unit)

    def _counts(self) -> Order | None:
        """Number of samples of each unit. None: a pass does not know them before it reads its units."""
        raise NotImplementedError

    def _known_counts(self) -> Order:
        """Number of samples of each unit, which `uneven` needs.

        Raises:
            ConfigError: It is not known.
        """
        if (counts := self._counts()) is None:
            raise ConfigError(f"uneven={self.uneven!r}: {self._uncounted}; pass uneven=None")
        return counts

    def _items(self, segments: list[Segment], number: int, begin: int | None) -> Iterator[StreamItem]:
        """The samples of segments, in order. Failures are items.

        Args:
            segments: The segments.
            number: Number of the first one in its pass.
            begin: Where its first sample begins in its unit, in bytes; None if that is unknown.
        """
        raise NotImplementedError

    def _items_again(self, ids: list[SampleId]) -> Iterator[StreamItem]:
        """Samples that were read before, in this order. Their positions are not used."""
        raise NotImplementedError

    def _kept(self, value: Any) -> Any:
        """A value for the shuffle buffer, without the memory of other samples."""
        return value

    def _kept_item(self, item: StreamItem) -> StreamItem:
        return item._replace(value=self._kept(item.value))

    def _unit_bytes(self, unit: int) -> int | None:
        """Size of the unit in which positions are offsets; None if they are not."""
        raise NotImplementedError

    def _checked_place(
        self, start: Position, segments: list[Segment]
    ) -> tuple[tuple[int, int | None, int], list[SampleId], int]:
        """The place in the stream at which a pass starts, the samples in its shuffle buffer, and the number of draws.

        Raises:
            ConfigError: It is not a position in these segments.
        """
        first = {} if start["done"] else {"stream": (0, None, 0)}
        saved = start.get("position", first)
        draws, ids, place = saved.get("draws", 0), list[SampleId](), (0, None, 0)
        try:
            segment, sample, offset = place = tuple(saved["stream"])
            held = [iter(saved.get("held", []))] * 4
            ids = [SampleId(*each) for each in zip(*held, strict=True)]
            numbers = [segment, 0 if sample is None else sample, offset, draws, *itertools.chain.from_iterable(ids)]
            ok = all(type(each) is int and 0 <= each < 1 << 63 for each in numbers)
            ok = ok and segment <= len(segments) and len(ids) <= self._shuffle_buffer
            if ok and segment < len(segments) and sample is not None:
                ok = self._is_sample(SampleId(segments[segment].unit, sample, offset, offset))
            ok = ok and all(map(self._is_sample, ids))
        except (KeyError, TypeError, ValueError):
            ok = False
        check("position of the state", saved, "that of a state of these shards", ok=ok)
        return place, ids, draws

    def _is_sample(self, each: SampleId) -> bool:
        """Whether a sample may exist."""
        if each.unit >= self._units():
            return False
        size = self._unit_bytes(each.unit)
        return size is None or each.begin <= each.end <= size

    def _finished(self, sample: Any) -> Any:
        """Decodes and transforms a sample."""
        return sample if self._transform is None else self._transform(sample)

    def _order(self, epoch: int) -> Order:
        units = self._units()
        return shuffled(units, self.seed, epoch) if self._shuffle else in_order(units)

    @override
    def _is_countable(self) -> bool:
        return self._listing.is_found or not broadcast.in_job()

    @override
    def _lengths(self, shards: Sequence[Shard], epoch: int) -> list[int]:
        counts = self._counts()
        if counts is None:
            raise TypeError(f"{self._listing.name}: its samples cannot be counted: {self._uncounted}")
        if self.uneven is None:
            is_divided = any(shard.world_size * shard.workers > 1 for shard in shards)
            if self._shuffle and is_divided and len(set(counts.tolist())) > 1:
                # A Trainer of Lightning keeps the first one, and would end longer epochs early.
                raise TypeError(
                    f"{self._listing.name}: the number of batches varies from epoch to epoch, because shuffled "
                    f"{self._unit_name} of different sizes are divided; pass uneven='drop' or 'pad'"
                )
            order = self._order(epoch)
            return [int(counts[shard.select(order, None)].sum()) for shard in shards]
        per_rank = divided(counts, shards[0].world_size, self.uneven).per_rank
        return [end - begin for begin, end in (worker_part(per_rank, shard) for shard in shards)]

    def _segments(self, shard: Shard, epoch: int) -> list[Segment]:
        order = self._order(epoch)
        if self.uneven is None:
            self._warn_of_uneven_shards(shard, len(order))
            return [Segment(int(unit)) for unit in shard.select(order, None)]
        counts = self._known_counts()
        division = divided(counts, shard.world_size, self.uneven)
        self._log_division(shard, division)
        if self.uneven == "resample":
            return resampled(counts, shard, division, self.seed, epoch) if division.samples else []
        return equal_segments(order, counts, shard, division)

    def _warn_of_uneven_shards(self, shard: Shard, units: int) -> None:
        parts = shard.world_size * shard.workers
        if units % parts == 0 or shard.rank or shard.worker or not self._epoch.is_first("uneven"):
            return
        if shard.world_size > 1:
            logger.warning(
                "%s: %d %s are divided among %d ranks with %d workers each, so that ranks yield different numbers "
                "of samples; pass uneven='drop', 'pad' or another policy if the ranks must yield the same number",
                self._listing.name,
                units,
                self._unit_name,
                shard.world_size,
                shard.workers,
            )
        elif units < parts:
            logger.warning(
                "%s: %d %s are divided among %d workers, so that some have none; use fewer workers, or smaller %s",
                self._listing.name,
                units,
                self._unit_name,
                parts,
                self._unit_name,
            )

    def _log_division(self, shard: Shard, division: Division) -> None:
        if shard.rank or shard.worker or not self._epoch.is_first("division"):
            return
        samples, per_rank = division
        total = per_rank * shard.world_size
        if self.uneven == "resample":
            action = f"{total} of {samples} samples are drawn with their shards, with replacement: some repeat"
        elif total < samples:
            action = f"{samples - total} of {samples} samples are left out"
        elif total > samples:
            action = f"{total - samples} of {samples} samples are repeated"
        else:
            return
        logger.warning(
            "%s: uneven=%r: %s in each epoch, so that each of %d ranks yields %d",
            self._listing.name,
            self.uneven,
            action,
            shard.world_size,
            per_rank,
        )

    def _shape(self, shard: Shard) -> dict[str, Any]:
        """The parameters of a pass, on which its position depends."""
        return {
            "shards": self.manifest.digest(),
            "world_size": shard.world_size,
            "workers": shard.workers,
            "shuffle": self._shuffle,
            "shuffle_buffer": self._shuffle_buffer,
            "uneven": self.uneven,
        }

    def __iter__(self) -> Iterator[Sample_co]:
        self._check()
        self._warn_of_repeated_samples(self._listing.name)
        shard, epoch = self._shard(), self._pass_epoch()
        segments = self._segments(shard, epoch)
        broadcast.confirm()
        position = self._starting_position(self._shape(shard), epoch)
        place, ids, draws = self._checked_place(position, segments)
        number, sample, begin = place
        left = segments[number:]
        if left and sample is not None:
            left[0] = left[0]._replace(first=sample)
        items = self._items(left, number, begin if sample is not None and begin else None)
        stream, buffer = _Stream(map(self._kept_item, items) if self._shuffle_buffer else items, place), None
        if self._shuffle_buffer:
            held = list(map(self._kept_item, self._items_again(ids))) if ids else []
            seed = (self.seed, epoch, shard.rank, shard.worker)
            buffer = ShuffleBuffer(stream, self._shuffle_buffer, seed, draws, held)
        within = functools.partial(_position, stream, buffer)
        return PassIterator(self, position, stream if buffer is None else buffer, self._sample, within)

    def _sample(self, item: StreamItem) -> Any:
        (unit, number, *_), value = item.id, item.value
        if isinstance(value, Exception):
            failure = Failure(number, self._unit_url(unit), value.with_traceback(None))
        else:
            try:
                return self._finished(value)
            except Exception as error:  # noqa: BLE001  raised, unless on_error handles it
                failure = Failure.noted(number, self._unit_url(unit), error, "in the transform")
        return self._failures.sample(failure)


class _Stream(Iterator[StreamItem]):
    """The items of a pass. Records the place after the last one.

    Args:
        items: The items.
        place: The place before them.
    """

    def __init__(self, items: Iterator[StreamItem], place: tuple[int, int | None, int]) -> None:
        self._items, self.after = items, place

    def __next__(self) -> StreamItem:
        item = next(self._items)
        self.after = item.after
        return item


def _position(stream: _Stream, buffer: ShuffleBuffer[StreamItem] | None) -> Position:
    """The position of a pass in its stream. A function: a stream with its buffer would reference itself."""
    if buffer is None:
        return {"stream": list(stream.after)}
    held = [number for item in buffer.held for number in item.id]
    return {"stream": list(stream.after), "draws": buffer.draws, "held": held}
