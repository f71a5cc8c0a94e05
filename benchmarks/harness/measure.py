"""Measures time, CPU time and memory in this process, which is a child of a fork server. `timed` measures a client that
does one thing; other modules have special measurements.
"""

import contextlib
import gc
import mmap
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from benchmarks.lab import origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB


def memory_bytes(field: str) -> int | None:
    """Returns a field of Linux's `/proc/self/status`; None elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


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


def cpu_s() -> float:
    """CPU time of this process and of the processes that it has started and that have ended, user and system mode."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Stopwatch:
    """Measures a `with` block.

    Args:
        before_bytes: The resident memory that growth is compared with; that at the start of the block if None.
    """

    wall_s = 0.0
    cpu_s = 0.0
    """That of `cpu_s()`."""
    grown_bytes: int | None = None
    """Peak resident memory minus that before."""

    def __init__(self, before_bytes: int | None = None) -> None:
        self._before_bytes = before_bytes

    def __enter__(self) -> Self:
        gc.collect()
        if self._before_bytes is None:
            self._before_bytes = memory_bytes("VmRSS")
        # Resets the peak of resident memory to the current value (proc(5), clear_refs).
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._started_s, self._started_cpu_s = time.perf_counter(), cpu_s()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._started_s, cpu_s() - self._started_cpu_s
        self.grown_bytes = self.grown()

    def timed(self, items: int = 1) -> "Timed":
        """Returns the measurement."""
        return Timed(self.wall_s, self.cpu_s, self.grown_bytes, items)

    def grown(self) -> int | None:
        """Peak resident memory since the start minus that before; None where the system does not tell."""
        peak_bytes = memory_bytes("VmHWM")
        return None if peak_bytes is None or self._before_bytes is None else peak_bytes - self._before_bytes


@dataclass(frozen=True)
class Timed:
    """One measurement."""

    wall_s: float
    cpu_s: float
    """That of the client's process, and of the processes that it has started and that have ended."""
    grown_bytes: int | None
    """Peak resident memory of the client's process minus that before."""
    items: int = 1
    """Number of what was done: keys, samples, bytes, or calls."""
    counters: dict[str, int] = field(default_factory=dict)
    """Those of the origin, if the server is one, and of the client."""

    @property
    def grown_mib(self) -> float | None:
        return None if self.grown_bytes is None else self.grown_bytes / MIB

    @property
    def rate(self) -> float:
        """Items per second."""
        return self.items / self.wall_s

    @property
    def us(self) -> float:
        """Microseconds per item."""
        return self.wall_s / self.items * 1e6

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / self.items * 1e6

    # For items that are bytes:

    @property
    def mb_per_s(self) -> float:
        return self.rate / 1e6

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.items * 1e9

    @property
    def grown_share(self) -> float | None:
        """Growth of memory as a multiple of the bytes."""
        return None if self.grown_bytes is None else self.grown_bytes / self.items

    @property
    def sent_share(self) -> float | None:
        """What the origin sent as a multiple of the bytes; None if the server does not count it."""
        return self.counters["sent_bytes"] / self.items if "sent_bytes" in self.counters else None

    @property
    def origin_faults(self) -> int:
        """Faults that the origin made."""
        return self.counters.get("faults", 0)

    @property
    def kinds(self) -> Counter[str]:
        """Requests of each kind."""
        others = ("received_bytes", "sent_bytes", "faults")
        return Counter({kind: number for kind, number in self.counters.items() if kind not in others})

    @property
    def requests(self) -> int | None:
        return self.kinds.total() or None

    @property
    def requests_per_1000(self) -> float | None:
        """Requests per 1,000 items."""
        return None if self.requests is None else self.requests / self.items * 1000


class Worker:
    """What a client does. It is made from a location and the fields of a job."""

    modules: tuple[str, ...] = ()
    """What its first use imports."""
    before_bytes: int | None = None
    """The resident memory that growth is compared with; that at the start of `run` if None."""
    counters: Mapping[str, int] = MappingProxyType({})
    """Requests of each kind in `run`, where the client counts them."""

    def warm(self) -> None:
        """Opens connections, which is not measured; by default the work opens them in the time that it takes."""

    def run(self) -> int:
        """Does the work; returns the number of keys, or of bytes."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises AssertionError if the result is wrong; not measured."""


def timed(
    location: Location, job: dict[str, Any], touch_bytes: int, make: Callable[..., Any], worker: Any = None
) -> Timed:
    """Runs a worker in this process. `make` makes it; or a client, if there is a class of a `worker` that uses it."""
    location.enter()
    made: Worker = worker(make, location, **job) if worker else make(location, **job)
    made.warm()
    touch(touch_bytes)
    before = origin.counters(location)
    with Stopwatch(made.before_bytes) as watch:
        items = made.run()
    counters = origin.counters(location) - before
    made.check()
    return Timed(watch.wall_s, watch.cpu_s, watch.grown_bytes, items, {**counters, **made.counters})
