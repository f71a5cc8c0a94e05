"""What a loader and the prefetcher behind it did, in numbers. Says nothing about what they mean."""

import time
from dataclasses import dataclass
from typing import Any

from torchobj import _torchobj

__all__ = ["LoaderStats", "Meter"]


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """A loader since its first batch was asked for. Pauses between its epochs do not count.

    What is said of objects and requests is said of all that this process read ahead meanwhile: it has one prefetcher,
    for all its loaders. Times are in seconds, shares from 0 to 1; a time that was never measured is None.

    Attributes:
        batches: Batches that were handed out.
        samples: Samples in them.
        elapsed_s: Time within epochs.
        startup_s: Of that, time for starting workers, from `iter` to the first batch, and for ending them.
        waited_s: Of the rest, time in which the loop waited for its next batch.
        samples_per_s: Samples by time.
        bytes_per_s: Bytes that were read from the store, by time.
        waited_share: What the loop waited, of all time.
        workers: Worker processes of the loader.
        reading_share: What a worker waited for objects, of all time; without workers what the loop did.
        failed_samples: Samples of the dataset that could not be read or made, and were replaced or skipped.
        hits: Objects that were in memory when they were asked for.
        late: Objects that were on their way.
        queued: Objects that were announced, and not begun.
        misses: Objects that nobody had announced.
        failed: Reads that failed for good.
        evicted: Objects that were given up for want of memory, to be read again.
        first_byte_p50_s: From a request to the head of its answer: half took at most so long.
        first_byte_p99_s: All but one in a hundred.
        body_p50_s: From the head to the last byte.
        body_p99_s: As said.
        retries: Requests that were made again.
        throttled: Answers by which the store asked for fewer requests.
        hedges: Second requests beside one that was slow to answer.
        hedges_won: Those that answered first.
        in_flight: Requests for announced objects, now.
        in_flight_limit: How many there may be, now.
        budget_bytes: What objects read ahead may take of memory.
        used_bytes: What they take, now.
        granted_bytes: Of that, what workers hold, or is on its way from them to the loop.
        ahead_bytes: Of that, what was read ahead, or is being read.
        overdrawn: How often the budget was exceeded for somebody who waited.
        connect_failures: Connections that could not be made.
        starved_share: How often a read that ended was not followed by another for want of memory.
        limited_share: How often, for want of leave to have more requests in flight.
    """

    batches: int
    samples: int
    elapsed_s: float
    startup_s: float
    waited_s: float
    samples_per_s: float
    bytes_per_s: float
    waited_share: float
    workers: int
    reading_share: float
    failed_samples: int
    hits: int
    late: int
    queued: int
    misses: int
    failed: int
    evicted: int
    first_byte_p50_s: float | None
    first_byte_p99_s: float | None
    body_p50_s: float | None
    body_p99_s: float | None
    retries: int
    throttled: int
    hedges: int
    hedges_won: int
    connect_failures: int
    in_flight: int
    in_flight_limit: int
    budget_bytes: int
    used_bytes: int
    granted_bytes: int
    ahead_bytes: int
    overdrawn: int
    starved_share: float
    limited_share: float


#: What only grows, and is counted from the loader's first batch on.
_COUNTS = (
    "hits", "late", "queued", "misses", "failed", "evicted", "retries", "throttled", "hedges", "hedges_won",
    "connect_failures", "overdrawn",
)  # fmt: skip

#: What is as it is now.
_STATES = (
    "first_byte_p50_s", "first_byte_p99_s", "body_p50_s", "body_p99_s", "in_flight", "in_flight_limit", "budget_bytes",
    "used_bytes", "granted_bytes", "ahead_bytes",
)  # fmt: skip


class Meter:
    """Counts what a loader hands out, and how long its loop waits."""

    def __init__(self) -> None:
        self._batches = self._samples = 0
        self._elapsed_s = self._startup_s = self._waited_s = 0.0
        self._before: dict[str, Any] | None = None

    def begin(self) -> None:
        """An epoch begins. What others did before the first is not the loader's."""
        if self._before is None:
            self._before = _torchobj.prefetch_stats()

    def ended(self, asked: float, last: float | None, samples: int, *, started: float | None = None) -> float:
        """The loop has its batch, of `samples`; 0 is the end of an epoch.

        Args:
            asked: When it was asked for.
            last: What this returned for the batch before, in this epoch: the time.
            samples: As said.
            started: When starting workers for this epoch, or ending them, began; for its first batch, or its end.
        """
        now = time.perf_counter()
        since = asked if last is None else last
        if started is None:
            self._waited_s += now - asked
            self._elapsed_s += now - since
        else:
            self._startup_s += now - started
            self._elapsed_s += now - min(since, started)
        self._batches += samples > 0
        self._samples += samples
        return now

    def stats(self, workers: int, failed_samples: int) -> LoaderStats:
        """All so far, of a loader with so many workers, and a dataset with so many samples that failed."""
        now = _torchobj.prefetch_stats()
        before = {} if self._before is None else self._before
        counts = {name: now.get(name, 0) - before.get(name, 0) for name in _COUNTS}
        ends = {name: now.get(name, 0) - before.get(name, 0) for name in ("objects", "starved", "limited", "waited_s")}
        states: dict[str, Any] = {name: now.get(name, None if name.endswith("_s") else 0) for name in _STATES}
        elapsed_s, objects = max(self._elapsed_s, 1e-9), max(ends["objects"], 1)
        return LoaderStats(
            batches=self._batches,
            samples=self._samples,
            elapsed_s=self._elapsed_s,
            startup_s=self._startup_s,
            waited_s=self._waited_s,
            samples_per_s=self._samples / elapsed_s,
            bytes_per_s=(now.get("bytes", 0) - before.get("bytes", 0)) / elapsed_s,
            waited_share=self._waited_s / elapsed_s,
            workers=workers,
            reading_share=min(1.0, ends["waited_s"] / elapsed_s / max(workers, 1)),
            failed_samples=failed_samples,
            **counts,
            **states,
            starved_share=min(1.0, ends["starved"] / objects),
            limited_share=min(1.0, ends["limited"] / objects),
        )
