"""Iterable datasets whose samples are read from shards, one after the other: order, division, shuffling and resuming.

A subclass reads the samples of segments, which are parts of its units: tar files, or row groups of Parquet files.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from typing_extensions import override

from torchobj.config.checks import check
from torchobj.datasets.base import ListedDataset, Sample_co
from torchobj.datasets.containers.shuffle_buffer import ShuffleBuffer
from torchobj.datasets.failures import Failure, OnIterableError, add_sample_note
from torchobj.datasets.listing import DatasetListing
from torchobj.datasets.passes import PassDataset, PassIterator, PassProgress
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
)
from torchobj.reading.reader import RefReader

logger = logging.getLogger("torchobj")


class StreamPosition(NamedTuple):
    """The place in a stream after a sample."""

    segment: int = 0
    """Number of the segment that contains the next sample."""
    sample: int | None = None
    """Number of the next sample in its unit; None at the start of the segment."""
    offset: int = 0
    """Where the next sample begins in its unit, in bytes; 0 if that is unknown."""


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
    after: StreamPosition


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
        after = StreamPosition(segment, number + 1) if number + 1 < samples.stop else StreamPosition(segment + 1)
        yield StreamItem(SampleId(unit, number), error, after)


class StreamDataset(ListedDataset[Sample_co], PassDataset[Sample_co]):
    """Base class of datasets that read shards as streams.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.
        seed, uneven, on_error: The arguments. They can be assigned, with effect from the next `iter`; persistent
            workers keep the values that they were started with.
    """

    #: What is divided among ranks and workers, in messages.
    _unit_name = "shards"

    def _set_up(
        self,
        listing: DatasetListing,
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
        self._set_listing(listing, transform)
        self._shuffle, self._shuffle_buffer = shuffle, shuffle_buffer
        self.seed, self.uneven = seed, uneven
        self._reader = RefReader(listing.config)
        self._set_up_passes(on_error, ranks)
        self._check()

    def _options(self) -> list[str]:
        order = f"shuffle_buffer={self._shuffle_buffer}, seed={self.seed}, uneven={self.uneven!r}"
        return [order, f"epoch {self._epoch.next()}"]

    @override
    def prepare(self) -> None:
        self._reader.source()
        self._units()
        if self.uneven is not None:
            self._counts()

    def _units(self) -> int:
        """Number of units. The first call reads what determines it."""
        return len(self.manifest)

    def _unit_url(self, unit: int) -> str:
        """URL of the shard that contains a unit."""
        return self.manifest.url(unit)

    def _counts(self) -> Order:
        """Number of samples of each unit."""
        raise NotImplementedError

    def _items(self, segments: list[Segment], start: StreamPosition) -> Iterator[StreamItem]:
        """The samples of segments, in order, from a position on. Failures are items."""
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

    def _checked_position(
        self, progress: PassProgress, segments: list[Segment]
    ) -> tuple[StreamPosition, list[SampleId], int]:
        """The position of a loaded state, the samples in its shuffle buffer, and the number of draws.

        Raises:
            ConfigError: It is not a position in these segments.
        """
        saved = {} if progress.position is None else progress.position()
        stream, held, draws = saved.get("stream", []), saved.get("held", []), saved.get("draws", 0)
        numbers = isinstance(stream, list) and isinstance(held, list) and _are_counts([*stream, *held, draws], None)
        ok = numbers and len(held) % 4 == 0 and len(held) <= 4 * self._shuffle_buffer
        ok = ok and (len(stream) == 3 or (not stream and not progress.done))
        start = StreamPosition(*stream) if ok else StreamPosition()
        ids = [SampleId(*held[at : at + 4]) for at in range(0, len(held), 4)] if ok else []
        ok = ok and _are_counts([start.segment, start.offset, draws, *held], 1 << 63)
        ok = ok and start.segment <= len(segments) and all(self._is_sample(each) for each in ids)
        if ok and start.segment < len(segments) and start.sample is not None:
            ok = self._is_sample(SampleId(segments[start.segment].unit, start.sample, start.offset, start.offset))
        check("position of the state", saved, "that of a state of these shards", ok=ok)
        return start, ids, draws

    def _is_sample(self, each: SampleId) -> bool:
        """Whether a sample may exist."""
        if each.unit >= self._units():
            return False
        size = self._unit_bytes(each.unit)
        return size is None or each.begin <= each.end <= size

    def _finished(self, sample: Any) -> Any:
        """Decodes and transforms a sample."""
        return self._transform(sample)

    def _segments(self, shard: Shard, epoch: int) -> list[Segment]:
        units = self._units()
        order = shuffled(units, self.seed, epoch) if self._shuffle else in_order(units)
        if self.uneven is None:
            self._warn_of_uneven_shards(shard, units)
            return [Segment(int(unit)) for unit in shard.select(order, None)]
        counts = self._counts()
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
        progress = self._start_progress(self._shape(shard), epoch)
        start, ids, draws = self._checked_position(progress, segments)
        items = self._items(segments, start)
        stream, buffer = _Stream(map(self._kept_item, items) if self._shuffle_buffer else items, start), None
        if self._shuffle_buffer:
            held = list(map(self._kept_item, self._items_again(ids))) if ids else []
            seed = (self.seed, epoch, shard.rank, shard.worker)
            buffer = ShuffleBuffer(stream, self._shuffle_buffer, seed, draws, held)
        progress.position = functools.partial(_position, stream, buffer)
        return PassIterator(stream if buffer is None else buffer, progress, self._sample)

    def _sample(self, item: StreamItem) -> Any:
        value = item.value
        if not isinstance(value, Exception):
            try:
                return self._finished(value)
            except Exception as error:  # noqa: BLE001  raised, unless on_error handles it
                failure = Failure.noted(error, "in the transform", self._unit_url(item.id.unit), item.id.sample)
        else:
            failure = Failure(self._unit_url(item.id.unit), value.with_traceback(None))
        return self._failures.sample(item.id.sample, failure)


class _Stream(Iterator[StreamItem]):
    """The items of a pass. Records the position after the last one.

    Args:
        items: The items.
        start: The position before them.
    """

    def __init__(self, items: Iterator[StreamItem], start: StreamPosition) -> None:
        self._items, self.after = items, start

    def __next__(self) -> StreamItem:
        item = next(self._items)
        self.after = item.after
        return item


def _position(stream: _Stream, buffer: ShuffleBuffer[StreamItem] | None) -> dict[str, Any]:
    """The position of a pass, for its state."""
    position: dict[str, Any] = {"stream": list(stream.after)}
    if buffer is None:
        return position
    return position | {"draws": buffer.draws, "held": [number for item in buffer.held for number in item.id]}


def _are_counts(numbers: list[Any], limit: int | None) -> bool:
    """Whether these are ints of 0 or more, below the limit; without one, None is allowed."""
    return all(
        (number is None and limit is None)
        or (type(number) is int and number >= 0 and (limit is None or number < limit))
        for number in numbers
    )
