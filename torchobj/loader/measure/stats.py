"""Measures a loader, and computes its statistics. Does not interpret them."""

import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch.distributed

from torchobj import _torchobj
from torchobj.loader import import_timer
from torchobj.loader.measure.exposed import SlowestRank, TimedCollate, Totals
from torchobj.loader.measure.pass_requests import PassRequests
from torchobj.loader.measure.timeline import Sample, Timeline
from torchobj.telemetry.epochs import EPOCHS
from torchobj.telemetry.table import CAUSES, OF_LOADER, LoaderStats, of_source
from torchobj.workers import shared_values

#: The prefetcher, which counts for each loader.
_COUNTED = sys.platform == "linux"

_numbers = itertools.count(1)


class Meter:
    """Counts the batches of a loader, and measures how long its loop waits. A copy, or a pickle, starts at zero.

    Attributes:
        loader: The number under which the prefetcher counts for this loader.
        imports_s: Time in which the process of the loop imported decoders for it.
        requests: The billed requests of its passes, and the hits of the disk cache.
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
        #: The slowest rank at the last call of `log` with `ranks=True`.
        self.slowest: SlowestRank | None = None
        self.timeline = Timeline()
        self.requests = PassRequests()

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
        self.requests.record(ended=not samples)
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

        of_prefetcher = {metric.key: found[metric.key] for metric in OF_LOADER if metric.key in found}
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
        billed = self.requests.total()
        requests = {"billed_gets": billed.billed_gets, "received_bytes": billed.received_bytes}
        return LoaderStats(**of_prefetcher | computed | requests)

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
        return new.exposed(self._workers)._asdict() | {
            metric.key: getattr(new, metric.key) for metric in of_source("epochs")
        }

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
