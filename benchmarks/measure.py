"""Takes one measurement: a client runs a job in its own process; measures time, CPU time and memory. The benchmarks
choose the jobs, `report` evaluates them.
`python -m benchmarks.measure CLIENT` is the fork server of a client of `rivals`.
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

from benchmarks.fork_server import ForkServer, serve
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB, Family, check
from benchmarks.rivals import Client, load

_SMALL = Family(4 << 10, 1)


@dataclass(frozen=True)
class Job:
    """What a client reads, repeatedly: `batch` objects of `family` per call, or a single object if 0."""

    location: Location
    family: Family
    batch: int
    min_s: float
    """Minimum duration; at least one call is made."""


@dataclass(frozen=True)
class Measured:
    """One measurement. CPU is that of the client's process, user and system mode together."""

    objects: int
    bytes: int
    wall_s: float
    cpu_s: float
    call_s: list[float]
    """Duration of each call."""
    call_cpu_s: list[float]
    grown_bytes: int | None = None
    """Peak resident memory minus that before the first call; for one object, of the first call only."""

    @property
    def objects_per_s(self) -> float:
        return self.objects / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per object."""
        return self.cpu_s / self.objects * 1e6


def memory_bytes(field: str) -> int | None:
    """Returns a field of Linux's `/proc/self/status`; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


def reset_peak() -> None:
    """Resets the peak of resident memory to the current value (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def touch(size: int) -> None:
    """Writes to `size` bytes of memory and frees them.

    The host of a virtual machine allocates memory that was never used, or was returned to it, at the first use, up to
    forty times slower than a page fault (128 MiB: 295 ms instead of 7 ms). Without this the first client pays, and
    a GET of 1 GiB takes 0.4 or 3 s at random.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        # Huge pages of 2 MiB, as the host has: those that a client uses next, whole or split.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1


def _calls(client: Client, job: Job) -> Iterator[tuple[list[str], Callable[[], Any]]]:
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


def used_cpu_s() -> float:
    """CPU time of this process, user and system mode together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(make: Callable[[Location], Client], job: Job) -> Measured:
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
    gc.collect()
    before_bytes = memory_bytes("VmRSS")
    reset_peak()
    call_s: list[float] = []
    call_cpu_s: list[float] = []
    peak_bytes: int | None = None
    started_s, started_cpu_s = time.perf_counter(), used_cpu_s()
    content, names = None, []
    for names, call in calls:  # noqa: B007  the last ones are those of `content`
        # Free the batch before the next call, as a loop over batches does.
        content = None
        begun_s, begun_cpu_s = time.perf_counter(), used_cpu_s()
        content = call()
        call_s.append(time.perf_counter() - begun_s)
        call_cpu_s.append(used_cpu_s() - begun_cpu_s)
        if peak_bytes is None or job.batch:
            peak_bytes = memory_bytes("VmHWM")
        if time.perf_counter() - started_s >= job.min_s:
            break
    wall_s, cpu_s = time.perf_counter() - started_s, used_cpu_s() - started_cpu_s
    for name, found in zip(names, content if job.batch else [content], strict=True):
        check(name, job.family.size, found)
    objects = len(call_s) * (job.batch or 1)
    grown = None if peak_bytes is None or before_bytes is None else peak_bytes - before_bytes
    return Measured(objects, objects * job.family.size, wall_s, cpu_s, call_s, call_cpu_s, grown)


def _work(make: Callable[[Location], Client], fields: dict[str, Any]) -> dict[str, Any]:
    job = Job(Location(**fields.pop("location")), Family(**fields.pop("family")), **fields)
    return dataclasses.asdict(measure(make, job))


def run(fork_server: ForkServer, job: Job) -> Measured:
    """Runs a job in a child of a fork server of this module."""
    return Measured(**fork_server.run(dataclasses.asdict(job)))


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
