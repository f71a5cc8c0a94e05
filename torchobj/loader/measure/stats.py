"""Statistics of a loader. Does not interpret them."""

import contextlib
import dataclasses
import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch.distributed

from torchobj import _torchobj
from torchobj.loader import import_timer
from torchobj.loader.measure.exposed import SlowestRank, TimedCollate, Totals
from torchobj.loader.measure.timeline import Sample, Timeline
from torchobj.telemetry.epochs import EPOCHS
from torchobj.telemetry.names import CAUSES
from torchobj.workers import shared_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Statistics of a loader since its first batch was requested, without the pauses between epochs.

    The figures of objects and requests are those that were read for this loader. The loaders of a process share one
    prefetcher: the memory and `in_flight` are of all of them. Times are in seconds, shares from 0 to 1. A time that was
    never measured is None.

    Attributes:
        batches: Number of batches returned to the loop.
        samples: Number of samples in them.
        elapsed_s: Time within epochs.
        startup_s: Part of `elapsed_s` spent on imports, starting workers, until the first batch and until the last
            worker has started, and stopping them.
        imports_s: Part of `startup_s` in which this process imported decoders.
        transform_imports_s: Part of `startup_s` in which the loop waited for other imports, of transforms, and of
            workers.
        waited_s: Part of the remaining time in which the loop waited for its next batch.
        samples_per_s: Samples per second of `elapsed_s`.
        bytes_per_s: Bytes read from the store for this loader, per second of `elapsed_s`; 0 before the first batch.
        waited_share: `waited_s` as a share of `elapsed_s`.
        workers: Number of worker processes of the loader.
        exposed_share: Exposed data time, `waited_s` and `startup_s`, as a share of `elapsed_s`.
        waited_for_store_s: Part of `waited_s` for objects, because of the network or the store.
        waited_for_budget_s: Part of `waited_s` for objects that the memory budget did not allow to be read earlier.
        waited_for_decode_s: Part of `waited_s` for decoders and transforms, and for reads that do not use the
            prefetcher.
        waited_for_collate_s: Part of `waited_s` for the collate function.
        reading_share: Share of the time in which a worker, or without workers the loop, waited for objects.
        failed_samples: Samples of this loader that failed, and were replaced or skipped.
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
        in_flight_limit: Current maximum of `in_flight`; reads of objects that a worker waits for may exceed it.
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
    imports_s: float
    transform_imports_s: float = 0.0
    waited_s: float
    samples_per_s: float
    bytes_per_s: float
    waited_share: float
    workers: int
    exposed_share: float
    waited_for_store_s: float
    waited_for_budget_s: float
    waited_for_decode_s: float
    waited_for_collate_s: float
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

    def as_dict(self) -> dict[str, float]:
        """The statistics by the names of `docs/metrics.md`, such as `torchobj.loader.waited_seconds`.

        Returns:
            Plain numbers, without the times that were never measured. Names and units are stable.
        """
        values = dataclasses.asdict(self)
        return {metric_name(name): value for name, value in values.items() if value is not None}


def metric_name(field: str) -> str:
    """The name of a field in `LoaderStats.as_dict`."""
    return "torchobj.loader." + re.sub("_s$", "_seconds", re.sub("_per_s$", "_per_second", field))


#: The prefetcher, which counts for each loader.
_COUNTED = sys.platform == "linux"

_numbers = itertools.count(1)


class Meter:
    """Counts the batches of a loader, and measures how long its loop waits. A copy, or a pickle, starts at zero.

    Attributes:
        loader: The number under which the prefetcher counts for this loader.
        imports_s: Time in which the process of the loop imported decoders for it.
    """

    def __init__(self) -> None:
        self.loader = next(_numbers)
        self._batches = self._samples = 0
        self._elapsed_s = self._startup_s = self._waited_s = self.imports_s = self._transform_imports_s = 0.0
        self._counters: shared_values.LoaderCounters | None = None
        self._collated: shared_values.SharedSums | None = None
        # The imports of each worker when the pass began, and the sum of those until the first batch of each pass.
        self._imports_before: Any = 0
        self._importing_in_startup_ns = 0
        # When the last worker had started, in nanoseconds.
        self._workers_started: shared_values.SharedNumber | None = None
        # At the last call of `log`: its step, and the totals.
        self._logged: tuple[int | None, Totals] = None, Totals()
        # The totals at the last call of `measured`, and the number of workers of the last pass.
        self._measured, self._workers = Totals(), 0
        #: That of the last call of `log` with `ranks=True`.
        self.slowest: SlowestRank | None = None
        self.timeline = Timeline()

    def __reduce__(self) -> tuple[Any, ...]:
        return Meter, ()

    def __del__(self, remove: Callable[[int], None] | None = _torchobj.remove_loader if _COUNTED else None) -> None:
        # Bound, because modules are cleared before the last objects at the end of the interpreter.
        if remove is not None:
            remove(self.loader)

    def _counted(self) -> shared_values.LoaderCounters:
        if self._counters is None:
            self._counters = shared_values.LoaderCounters(shared_values.SharedCounter(), shared_values.SharedSums(1))
        return self._counters

    def timed(self, collate_fn: Callable[[Any], Any], *, in_worker: bool) -> TimedCollate:
        """A collate function that is measured for this loader, in workers or in this process."""
        if self._collated is None:
            self._collated = shared_values.SharedSums(3)
        return TimedCollate(collate_fn, self._collated, in_worker=in_worker)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within the block, what this thread reads is counted as this loader's, and its imports are measured."""
        with shared_values.also_counting(self._counted()), import_timer.measured():
            before = _torchobj.enter_loader(self.loader) if _COUNTED else 0
            try:
                yield
            finally:
                if _COUNTED:
                    _torchobj.enter_loader(before)

    def counted_in_worker(self) -> Callable[[], None]:
        """The first call in a worker: what it reads is counted as this loader's."""
        return functools.partial(_count_for, self.loader, self._counted())

    def started_in_worker(self) -> Callable[[], None]:
        """The call of a worker that has started: the loop waited for its start until then."""
        if self._workers_started is None:
            self._workers_started = shared_values.SharedNumber()
        return functools.partial(_set_time, self._workers_started)

    def begin(self, workers: int) -> None:
        """Begins a pass with this number of workers. From now on, the metrics of the process include this loader."""
        self._workers, self._imports_before = workers, self._imports_of_workers()
        EPOCHS.add(self)

    def _imports_of_workers(self) -> Any:
        """Nanoseconds of imports by worker."""
        return 0 if self._collated is None else self._collated.by_worker()[:, 2]

    def _note_imports_of_startup(self, startup_s: float) -> None:
        """Records the imports of workers until the first batch, which are part of `startup_s`."""
        new = np.asarray(self._imports_of_workers() - self._imports_before)
        self._transform_imports_s += min(startup_s, float(new.max()) / 1e9)
        self._importing_in_startup_ns += int(new.sum())

    def record(
        self,
        requested_at: float,
        returned_at: float | None,
        samples: int,
        *,
        started: float | None = None,
        importing: import_timer.Imported = import_timer.NOTHING,
    ) -> float:
        """Records that the loop has received a batch, or that the epoch has ended.

        Args:
            requested_at: Time of the request for the batch, by `time.perf_counter`.
            returned_at: The return value for the previous batch of this epoch; None for the first.
            samples: Number of samples; 0 for the end of the epoch.
            started: Time at which workers began to be started or stopped, for the first batch or the end.
            importing: Time since the request in which the loop imported.

        Returns:
            The current time.
        """
        now = time.perf_counter()
        since = requested_at if returned_at is None else returned_at
        self.imports_s += importing.decoders
        self._transform_imports_s += importing.transforms
        if started is None:
            workers_started_s = 0.0 if self._workers_started is None else self._workers_started.get() / 1e9
            startup_s = sum(importing) + max(0.0, min(now, workers_started_s) - requested_at)
            self._startup_s += startup_s
            self._waited_s += now - requested_at - startup_s
            self._elapsed_s += now - since
        else:
            if samples:
                self._note_imports_of_startup(now - started)
            self._startup_s += now - started
            self._elapsed_s += now - min(since, started)
        self._batches += samples > 0
        self._samples += samples
        if not samples:
            # The loader may be deleted before the metrics of the process are read next.
            EPOCHS.add(self)
        is_first = samples > 0 and self._batches == 1
        if is_first or self._elapsed_s >= self.timeline.due_s:
            put = self.timeline.begin if is_first else self.timeline.add
            put(Sample(self._elapsed_s, self._waited_s, self._startup_s, self._samples, self._prefetch_stats()))
        return now

    def _prefetch_stats(self) -> dict[str, Any]:
        return _torchobj.prefetch_stats(self.loader) if _COUNTED else {}

    def stats(self, workers: int) -> LoaderStats:
        """The statistics so far."""
        found = self._prefetch_stats()
        elapsed_s, totals = self._elapsed_s, self._totals(found)
        exposed = totals.exposed(workers)
        # The loop waited for imports of workers.
        importing_s = exposed.startup - self._startup_s

        def per_s(count: float) -> float:
            return count / elapsed_s if elapsed_s else 0.0

        # Those that are not computed here are figures of the prefetcher.
        of_prefetcher: dict[str, Any] = {
            field.name: found.get(field.name, None if field.name.endswith("_s") else 0)
            for field in dataclasses.fields(LoaderStats)
        }
        computed = {
            "batches": self._batches,
            "samples": self._samples,
            "elapsed_s": elapsed_s,
            "startup_s": exposed.startup,
            "imports_s": self.imports_s,
            "transform_imports_s": self._transform_imports_s + importing_s,
            "waited_s": self._waited_s - importing_s,
            "samples_per_s": per_s(self._samples),
            "bytes_per_s": per_s(totals.bytes),
            "waited_share": per_s(self._waited_s - importing_s),
            "workers": workers,
            "exposed_share": per_s(sum(exposed)),
            "waited_for_store_s": exposed.store,
            "waited_for_budget_s": exposed.budget,
            "waited_for_decode_s": exposed.decode,
            "waited_for_collate_s": exposed.collate,
            "reading_share": min(1.0, per_s(totals.reading_s) / max(workers, 1)),
            "failed_samples": 0 if self._counters is None else self._counters.failed.total(),
            "memory_limited_share": totals.memory_limited_share,
            "request_limited_share": totals.request_limited_share,
        }
        return LoaderStats(**of_prefetcher | computed)

    def _totals(self, found: dict[str, Any]) -> Totals:
        """What was counted so far, with the statistics `found` of the prefetcher."""
        collating_ns, decoding_ns, importing_ns = (0, 0, 0) if self._collated is None else self._collated.totals()
        return Totals(
            batches=self._batches,
            samples=self._samples,
            elapsed_s=self._elapsed_s,
            startup_s=self._startup_s,
            waited_s=self._waited_s,
            reading_s=found.get("waited_s", 0),
            decoding_s=decoding_ns / 1e9,
            collating_s=collating_ns / 1e9,
            importing_s=(importing_ns - self._importing_in_startup_ns) / 1e9,
            objects=found.get("objects", 0),
            bytes=found.get("bytes", 0),
            memory_limited=found.get("memory_limited", 0),
            request_limited=found.get("request_limited", 0),
            over_budget=found.get("over_budget", 0),
            unannounced=0 if self._counters is None else sum(self._counters.limited.totals()),
        )

    def measured(self) -> dict[str, float]:
        """What was measured since the previous call, for the metrics of the process."""
        totals = self._totals(self._prefetch_stats())
        new, self._measured = totals.since(self._measured), totals
        sums = {"elapsed_s": new.elapsed_s, "batches": new.batches, "samples": new.samples}
        return new.exposed(self._workers)._asdict() | sums

    def log(self, step: int, workers: int, *, ranks: bool) -> dict[str, float]:
        """The figures since the previous call, as `DataLoader.log` returns them."""
        totals = self._totals(self._prefetch_stats())
        logged_step, logged = self._logged
        self._logged = step, totals
        new = totals.since(logged)
        steps = new.batches if logged_step is None else step - logged_step
        exposed = new.exposed(workers)
        per_elapsed = 1 / new.elapsed_s if new.elapsed_s > 0 else 0.0
        shares = [seconds * per_elapsed for seconds in exposed]
        values = {
            "torchobj.exposed.seconds": sum(exposed) / max(steps, 1),
            **_shares("torchobj.exposed", shares),
            "torchobj.loader.samples_per_second": new.samples * per_elapsed,
            "torchobj.loader.bytes_per_second": new.bytes * per_elapsed,
        }
        if ranks:
            of_all = _gather(shares)
            rank = max(range(len(of_all)), key=lambda number: sum(of_all[number]))
            shares = of_all[rank]
            self.slowest = SlowestRank(rank, len(of_all), sum(shares), CAUSES[shares.index(max(shares))])
            values |= {"torchobj.exposed.slowest.rank": rank, **_shares("torchobj.exposed.slowest", shares)}
        return values


def _gather(shares: list[float]) -> list[list[float]]:
    """The shares of each rank. With several ranks, a collective of all of them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [shares]
    of_all: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, shares)
    return of_all


def _shares(prefix: str, shares: list[float]) -> dict[str, float]:
    """The exposed share of a rank, and that of each cause."""
    by_cause = {f"{prefix}.{cause}_share": share for cause, share in zip(CAUSES, shares, strict=True)}
    return {f"{prefix}.share": sum(shares), **by_cause}


def _set_time(number: shared_values.SharedNumber) -> None:
    number.set(time.perf_counter_ns())


def _count_for(loader: int, counters: shared_values.LoaderCounters) -> None:
    shared_values.count_also(counters)
    import_timer.begin_worker()
    if _COUNTED:
        _torchobj.work_for_loader(loader)
