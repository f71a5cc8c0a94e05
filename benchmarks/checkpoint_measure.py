"""Takes one measurement: a client saves or loads a state dict in its own process; measures time, CPU time, memory and
the origin's counters. `checkpoint_rivals` has the clients.
`python -m benchmarks.checkpoint_measure CLIENT` is a client's fork server.
"""

import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.checkpoint_rivals import Client, load
from benchmarks.fork_server import ForkServer, serve
from benchmarks.lab import origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB
from benchmarks.measure import memory_bytes, reset_peak, touch, used_cpu_s
from benchmarks.report import Rounds
from benchmarks.states import States

_LIMIT_S = 300.0
_WARM = States(2, 16 * MIB)
WARM_KEY = "warm.pt"


@dataclass(frozen=True)
class Job:
    """A client writes `states` to `key` or loads it from there. The object WARM_KEY exists for the warm-up."""

    action: str
    """"save" or "load"."""
    location: Location
    states: States
    key: str
    counted: bool = False
    """A location of `lab.origin`."""


@dataclass(frozen=True)
class Run:
    """One measurement. CPU is that of the client's process, user and system mode together."""

    payload_bytes: int
    wall_s: float
    cpu_s: float
    grown_bytes: int
    """Peak resident memory minus that before the client was created, when the state to save already existed."""
    requests: int | None

    def rate(self) -> float:
        """MB per second."""
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
    """Warms up connections, credentials and threads for later calls, with parts as the measured object has."""
    if job.action == "save":
        client.save(_WARM.build(), f"{job.key}.{WARM_KEY}")
    else:
        client.load(WARM_KEY)


def measure(make: Callable[[Location], Client], job: Job) -> Run:
    """Runs `job` in this process: a save or a load. Compares every byte after the clock has stopped."""
    job.location.enter()
    state = job.states.build() if job.action == "save" else None
    gc.collect()
    # Memory that a client needs for connections, threads and buffers counts as growth.
    before_bytes = memory_bytes("VmRSS") or 0
    client = make(job.location)
    _warm(client, job)
    # As much as the client with the largest need uses, if the machine has it.
    touch(min(max(64 * MIB, 3 * job.states.payload_bytes), psutil.virtual_memory().available // 2))
    gc.collect()
    counters = origin.counters(job.location) if job.counted else None
    reset_peak()
    started_s, started_cpu_s = time.perf_counter(), used_cpu_s()
    if job.action == "save":
        client.save(state, job.key)
    else:
        state = client.load(job.key)
    wall_s, cpu_s = time.perf_counter() - started_s, used_cpu_s() - started_cpu_s
    grown_bytes = (memory_bytes("VmHWM") or 0) - before_bytes
    requests = (origin.counters(job.location) - counters).requests if counters is not None else None
    job.states.check(state)
    return Run(job.states.payload_bytes, wall_s, cpu_s, grown_bytes, requests)


def _work(make: Callable[[Location], Client], fields: dict[str, Any]) -> dict[str, Any]:
    location, states = Location(**fields.pop("location")), States(**fields.pop("states"))
    return dataclasses.asdict(measure(make, Job(location=location, states=states, **fields)))


class Savers:
    """Runs jobs on a fork server per client."""

    def __init__(self) -> None:
        self._fork_servers: dict[str, ForkServer] = {}

    def run(self, client: str, job: Job) -> Run:
        """Runs a job in its own process.

        Raises:
            RuntimeError: The client failed, loaded something else, or did not end.
        """
        if client not in self._fork_servers:
            self._fork_servers[client] = ForkServer("benchmarks.checkpoint_measure", client)
        return Run(**self._fork_servers[client].run(dataclasses.asdict(job), _LIMIT_S))

    def prepare(self, location: Location, states: States, key: str) -> None:
        """Writes `key` with the stock torch.save, and the object to warm up with."""
        self.run("boto3", Job("save", location, _WARM, WARM_KEY))
        self.run("boto3", Job("save", location, states, key))

    def close(self) -> None:
        for fork_server in self._fork_servers.values():
            fork_server.close()


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
