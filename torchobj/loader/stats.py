"""Statistics of a loader and of the prefetcher of its process. Does not interpret them."""

import time
from dataclasses import dataclass
from typing import Any

from torchobj import _torchobj

__all__ = ["LoaderStats", "Meter"]


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Statistics of a loader since its first batch was requested, without the pauses between epochs.

    The figures of objects and requests cover everything that this process read ahead in that time: all its loaders
    share one prefetcher. Times are in seconds, shares from 0 to 1. A time that was never measured is None.

    Attributes:
        batches: Number of batches returned to the loop.
        samples: Number of samples in them.
        elapsed_s: Time within epochs.
        startup_s: Part of `elapsed_s` spent starting workers, from `iter` to the first batch, and stopping them.
        waited_s: Part of the remaining time in which the loop waited for its next batch.
        samples_per_s: Samples per second of `elapsed_s`.
        bytes_per_s: Bytes read from the store, per second of `elapsed_s`.
        waited_share: `waited_s` as a share of `elapsed_s`.
        workers: Number of worker processes of the loader.
        reading_share: Share of the time in which a worker, or without workers the loop, waited for objects.
        failed_samples: Samples of the dataset that failed, and were replaced or skipped.
        hits: Objects that were in memory when they were requested.
        late: Objects that were being read when they were requested.
        queued: Objects that were announced, and whose read had not started.
        misses: Objects that were not announced.
        failed: Reads that failed after all retries.
        evicted: Objects that were dropped to free memory, and have to be read again.
        first_byte_p50_s: Median time from a request to the head of its response.
        first_byte_p99_s: 99th percentile of that time.
        body_p50_s: Median time from the head of a response to its last byte.
        body_p99_s: 99th percentile of that time.
        retries: Requests that were retried.
        throttled: Responses with which the store throttled (503, 429).
        hedges: Second requests that were sent because the first response was late.
        hedges_won: Second requests that were answered first.
        in_flight: Current number of requests for announced objects.
        in_flight_limit: Current maximum of `in_flight`.
        budget_bytes: Memory budget of objects that are read ahead.
        used_bytes: Memory in use now.
        granted_bytes: Part of `used_bytes` that workers hold, or that is being transferred to the loop.
        ahead_bytes: Part of `used_bytes` that was read ahead or is being read.
        over_budget: Number of times the budget was exceeded for an object that was demanded.
        block_bytes: Memory of batches that workers build or have built, in addition to `used_bytes`; reused. Batches
            that were held during a fork do not count: their memory is freed when the child exits.
        blocks_refused: Number of times a batch did not fit that memory, which is limited to `budget_bytes` and to 256
            blocks, or a quarter of the limit on open files.
        connect_failures: Connections that failed.
        memory_limited_share: Share of reads after which no further read started for lack of memory.
        request_limited_share: Share of reads after which no further read started because `in_flight_limit` was reached.
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
    over_budget: int
    block_bytes: int
    blocks_refused: int
    memory_limited_share: float
    request_limited_share: float


#: Counters, reported as the difference since the loader's first batch.
_COUNTERS = (
    "hits", "late", "queued", "misses", "failed", "evicted", "retries", "throttled", "hedges", "hedges_won",
    "connect_failures", "over_budget", "blocks_refused",
)  # fmt: skip

#: Current values.
_GAUGES = (
    "first_byte_p50_s", "first_byte_p99_s", "body_p50_s", "body_p99_s", "in_flight", "in_flight_limit", "budget_bytes",
    "used_bytes", "granted_bytes", "ahead_bytes", "block_bytes",
)  # fmt: skip


class Meter:
    """Counts the batches of a loader, and measures how long its loop waits."""

    def __init__(self) -> None:
        self._batches = self._samples = 0
        self._elapsed_s = self._startup_s = self._waited_s = 0.0
        self._before: dict[str, Any] | None = None

    def begin(self) -> None:
        """Records the start of an epoch. Counters from before the first epoch are not attributed to the loader."""
        if self._before is None:
            self._before = _torchobj.prefetch_stats()

    def record(
        self, requested_at: float, returned_at: float | None, samples: int, *, started: float | None = None
    ) -> float:
        """Records that the loop has received a batch, or that the epoch has ended.

        Args:
            requested_at: Time of the request for the batch, by `time.perf_counter`.
            returned_at: The return value for the previous batch of this epoch; None for the first.
            samples: Number of samples; 0 for the end of the epoch.
            started: Time at which workers began to be started or stopped, for the first batch or the end.

        Returns:
            The current time.
        """
        now = time.perf_counter()
        since = requested_at if returned_at is None else returned_at
        if started is None:
            self._waited_s += now - requested_at
            self._elapsed_s += now - since
        else:
            self._startup_s += now - started
            self._elapsed_s += now - min(since, started)
        self._batches += samples > 0
        self._samples += samples
        return now

    def stats(self, workers: int, failed_samples: int) -> LoaderStats:
        """The statistics so far."""
        now = _torchobj.prefetch_stats()
        before = {} if self._before is None else self._before
        counts = {name: now.get(name, 0) - before.get(name, 0) for name in _COUNTERS}
        ends = {
            name: now.get(name, 0) - before.get(name, 0)
            for name in ("objects", "memory_limited", "request_limited", "waited_s")
        }
        states: dict[str, Any] = {name: now.get(name, None if name.endswith("_s") else 0) for name in _GAUGES}
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
            memory_limited_share=min(1.0, ends["memory_limited"] / objects),
            request_limited_share=min(1.0, ends["request_limited"] / objects),
        )
