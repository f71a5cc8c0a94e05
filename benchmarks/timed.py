"""Takes one measurement of a client that does one thing: time, CPU time with that of its processes, and memory; and
runs clients in turn. The benchmarks choose the jobs. `python -m benchmarks.timed MODULE.CLIENT` is a client's fork
server.
"""

import dataclasses
import functools
import gc
import importlib
import itertools
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks import report
from benchmarks.fork_server import ForkServer, serve
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB
from benchmarks.measure import memory_bytes, reset_peak, touch, used_cpu_s
from benchmarks.report import OURS, Rounds


class Worker(Protocol):
    """What a client does. It is made from a location and the fields of a job."""

    def warm(self) -> None:
        """Opens connections; not measured."""

    def run(self) -> int:
        """Does the work; returns the number of keys, or of bytes."""

    def check(self) -> None:
        """Raises AssertionError if the result is wrong; not measured."""


@dataclass(frozen=True)
class Timed:
    """One measurement. CPU time includes that of the processes that the client has started and that have ended."""

    items: int
    """Keys, or bytes."""
    wall_s: float
    cpu_s: float
    grown_bytes: int | None
    """Peak resident memory of the client's process minus that before the work."""

    def rate(self) -> float:
        """Items per second; for bytes MB per second."""
        return self.items / self.wall_s

    def mb_per_s(self) -> float:
        return self.rate() / 1e6

    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.items * 1e9

    def cpu_seconds(self) -> float:
        return self.cpu_s

    def seconds(self) -> float:
        return self.wall_s


@dataclass
class TimedRounds(Rounds):
    """All rounds of one case."""

    label: str
    runs: dict[str, list[Timed]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Clients that were left out, and why."""

    def grown_mib(self, client: str) -> float | None:
        grown = [run.grown_bytes / MIB for run in self.runs[client] if run.grown_bytes is not None]
        return max(grown) if grown else None


def all_cpu_s() -> float:
    """CPU time of this process and of the processes that it has started and that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used_cpu_s() + ended.ru_utime + ended.ru_stime


def _work(make: Callable[..., Worker], fields: dict[str, Any]) -> dict[str, Any]:
    touch_bytes = fields.pop("touch_bytes")
    location = Location(**fields.pop("location"))
    location.enter()
    worker = make(location, **fields)
    worker.warm()
    touch(touch_bytes)
    gc.collect()
    before_bytes = memory_bytes("VmRSS")
    reset_peak()
    started_s, started_cpu_s = time.perf_counter(), all_cpu_s()
    items = worker.run()
    wall_s, cpu_s = time.perf_counter() - started_s, all_cpu_s() - started_cpu_s
    peak_bytes = memory_bytes("VmHWM")
    worker.check()
    grown = None if peak_bytes is None or before_bytes is None else peak_bytes - before_bytes
    return dataclasses.asdict(Timed(items, wall_s, cpu_s, grown))


class Clients:
    """Runs jobs on a fork server per client of a module of `benchmarks`, which has `CLIENTS` with their classes."""

    def __init__(self, module: str, limit_s: float = 600.0) -> None:
        self._module, self._limit_s = module, limit_s
        self._fork_servers: dict[str, ForkServer] = {}

    def run(self, client: str, location: Location, job: dict[str, Any], touch_bytes: int = 64 * MIB) -> Timed:
        """Runs a job. It raises RuntimeError if the client fails, or what it returns is wrong."""
        if client not in self._fork_servers:
            self._fork_servers[client] = ForkServer("benchmarks.timed", f"{self._module}.{client}")
        fields = {"location": dataclasses.asdict(location), "touch_bytes": touch_bytes, **job}
        return Timed(**self._fork_servers[client].run(fields, self._limit_s))

    def close(self) -> None:
        for fork_server in self._fork_servers.values():
            fork_server.close()


def in_turn(
    clients: Sequence[str],
    rounds: int,
    run: Callable[[str], Any],
    runs: dict[str, list[Any]],
    failed: dict[str, str],
    slow: Sequence[str] = (),
) -> None:
    """Runs all rounds: A B C, B C A, C A B. A client that fails is left out of later rounds.

    The order changes, because the first process after another client's large object pays for memory that the machine
    took back.

    Args:
        clients: Their names.
        rounds: Number of rounds.
        run: Takes one measurement.
        runs: Receives the measurements by client.
        failed: Receives the errors by client.
        slow: Clients that take minutes, and run in the first two rounds only.
    """
    for number, position in itertools.product(range(rounds), range(len(clients))):
        client = clients[(number + position) % len(clients)]
        if client in failed or (number > 1 and client in slow):
            continue
        try:
            found = run(client)
        except RuntimeError as error:
            failed[client] = str(error)
            runs.pop(client, None)
        else:
            runs.setdefault(client, []).append(found)


def left_out(failed: dict[str, str]) -> list[str]:
    """A line for each client that failed."""
    return [f"  {name} is left out: {text.strip().splitlines()[-1]}" for name, text in failed.items()]


def table(case: TimedRounds, figures: Sequence[tuple[str, Callable[[Timed], float], int]], ours: str = OURS) -> str:
    """Returns the lines of one case.

    Args:
        case: Its rounds.
        figures: The name, function and number of digits of each figure; ratios of all of them are shown.
        ours: The client whose figures are divided by those of the others.
    """
    rows = [["", *(name for name, _, _ in figures), "RSS +MiB", *(f"our {name}" for name, _, _ in figures)]]
    for client in case.runs:
        grown = case.grown_mib(client)
        row = [client, *(case.spread(figure, client).text(digits) for _, figure, digits in figures)]
        row.append("" if grown is None else f"{grown:.0f}")
        is_compared = client != ours and ours in case.runs
        row += [f"{case.ratio(figure, client, ours).text(3)}x" if is_compared else "" for _, figure, _ in figures]
        rows.append(row)
    rounds = max(map(len, case.runs.values()), default=0)
    title = f"{case.label}: median (min-max) of {rounds} rounds, memory the most of them"
    return "\n".join([report.aligned(title, rows), *left_out(case.failed)])


def fields(case: TimedRounds) -> dict[str, Any]:
    """Returns a case as it is written to the file."""
    return dataclasses.asdict(case)


def load(name: str) -> Callable[..., Worker]:
    """Returns the class of `MODULE.CLIENT`, with every import done that its first use would do."""
    module, _, client = name.partition(".")
    made: Any = importlib.import_module(f"benchmarks.{module}").CLIENTS[client]
    for each in made.modules:
        importlib.import_module(each)
    found: Callable[..., Worker] = made
    return found


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
