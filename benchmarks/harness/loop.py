"""Takes one measurement of a training loop: waits, CPU time and memory of the trainer and its workers. `rivals.feeds`
has the loaders.
"""

import gc
import statistics
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.measure import Timed
from benchmarks.harness.report import Cell, Rounds
from benchmarks.harness.rivals.feeds import ZEROS, Feed, Plan, epochs
from benchmarks.lab.objects import check
from benchmarks.lab.photos import sample

LIMIT_S = 120.0
"""Maximum duration of a measurement."""
FIGURES = {"samples/s": ("rate", 0), "CPU µs a sample": ("cpu_us", 0)}
_LOOK_S = 0.05
# linux/posix-timers.h: the clock of all threads of another process, in ns of scheduler time.
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True)
class Job:
    """A loop over the batches of a plan.

    With `min_s` the first epoch is warm-up, and whole epochs follow for at least that time, one or more. Without it,
    there is one epoch, whose first batch of each worker is warm-up: for feeds that would need a minute for more.
    """

    plan: Plan
    min_s: float = 0.0
    step_s: float = 0.0
    """The trainer's sleep per batch."""
    memory: bool = False
    """Samples the memory during the run, which costs time."""
    in_memory: bool = False
    """On data in memory, with torch's loader."""


@dataclass(frozen=True, kw_only=True)
class Run(Timed):
    """One measurement, without the warm-up, of samples. CPU time is that of the trainer and its workers."""

    first_batch_s: float
    """From before the dataset is created: includes starting workers and opening connections."""
    wait_s: list[float]
    """Wait before each batch."""
    gap_s: list[float]
    """Wait before the first batch of each epoch, from the end of the last step of the previous epoch."""
    batch: int
    peak_bytes: int | None
    """PSS of the trainer and its workers."""
    worker_faults: int
    """Page faults of the workers."""
    first_epoch_rate: float
    """Objects per second of the first epoch, after its first batch; 0 if that epoch is the only one."""

    @property
    def first_epoch(self) -> float | None:
        """Rate of the first epoch, as a share of that of the later ones."""
        return self.first_epoch_rate / self.rate if self.first_epoch_rate else None

    @property
    def faults(self) -> float:
        """Page faults of the workers per sample."""
        return self.worker_faults / self.items

    @property
    def gap_batches(self) -> float | None:
        """Median gap between epochs, as a multiple of the time between batches."""
        return None if self.gap_ms is None else self.gap_ms / 1000 / (self.batch / self.rate)

    @property
    def gap_ms(self) -> float | None:
        return statistics.median(self.gap_s) * 1000 if self.gap_s else None

    @property
    def waiting_percent(self) -> float:
        return 100 * sum(self.wait_s) / self.wall_s

    @property
    def wait_p50_ms(self) -> float:
        return self._wait_ms(0.5)

    @property
    def wait_p99_ms(self) -> float:
        return self._wait_ms(0.99)

    def _wait_ms(self, share: float) -> float:
        """Returns a percentile of the waits."""
        return sorted(self.wait_s)[min(len(self.wait_s) - 1, int(len(self.wait_s) * share))] * 1000


@dataclass
class Loop(Rounds):
    """All rounds of one case."""

    kind: str = "rate"
    step_s: dict[str, float] = field(default_factory=dict)
    """The trainer's sleep per batch, by client."""
    grown_mib: dict[str, float] = field(default_factory=dict)

    def columns(self) -> dict[str, Cell]:
        """Returns the columns besides `FIGURES`."""
        columns: dict[str, Cell] = {
            "n": lambda name: str(self.runs[name][0].items),
            "wait p50 ms": self.medians("wait_p50_ms", 1),
            "p99 ms": self.medians("wait_p99_ms", 1),
            "first batch s": self.medians("first_batch_s", 2),
            "epoch gap ms": self.medians("gap_ms", 1),
            "in batch times": self.spreads("gap_batches", 1),
            "1st epoch": self.spreads("first_epoch", 2, "x"),
        }
        if self.kind == "tensor":
            columns["worker faults"] = self.spreads("faults", 1)
        if self.kind == "half-speed trainer":
            columns["trainer ms a batch"] = lambda name: f"{self.step_s[name] * 1000:.1f}"
            columns["waiting"] = self.spreads("waiting_percent", 1, " %")
        if self.kind == "memory":
            columns["PSS +MiB"] = lambda name: f"{self.grown_mib[name]:+.0f}"
        return columns


def _tree() -> list[int]:
    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]


def tree_cpu_s() -> float:
    """CPU time of this process and its living descendants."""
    return sum(time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED) for pid in _tree())


def _worker_faults() -> int:
    """Minor page faults of the living descendants of this process. proc_pid_stat(5): field 10."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in _tree()[1:]]
    return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)


def _peak_pss_bytes(end: threading.Event) -> int:
    """Samples the memory of the process tree repeatedly, which costs time; returns the maximum."""
    peak_bytes = 0
    while not end.wait(_LOOK_S):
        rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in _tree()]
        peak_bytes = max(peak_bytes, sum(int(text.partition("\nPss:")[2].split()[0]) << 10 for text in rollups))
    return peak_bytes


class _BatchChecker:
    """Verifies batches: the number of bytes, the objects, and one object of each batch byte for byte."""

    def __init__(self, feed: Feed, job: Job) -> None:
        self._feed, self._size, self._contents = feed, job.plan.family.size, not job.in_memory
        self._decoder = job.plan.decoder if job.plan.samples == "photos" else None
        self._names: list[str] = []
        self._batches = 0

    def take(self, batch: Any) -> int:
        """Returns the number of objects in the batch."""
        names, got, sample = self._feed.unpacked(batch)
        if got != len(names) * self._size:
            raise AssertionError(f"{got} bytes in a batch of {len(names)} objects of {self._size}")
        position = self._batches % len(names)
        content = sample(position).numpy()
        if self._contents:
            self._check(names[position], content)
        self._names += names
        self._batches += 1
        return len(names)

    def _check(self, name: str, content: Any) -> None:
        if self._decoder is None:
            check(name, self._size, content)
        elif not np.allclose(content, sample(self._decoder, int(name.rsplit("/", 1)[1])).numpy(), atol=1e-5):
            raise AssertionError(f"{name}: a wrong sample")

    def end(self, epochs: int, expected: int) -> None:
        """Raises AssertionError unless each epoch had each object once."""
        for start in range(0, epochs * expected, expected):
            found = self._names[start : start + expected]
            if len(set(found)) != expected:
                raise AssertionError(f"{len(set(found))} different samples of {expected}")


def measure(job: Job, feed: Feed) -> Run:
    """Runs `job` in this process."""
    job.plan.location.enter()
    # More workers than cores are intended.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    feed = ZEROS if job.in_memory else feed
    checked = _BatchChecker(feed, job)
    end = threading.Event()
    peak = ThreadPoolExecutor(1).submit(_peak_pss_bytes, end) if job.memory else None
    first_batch_at_s = first_epoch_rate = 0.0
    wait_s: list[float] = []
    gap_s: list[float] = []
    objects, started_s, started_cpu_s, started_faults = 0, 0.0, 0.0, 0
    began_s = asked_s = time.perf_counter()
    loader = feed.loader(job.plan)
    for epoch in epochs(loader):
        if epoch == 1:
            first_epoch_rate = (len(job.plan.names()) - job.plan.batch) / (asked_s - first_batch_at_s)
            started_cpu_s, started_faults = tree_cpu_s(), _worker_faults()
            started_s = asked_s = time.perf_counter()
        for number, batch in enumerate(loader):
            waited_s = time.perf_counter() - asked_s
            first_batch_at_s = first_batch_at_s or time.perf_counter()
            found = checked.take(batch)
            if started_s:
                objects += found
                wait_s.append(waited_s)
                if number == 0:
                    gap_s.append(waited_s)
            if job.step_s:
                time.sleep(job.step_s)
            asked_s = time.perf_counter()
            if not job.min_s and number + 1 == max(1, job.plan.workers):
                started_s, started_cpu_s, started_faults = asked_s, tree_cpu_s(), _worker_faults()
        if not job.min_s or (epoch and asked_s - started_s >= job.min_s):
            break
    cpu_s, faults = tree_cpu_s() - started_cpu_s, _worker_faults() - started_faults
    end.set()
    checked.end(epoch + 1, len(job.plan.names()))
    peak_bytes = None if peak is None else peak.result()
    wall_s = asked_s - started_s
    # The process ends without finalizers; run those of the workers' queues now.
    gc.collect()
    return Run(
        *(wall_s, cpu_s, None, objects),
        first_batch_s=first_batch_at_s - began_s,
        wait_s=wait_s,
        gap_s=gap_s,
        batch=job.plan.batch,
        peak_bytes=peak_bytes,
        worker_faults=faults,
        first_epoch_rate=first_epoch_rate,
    )
