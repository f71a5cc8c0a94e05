"""Takes one measurement of reading objects: a client reads many at a time, or one. `rivals.objects` has the clients."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.measure import Measured, Stopwatch, cpu_s, touch
from benchmarks.harness.report import OURS, Rounds
from benchmarks.harness.rivals.objects import Reader
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family, check, size_text

_SMALL = Family(4 * KIB, 1)


@dataclass(frozen=True)
class Job:
    """What a client reads, repeatedly: `batch` objects of `family` per call, or a single object if 0."""

    location: Location
    family: Family
    batch: int
    min_s: float
    """Minimum duration; at least one call is made."""


@dataclass(frozen=True)
class Read(Measured):
    """One measurement. `grown_bytes` of single objects is that of the first call only."""

    objects: int
    bytes: int
    call_s: list[float]
    """Duration of each call."""
    call_cpu_s: list[float]
    many: bool
    """Whether a call reads several objects."""

    @property
    def objects_per_s(self) -> float:
        return self.objects / self.wall_s

    @property
    def rate(self) -> float:
        """Objects per second; for one object MB/s of the median call."""
        return self.objects_per_s if self.many else self.bytes / self.objects / statistics.median(self.call_s) / 1e6

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per object; for one object those of the median call."""
        return (self.cpu_s / self.objects if self.many else statistics.median(self.call_cpu_s)) * 1e6


@dataclass
class Reads(Rounds):
    """All rounds of reading objects, many per call or one."""

    size: int = 0
    batch: int = 0
    """Objects per call; 0 if a call reads one object."""

    @property
    def unit(self) -> str:
        return "objects/s" if self.batch else "MB/s"

    def shown(self) -> str:
        """Returns the lines of the case."""
        columns = {
            self.unit: self.spreads("rate", 0),
            "CPU µs an object": self.spreads("cpu_us", 1 if self.batch else 0),
            "RSS +MiB": self.medians("grown_mib", 0),
            "our CPU is": self.times("cpu_us"),
            "our rate is": self.times("rate"),
        }
        return self.table("median (min-max) of {rounds} rounds", columns)

    def best_rival(self, *others: str) -> str:
        """The client, other than ours and `others`, with the highest rate."""
        rivals = [name for name in self.runs if name not in (OURS, *others)]
        return max(rivals, key=lambda name: self.spread("rate", name).median)

    def fields(self) -> dict[str, Any]:
        clients = {
            client: {
                "rate": asdict(self.spread("rate", client)),
                "cpu_us": asdict(self.spread("cpu_us", client)),
                "grown_mib": statistics.median(grown) if (grown := self.figures("grown_mib", client)) else None,
                "rounds": [asdict(run) for run in runs],
            }
            for client, runs in self.runs.items()
        }
        case = {"label": self.label, "object": size_text(self.size), "batch": self.batch, "rate_unit": self.unit}
        return case | {"clients": clients, "failed": self.failed}


def _calls(client: Reader, job: Job) -> Iterator[tuple[list[str], Callable[[], Any]]]:
    """Yields the names that a call reads, and the call, without end."""
    names = job.family.names()
    width = job.batch or 1
    for start in itertools.cycle(range(0, len(names) - width + 1, width)):
        group = names[start : start + width]
        keys = [job.location.key(name) for name in group]
        if job.batch:
            yield group, lambda keys=keys: client.many(keys)
        else:
            yield group, lambda keys=keys: client.one(keys[0], job.family.size)


def read(job: Job, make: Callable[[Location], Reader]) -> Read:
    """Runs `job` in this process. Compares every byte of the last call after the clock has stopped."""
    job.location.enter()
    client = make(job.location)
    calls = _calls(client, job)
    # Warms up connections, credentials and threads for later calls. A large object is first read in the measurement.
    if job.batch:
        next(calls)[1]()
    else:
        client.one(job.location.key(_SMALL.names()[0]), _SMALL.size)
    # As much as the client with the largest need uses.
    touch(max(32 * MIB, job.family.size * (job.batch or 1)) * 5 // 2)
    call_s: list[float] = []
    call_cpu_s: list[float] = []
    grown_bytes: int | None = None
    content, names = None, []
    with Stopwatch() as watch:
        started_s = time.perf_counter()
        for names, call in calls:  # noqa: B007  the last ones are those of `content`
            # Free the batch before the next call, as a loop over batches does.
            content = None
            begun_s, begun_cpu_s = time.perf_counter(), cpu_s()
            content = call()
            call_s.append(time.perf_counter() - begun_s)
            call_cpu_s.append(cpu_s() - begun_cpu_s)
            if grown_bytes is None or job.batch:
                grown_bytes = watch.grown()
            if time.perf_counter() - started_s >= job.min_s:
                break
    for name, found in zip(names, content if job.batch else [content], strict=True):
        check(name, job.family.size, found)
    objects = len(call_s) * (job.batch or 1)
    size = objects * job.family.size
    return Read(watch.wall_s, watch.cpu_s, grown_bytes, objects, size, call_s, call_cpu_s, bool(job.batch))
