"""Divides the objects, or the samples of shards, of a pass among ranks and their DataLoader workers. Does no I/O."""

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Uneven = Literal["drop", "pad"] | None
#: Numbers of objects.
Order: TypeAlias = np.ndarray[Any, Any]


class Shard(NamedTuple):
    """The part of the objects that one worker of one rank yields."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def positions(self, objects: int, uneven: Uneven) -> range:
        """This shard of a number of objects: every n-th belongs to a rank, and every n-th of those to a worker.

        With `uneven` all ranks get the same number: `drop` leaves out the rest, `pad` continues at the start.
        """
        if uneven == "drop":
            end = objects - objects % self.world_size
        elif uneven == "pad" and objects:
            end = objects + -objects % self.world_size
        else:
            end = objects
        return range(self.rank + self.world_size * self.worker, end, self.world_size * self.workers)

    def select(self, order: Order, uneven: Uneven) -> Order:
        """The objects at `positions` of an order."""
        positions = self.positions(len(order), uneven)
        return order[np.arange(positions.start, positions.stop, positions.step) % len(order)] if len(order) else order


def in_order(objects: int) -> Order:
    """All objects, in the order of the listing."""
    return np.arange(objects, dtype=np.uint32 if objects < 1 << 32 else np.int64)


def shuffled(objects: int, seed: int, epoch: int) -> Order:
    """All objects, in an order that depends on these arguments only, and is the same in every process."""
    return np.random.default_rng((seed, epoch)).permutation(in_order(objects))


class Segment(NamedTuple):
    """Samples `first..end` of a unit, which is a tar file or a row group. An `end` of None is that of the unit."""

    unit: int
    first: int = 0
    end: int | None = None


class Division(NamedTuple):
    """Number of samples of all units, and of those that each rank yields."""

    samples: int
    per_rank: int


def divided(counts: Order, world_size: int, uneven: str) -> Division:
    """The number of samples that each rank yields, if all are to yield the same number.

    Args:
        counts: Number of samples of each unit.
        world_size: Number of ranks.
        uneven: `drop` rounds down; `pad` and `resample` round up.
    """
    samples = int(counts.sum())
    return Division(samples, samples // world_size if uneven == "drop" else -(-samples // world_size))


def equal_segments(order: Order, counts: Order, shard: Shard, division: Division) -> list[Segment]:
    """The part of one worker when the samples of all units, in this order, are divided into equal segments.

    Each rank gets one segment, which its workers divide in turn; a unit may be cut. Positions beyond the end continue
    at the start of the order.
    """
    begin, end = worker_part(division.per_rank, shard)
    begin, end = begin + shard.rank * division.per_rank, end + shard.rank * division.per_rank
    ends = np.cumsum(counts[order])
    segments: list[Segment] = []
    while begin < end:
        position = begin % division.samples
        number = int(np.searchsorted(ends, position, side="right"))
        unit = int(order[number])
        first = position - (int(ends[number]) - int(counts[unit]))
        last = min(int(counts[unit]), first + end - begin)
        segments.append(Segment(unit, first, last))
        begin += last - first
    return segments


def resampled(counts: Order, shard: Shard, division: Division, seed: int, epoch: int) -> list[Segment]:
    """Units drawn with replacement until they have the number of samples of this worker; the last one is cut."""
    begin, end = worker_part(division.per_rank, shard)
    left, segments = end - begin, []
    random = np.random.default_rng((seed, epoch, shard.rank, shard.worker))
    while left:
        unit = int(random.integers(len(counts)))
        samples = min(left, int(counts[unit]))
        if samples:
            segments.append(Segment(unit, 0, samples))
        left -= samples
    return segments


def worker_part(samples: int, shard: Shard) -> tuple[int, int]:
    """The samples of a worker among those of its rank: parts that differ by at most one.

    Args:
        samples: Number of samples of the rank.
        shard: The worker.
    """
    return samples * shard.worker // shard.workers, samples * (shard.worker + 1) // shard.workers
