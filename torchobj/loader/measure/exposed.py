"""Exposed data time: the time for which the loop waited for data, by cause. Measures the collation of each batch."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torchobj.loader.import_timer import imported
from torchobj.telemetry.ranges import profiled
from torchobj.workers.shared_values import SharedSums


class Exposed(NamedTuple):
    """Seconds for which the loop waited, by cause, in the order of `CAUSES`."""

    store: float
    """For objects, because of the network or the store."""
    budget: float
    """For objects, because the memory budget did not allow to read further ahead."""
    decode: float
    """For decoders and transforms, and for reads that do not use the prefetcher."""
    collate: float
    """For the collate function."""
    startup: float
    """For imports, and the start and the end of workers."""


class SlowestRank(NamedTuple):
    """The rank that waited for the largest share of its time."""

    rank: int
    ranks: int
    """Number of ranks."""
    share: float
    """Exposed data time as a share of the time within epochs."""
    cause: str
    """The largest of its `CAUSES`."""


class Totals(NamedTuple):
    """What was counted and measured for a loader up to a moment, or between two moments. Times are in seconds."""

    batches: float = 0
    samples: float = 0
    elapsed_s: float = 0
    startup_s: float = 0
    waited_s: float = 0
    reading_s: float = 0
    """Time that workers, or the loop without workers, waited for objects: the sum over all of them."""
    decoding_s: float = 0
    """Time on the CPU that workers spent between collations: the sum over all of them."""
    collating_s: float = 0
    """Time that workers, or the loop, collated: the sum over all of them."""
    importing_s: float = 0
    """Time that workers imported while they built samples: the sum over all of them."""
    objects: float = 0
    bytes: float = 0
    memory_limited: float = 0
    request_limited: float = 0
    over_budget: float = 0
    unannounced: float = 0
    """Objects of iterable datasets after which no more was announced, because of the memory budget."""

    def since(self, before: "Totals") -> "Totals":
        """The difference to an earlier moment."""
        return Totals(*(now - then for now, then in zip(self, before, strict=True)))

    def exposed(self, workers: int) -> Exposed:
        """The waiting time by cause, in proportion to the time that the workers spent on each stage.

        Args:
            workers: Number of workers.
        """
        builders = max(workers, 1)
        reading_s = min(self.reading_s, builders * self.elapsed_s)
        # Workers are busy while the loop waits: what is neither reading, nor collation, nor an import is decoding, also
        # if it does not use the CPU.
        rest_s = builders * self.waited_s - reading_s - self.collating_s - self.importing_s
        decoding_s = max(self.decoding_s, rest_s, 0.0)
        busy_s = reading_s + decoding_s + self.collating_s + self.importing_s
        per_busy_s = self.waited_s / busy_s if busy_s else 0.0
        reading = per_busy_s * reading_s
        # Nothing is read ahead of a batch that exceeds the budget by itself, so that no read is limited by memory.
        by_memory = self.memory_limited_share + self.over_budget / max(self.objects, 1)
        is_by_budget = by_memory >= max(self.request_limited_share, 0.1)
        return Exposed(
            store=0.0 if is_by_budget else reading,
            budget=reading if is_by_budget else 0.0,
            decode=per_busy_s * decoding_s,
            collate=per_busy_s * self.collating_s,
            startup=self.startup_s + per_busy_s * self.importing_s,
        )

    @property
    def memory_limited_share(self) -> float:
        """Share of reads after which no further read started for lack of memory."""
        # Of an iterable dataset that announces no more, reads may still wait for their turn.
        unannounced = min(self.unannounced / max(self.objects, 1), 1.0 - self.request_limited_share)
        return min(1.0, self.memory_limited / max(self.objects, 1) + unannounced)

    @property
    def request_limited_share(self) -> float:
        """Share of reads after which no further read started because the limit on requests was reached."""
        return min(1.0, self.request_limited / max(self.objects, 1))


class TimedCollate:
    """A collate function that measures itself, once per batch.

    Args:
        collate_fn: The collate function.
        sums: Receives the nanoseconds of collation and, in a worker, those on the CPU between two collations and those
            of imports since the previous one.
        in_worker: Whether workers call it: elsewhere, the time in between includes the training step, and the loop
            measures imports.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], sums: SharedSums, *, in_worker: bool) -> None:
        self._collate_fn, self._sums, self._in_worker = collate_fn, sums, in_worker
        self._cpu_ns: int | None = None
        # The time of imports until the last collation. It begins with the worker.
        self._imported_s = 0.0

    def __call__(self, samples: Any) -> Any:
        """The batch of these samples."""
        imported_s, cpu_ns, began_ns = sum(imported()), time.thread_time_ns(), time.perf_counter_ns()
        try:
            with profiled("torchobj.collate"):
                return self._collate_fn(samples)
        finally:
            collating_ns, within_s = time.perf_counter_ns() - began_ns, sum(imported()) - imported_s
            before_s = imported_s - self._imported_s if self._in_worker else 0.0
            between_ns = 0 if self._cpu_ns is None else max(0, cpu_ns - self._cpu_ns - int(before_s * 1e9))
            importing_s = before_s + within_s if self._in_worker else 0.0
            self._sums.add(max(0, collating_ns - int(within_s * 1e9)), between_ns, int(importing_s * 1e9))
            if self._in_worker:
                self._cpu_ns, self._imported_s = time.thread_time_ns(), imported_s + within_s
