"""Takes one measurement: a client reads what a job says, in a process of its own, between two looks at the clock, the
CPU time and the memory. Leaves what to measure to the benchmarks, and what to make of it to `report`.
`python -m benchmarks.measure CLIENT` is the nursery of a client of `rivals`.
"""

import dataclasses
import functools
import gc
import itertools
import mmap
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.objects import MIB, Family, check
from benchmarks.lab.place import Place
from benchmarks.nursery import Nursery, serve
from benchmarks.rivals import Client, load

_SMALL = Family(4 << 10, 1)


@dataclass(frozen=True)
class Job:
    """What a client reads: `batch` objects of `family` at a time, or with 0 one at a time; over and over."""

    place: Place
    family: Family
    batch: int
    least_s: float
    """Calls are made until this time is over, one at the least."""


@dataclass(frozen=True)
class Measured:
    """What it took. CPU is that of the client's process, in user and system mode together."""

    objects: int
    bytes: int
    wall_s: float
    cpu_s: float
    call_s: list[float]
    """Of each call."""
    call_cpu_s: list[float]
    grown_bytes: int | None = None
    """Peak of resident memory over what it was before: of the first call for one object, of all calls for many."""

    @property
    def objects_per_s(self) -> float:
        return self.objects / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU microseconds for an object."""
        return self.cpu_s / self.objects * 1e6


def memory_bytes(field: str) -> int | None:
    """A field of Linux's `/proc/self/status`; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


def reset_peak() -> None:
    """Makes the peak of resident memory that of now (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def touch(size: int) -> None:
    """Writes to `size` bytes of memory and gives them back.

    A virtual machine's memory that was never used, or was given back to the host, is found by the host at its first
    use, up to forty times slower than a page fault (128 MiB: 295 ms, not 7). Without this the client that comes first
    pays for all, and a GET of 1 GiB takes 0.4 or 3 s by chance.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        # Pages of 2 MiB, as the host has: those that a client takes next, whole or split.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def _calls(client: Client, job: Job) -> Iterator[tuple[list[str], Callable[[], Any]]]:
    """The names that a call reads, and the call, for ever."""
    names = job.family.names()
    width = job.batch or 1
    for start in itertools.cycle(range(0, len(names) - width + 1, width)):
        group = names[start : start + width]
        keys = [job.place.key(name) for name in group]
        if job.batch:
            yield group, lambda keys=keys: client.many(keys)
        else:
            yield group, lambda keys=keys: client.one(keys[0], job.family.size)


def used_cpu_s() -> float:
    """CPU time of this process, in user and system mode together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(make: Callable[[Place], Client], job: Job) -> Measured:
    """Reads as `job` says, in this process. The last call's bytes are compared, each one, after the clock stopped."""
    job.place.enter()
    client = make(job.place)
    calls = _calls(client, job)
    # Connections, credentials, threads: what any later call finds. A large object itself is read for the first time.
    if job.batch:
        next(calls)[1]()
    else:
        client.one(job.place.key(_SMALL.names()[0]), _SMALL.size)
    # As much as the hungriest client needs.
    touch(max(32 * MIB, job.family.size * (job.batch or 1)) * 5 // 2)
    gc.collect()
    before_bytes = memory_bytes("VmRSS")
    reset_peak()
    call_s: list[float] = []
    call_cpu_s: list[float] = []
    peak_bytes: int | None = None
    started_s, started_cpu_s = time.perf_counter(), used_cpu_s()
    content, names = None, []
    for names, call in calls:  # noqa: B007  the last ones are those of `content`
        # Before the next call, as a loop over batches does.
        content = None
        begun_s, begun_cpu_s = time.perf_counter(), used_cpu_s()
        content = call()
        call_s.append(time.perf_counter() - begun_s)
        call_cpu_s.append(used_cpu_s() - begun_cpu_s)
        if peak_bytes is None or job.batch:
            peak_bytes = memory_bytes("VmHWM")
        if time.perf_counter() - started_s >= job.least_s:
            break
    wall_s, cpu_s = time.perf_counter() - started_s, used_cpu_s() - started_cpu_s
    for name, found in zip(names, content if job.batch else [content], strict=True):
        check(name, job.family.size, found)
    objects = len(call_s) * (job.batch or 1)
    grown = None if peak_bytes is None or before_bytes is None else peak_bytes - before_bytes
    return Measured(objects, objects * job.family.size, wall_s, cpu_s, call_s, call_cpu_s, grown)


def _work(make: Callable[[Place], Client], fields: dict[str, Any]) -> dict[str, Any]:
    job = Job(Place(**fields.pop("place")), Family(**fields.pop("family")), **fields)
    return dataclasses.asdict(measure(make, job))


def run(nursery: Nursery, job: Job) -> Measured:
    """Runs a job in a child of a nursery of this module."""
    return Measured(**nursery.run(dataclasses.asdict(job)))


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
