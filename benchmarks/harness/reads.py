"""Takes one measurement of reading objects: a client reads many at a time, or one. `rivals.objects` has the clients."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.measure import Stopwatch, Timed, touch
from benchmarks.harness.rivals.objects import Client
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family, check

_SMALL = Family(4 * KIB, 1)


@dataclass(frozen=True)
class Job:
    """What a client reads, repeatedly: `batch` objects of `family` per call, or a single object if 0."""

    location: Location
    family: Family
    batch: int
    min_s: float
    """Minimum duration; at least one call is made."""


#: The figures of many objects per call, and of one.
MANY = {"objects/s": ("rate", 0), "CPU µs an object": ("cpu_us", 1)}
ONE = {"MB/s": ("mb_per_s", 0), "CPU-s per GB": ("cpu_s_per_gb", 3)}


def read(job: Job, make: Callable[[Location], Client]) -> Timed:
    """Runs `job` in this process. Compares every byte of the last call after the clock has stopped.

    The items are objects, or bytes of a single object, where memory is that of the first call only.
    """
    job.location.enter()
    client, names, size, width = make(job.location), job.family.names(), job.family.size, job.batch or 1

    def call(group: Sequence[str]) -> Sequence[Any]:
        keys = [job.location.key(name) for name in group]
        return client.get_many(keys) if job.batch else [client.get(keys[0], size)]

    groups = itertools.cycle([names[at : at + width] for at in range(0, len(names) - width + 1, width)])
    # Warms up connections, credentials and threads for later calls. A large object is first read in the measurement.
    if job.batch:
        call(next(groups))
    else:
        client.get(job.location.key(_SMALL.names()[0]), _SMALL.size)
    # As much as the client with the largest need uses.
    touch(max(32 * MIB, size * width) * 5 // 2)
    grown_bytes: int | None = None
    contents: Sequence[Any] = ()
    with Stopwatch() as watch:
        started_s = time.perf_counter()
        for number, group in enumerate(groups, 1):  # noqa: B007  the last is that of `contents`
            # Free the batch before the next call, as a loop over batches does.
            contents = ()
            contents = call(group)
            if grown_bytes is None or job.batch:
                grown_bytes = watch.grown()
            if time.perf_counter() - started_s >= job.min_s:
                break
    for name, found in zip(group, contents, strict=True):
        check(name, size, found)
    return Timed(watch.wall_s, watch.cpu_s, grown_bytes, number * (job.batch or size))
