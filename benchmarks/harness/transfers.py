"""Takes one measurement of bytes that move: a client saves or loads a state dict, or uploads or downloads files.
`rivals.checkpoint` and `rivals.objects` have the clients.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.fork_server import Clients
from benchmarks.harness.measure import Measured, Stopwatch, memory_bytes, touch
from benchmarks.harness.report import Rounds
from benchmarks.harness.states import States
from benchmarks.lab import origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, MIB, check_file

_WARM = States(2, 16 * MIB)
WARM_KEY = "warm.pt"


@dataclass(frozen=True)
class Transfer(Measured):
    """One measurement."""

    payload_bytes: int
    requests: int | None = None
    """Of a save or load, if the origin counts them."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Requests of each kind, of files, if the origin counts them."""

    @property
    def rate(self) -> float:
        """MB per second."""
        return self.payload_bytes / self.wall_s / 1e6

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.payload_bytes * 1e9

    @property
    def grown_share(self) -> float | None:
        """Growth as a multiple of the payload."""
        return None if self.grown_bytes is None else self.grown_bytes / self.payload_bytes


@dataclass
class Saves(Rounds):
    """All rounds of saving or loading one state."""

    action: str = "save"

    def shown(self) -> str:
        """Returns the lines of the case."""
        saves = self.action == "save"
        columns = {
            "rounds": self.count,
            "MB/s": self.spreads("rate", 0),
            "CPU-s per GB": self.spreads("cpu_s_per_gb", 2),
            "RSS +MiB" if saves else "RSS +, of the payload": (
                self.spreads("grown_mib", 0) if saves else self.spreads("grown_share", 2, "x")
            ),
            "requests": self.medians("requests", 0),
            "s": self.medians("wall_s", 2),
            "our rate is": self.times("rate"),
            "our CPU is": self.times("cpu_s_per_gb"),
        }
        return self.table("median (min-max)", columns)


@dataclass(frozen=True)
class Save:
    """A client writes `states` to `key` or loads it from there. The object WARM_KEY exists for the warm-up."""

    action: str
    """"save" or "load"."""
    location: Location
    states: States
    key: str
    counted: bool = False
    """A location of `lab.origin`."""


def save(job: Save, make: Callable[[Location], Any]) -> Transfer:
    """Runs a save or a load in this process. Compares every byte after the clock has stopped.

    Memory grows from before the client is created, when the state to save already exists: what a client needs for
    connections, threads and buffers counts.
    """
    job.location.enter()
    state = job.states.build() if job.action == "save" else None
    gc.collect()
    before_bytes = memory_bytes("VmRSS")
    client = make(job.location)
    # Warms up connections, credentials and threads for later calls, with parts as the measured object has.
    if job.action == "save":
        client.save(_WARM.build(), f"{job.key}.{WARM_KEY}")
    else:
        client.load(WARM_KEY)
    # As much as the client with the largest need uses, if the machine has it.
    touch(min(max(64 * MIB, 3 * job.states.payload_bytes), psutil.virtual_memory().available // 2))
    counters = origin.counters(job.location) if job.counted else None
    with Stopwatch(before_bytes) as watch:
        if job.action == "save":
            client.save(state, job.key)
        else:
            state = client.load(job.key)
    requests = (origin.counters(job.location) - counters).requests if counters is not None else None
    job.states.check(state)
    return Transfer(watch.wall_s, watch.cpu_s, watch.grown_bytes, job.states.payload_bytes, requests)


def prepare(clients: Clients, location: Location, states: States, key: str) -> None:
    """Writes `key` with the stock torch.save, and the object to warm up with."""
    for each, name in ((_WARM, WARM_KEY), (states, key)):
        run_save(clients, "boto3", Save("save", location, each, name))


def run_save(clients: Clients, client: str, job: Save) -> Transfer:
    """Runs a save or a load in a process of its own.

    Raises:
        RuntimeError: The client failed, loaded something else, or did not end.
    """
    found: Transfer = clients.run(client, partial(save, job))
    return found


@dataclass(frozen=True)
class Move:
    """A client uploads files, or their content from memory, or downloads them and the content is compared."""

    action: str
    """"up", "put" or "down"."""
    location: Location
    pairs: Sequence[tuple[str, str]]
    """A path and a key for each file; keys are names of `lab.objects` if they are downloaded."""
    payload_bytes: int
    warm: tuple[str, str]
    """Another pair, transferred once before the measurement."""
    counted: bool = False
    """A location of `lab.origin`."""


def move(job: Move, make: Callable[[Location], Any]) -> Transfer:
    """Transfers files in this process."""
    job.location.enter()
    client = make(job.location)
    paths = [path for path, _ in (job.warm, *job.pairs)] if job.action == "put" else []
    contents = {path: Path(path).read_bytes() for path in paths}

    def transfer(pairs: Sequence[tuple[str, str]]) -> None:
        if job.action == "up":
            client.upload(pairs)
        elif job.action == "down":
            client.download(pairs)
        else:
            for path, key in pairs:
                client.put(contents[path], key)

    transfer([job.warm])
    touch(min(job.payload_bytes, 2 * GIB) * 5 // 4)
    kinds = origin.kinds(job.location) if job.counted else None
    with Stopwatch() as watch:
        transfer(job.pairs)
    found = {} if kinds is None else dict(origin.kinds(job.location) - kinds)
    if job.action == "down":
        for path, key in job.pairs:
            check_file(key, path)
            Path(path).unlink()
    return Transfer(watch.wall_s, watch.cpu_s, watch.grown_bytes, job.payload_bytes, None, found)
