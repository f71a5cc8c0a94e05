"""Takes one measurement: a client saves a state dict or loads it, in a process of its own, between two looks at the
clock, the CPU time, the memory and the origin's counters. Leaves who the clients are to `checkpoint_rivals`.
`python -m benchmarks.checkpoint_measure CLIENT` is a client's nursery.
"""

import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.checkpoint_rivals import Client, load
from benchmarks.lab import origin
from benchmarks.lab.objects import GIB, MIB
from benchmarks.lab.place import Place
from benchmarks.measure import memory_bytes, reset_peak, touch, used_cpu_s
from benchmarks.nursery import Nursery, serve
from benchmarks.report import Rounds
from benchmarks.states import States

_LIMIT_S = 300.0
_WARM = States(2, 16 * MIB)
WARM_KEY = "warm.pt"


@dataclass(frozen=True)
class Job:
    """A client writes `states` to `key`, or loads it from there. An object WARM_KEY is there to load from."""

    action: str
    """"save" or "load"."""
    place: Place
    states: States
    key: str
    counted: bool = False
    """By the place, which is an origin of `lab.origin`."""


@dataclass(frozen=True)
class Run:
    """What it took. CPU is that of the client's process, in user and system mode together."""

    payload_bytes: int
    wall_s: float
    cpu_s: float
    grown_bytes: int
    """Peak of resident memory over what it was before there was a client, with the state to be saved in it."""
    requests: int | None

    def rate(self) -> float:
        """MB/s."""
        return self.payload_bytes / self.wall_s / 1e6

    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.payload_bytes * 1e9

    def grown_mib(self) -> float:
        return self.grown_bytes / MIB

    def grown_share(self) -> float:
        """Growth as a multiple of the payload."""
        return self.grown_bytes / self.payload_bytes


@dataclass
class Case(Rounds):
    """All rounds of saving or loading one state."""

    label: str
    action: str
    runs: dict[str, list[Run]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)


def _warm(client: Client, job: Job) -> None:
    """Connections, credentials, threads: what any later call finds. In parts, as what comes is."""
    if job.action == "save":
        client.save(_WARM.build(), f"{job.key}.{WARM_KEY}")
    else:
        client.load(WARM_KEY)


def measure(make: Callable[[Place], Client], job: Job) -> Run:
    """Saves or loads as `job` says, in this process. Every byte is compared, after the clock stopped."""
    job.place.enter()
    state = job.states.build() if job.action == "save" else None
    gc.collect()
    # What a client needs for its connections, threads and buffers is growth too.
    before_bytes = memory_bytes("VmRSS") or 0
    client = make(job.place)
    _warm(client, job)
    # As much as the hungriest client needs.
    touch(min(max(64 * MIB, 3 * job.states.payload_bytes), 7 * GIB))
    gc.collect()
    counters = origin.counters(job.place) if job.counted else None
    reset_peak()
    started_s, started_cpu_s = time.perf_counter(), used_cpu_s()
    if job.action == "save":
        client.save(state, job.key)
    else:
        state = client.load(job.key)
    wall_s, cpu_s = time.perf_counter() - started_s, used_cpu_s() - started_cpu_s
    grown_bytes = (memory_bytes("VmHWM") or 0) - before_bytes
    requests = (origin.counters(job.place) - counters).requests if counters is not None else None
    job.states.check(state)
    return Run(job.states.payload_bytes, wall_s, cpu_s, grown_bytes, requests)


def _work(make: Callable[[Place], Client], fields: dict[str, Any]) -> dict[str, Any]:
    place, states = Place(**fields.pop("place")), States(**fields.pop("states"))
    return dataclasses.asdict(measure(make, Job(place=place, states=states, **fields)))


class Savers:
    """Runs jobs, by nurseries that it keeps for each client."""

    def __init__(self) -> None:
        self._nurseries: dict[str, Nursery] = {}

    def run(self, client: str, job: Job) -> Run:
        """Runs a job in a process of its own.

        Raises:
            RuntimeError: The client failed, loaded something else, or did not end.
        """
        if client not in self._nurseries:
            self._nurseries[client] = Nursery("benchmarks.checkpoint_measure", client)
        return Run(**self._nurseries[client].run(dataclasses.asdict(job), _LIMIT_S))

    def prepare(self, place: Place, states: States, key: str) -> None:
        """Writes what is loaded: `key` by the stock torch.save, and the object to warm up with."""
        self.run("boto3", Job("save", place, _WARM, WARM_KEY))
        self.run("boto3", Job("save", place, states, key))

    def close(self) -> None:
        for nursery in self._nurseries.values():
            nursery.close()


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
