"""Takes one measurement of a training loop: waits, CPU time and memory of the trainer and its workers. Leaves what
feeds it to `feeds`, and what to make of it to the benchmarks. `python -m benchmarks.loop FEED` is a feed's nursery.
"""

import dataclasses
import functools
import gc
import statistics
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.feeds import Feed, Memory, Plan, epochs, load
from benchmarks.lab.objects import Family, check
from benchmarks.lab.place import Place
from benchmarks.nursery import Nursery, serve

_LIMIT_S = 120.0
_LOOK_S = 0.05
# linux/posix-timers.h: the clock of all threads of another process, in ns of the scheduler.
_CPUCLOCK_SCHED = 2


@dataclass(frozen=True)
class Job:
    """A loop over what a plan feeds.

    With `least_s` the first epoch is warm-up, and epochs are made until that time is over, one at the least. Without
    it there is one epoch, whose first batch of each worker is warm-up: for who needs a minute for more.
    """

    plan: Plan
    least_s: float = 0.0
    step_s: float = 0.0
    """The trainer sleeps so long with each batch."""
    memory: bool = False
    """Looks at the memory all the while, which costs time."""
    in_memory: bool = False
    """On data in memory, by torch's loader."""


@dataclass(frozen=True)
class Run:
    """What it took, without the warm-up."""

    objects: int
    wall_s: float
    cpu_s: float
    """Of the trainer and its workers, in user and system mode together."""
    first_batch_s: float
    """From before the dataset is made: workers start, and connections are opened."""
    wait_s: list[float]
    """Before each batch."""
    gap_s: list[float]
    """Before the first batch of each epoch, from the end of the last step of the epoch before."""
    batch: int
    peak_bytes: int | None
    """PSS of the trainer and its workers."""

    def rate(self) -> float:
        """Objects a second."""
        return self.objects / self.wall_s

    def cpu_s_per_1000(self) -> float:
        return self.cpu_s / self.objects * 1000

    def waiting(self) -> float:
        """Share of the time."""
        return sum(self.wait_s) / self.wall_s

    def gap_batches(self) -> float:
        """The median gap between epochs, in times from batch to batch."""
        return statistics.median(self.gap_s) / (self.wall_s / self.objects * self.batch)

    def wait_ms(self, share: float) -> float:
        """A percentile of the waits."""
        return sorted(self.wait_s)[min(len(self.wait_s) - 1, int(len(self.wait_s) * share))] * 1000


def _tree() -> list[int]:
    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]


def tree_cpu_s() -> float:
    """CPU time of this process and those below it that live."""
    return sum(time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED) for pid in _tree())


def _tree_pss_bytes() -> int:
    total = 0
    for pid in _tree():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


class _Looker:
    """Looks at the memory of the process tree again and again."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(_LOOK_S):
            self.peak_bytes = max(self.peak_bytes, _tree_pss_bytes())

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class _Checked:
    """Looks at batches: how many bytes of which objects, and one object of each batch whole, byte for byte."""

    def __init__(self, feed: Feed, job: Job) -> None:
        self._feed, self._size, self._contents = feed, job.plan.family.size, not job.in_memory
        self._names: list[str] = []
        self._batches = 0

    def take(self, batch: Any) -> int:
        """How many objects are in the batch."""
        names = self._feed.names(batch)
        if (got := self._feed.bytes(batch)) != len(names) * self._size:
            raise AssertionError(f"{got} bytes in a batch of {len(names)} objects of {self._size}")
        position = self._batches % len(names)
        content = self._feed.content(batch, position).numpy()
        if self._contents:
            check(names[position], self._size, content)
        self._names += names
        self._batches += 1
        return len(names)

    def end(self, epochs: int, expected: int) -> None:
        """Raises AssertionError unless each epoch had each object once."""
        for start in range(0, epochs * expected, expected):
            found = self._names[start : start + expected]
            if len(set(found)) != expected:
                raise AssertionError(f"{len(set(found))} different samples of {expected}")


def measure(feed: Feed, job: Job) -> Run:
    """Trains as `job` says, in this process."""
    job.plan.place.enter()
    # More workers than cores are what is measured.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    feed = Memory() if job.in_memory else feed
    checked = _Checked(feed, job)
    looker = _Looker() if job.memory else None
    first_batch_s = 0.0
    wait_s: list[float] = []
    gap_s: list[float] = []
    objects, started_s, started_cpu_s = 0, 0.0, 0.0
    began_s = asked_s = time.perf_counter()
    loader = feed.loader(job.plan)
    for epoch in epochs(loader):
        if epoch == 1:
            started_s, started_cpu_s = asked_s, tree_cpu_s()
        for number, batch in enumerate(loader):
            waited_s = time.perf_counter() - asked_s
            first_batch_s = first_batch_s or time.perf_counter() - began_s
            found = checked.take(batch)
            if started_s:
                objects += found
                wait_s.append(waited_s)
                if number == 0:
                    gap_s.append(waited_s)
            if job.step_s:
                time.sleep(job.step_s)
            asked_s = time.perf_counter()
            if not job.least_s and number + 1 == max(1, job.plan.workers):
                started_s, started_cpu_s = asked_s, tree_cpu_s()
        if not job.least_s or (epoch and asked_s - started_s >= job.least_s):
            break
    cpu_s = tree_cpu_s() - started_cpu_s
    if looker is not None:
        looker.close()
    checked.end(epoch + 1, len(job.plan.names()))
    peak_bytes = None if looker is None else looker.peak_bytes
    return Run(objects, asked_s - started_s, cpu_s, first_batch_s, wait_s, gap_s, job.plan.batch, peak_bytes)


def _work(feed: Feed, fields: dict[str, Any]) -> dict[str, Any]:
    plan = fields.pop("plan")
    place, family = Place(**plan.pop("place")), Family(**plan.pop("family"))
    found = dataclasses.asdict(measure(feed, Job(Plan(place, family, **plan), **fields)))
    # The process ends without finalizers; those of the workers' queues run now.
    gc.collect()
    return found


class Loops:
    """Runs jobs, by nurseries that it keeps for each feed."""

    def __init__(self) -> None:
        self._nurseries: dict[str, Nursery] = {}

    def run(self, feed: str, job: Job) -> Run:
        """Runs a job in a process of its own.

        Raises:
            RuntimeError: The feed failed, or did not end.
        """
        if feed not in self._nurseries:
            self._nurseries[feed] = Nursery("benchmarks.loop", feed)
        return Run(**self._nurseries[feed].run(dataclasses.asdict(job), _LIMIT_S))

    def close(self) -> None:
        for nursery in self._nurseries.values():
            nursery.close()


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
