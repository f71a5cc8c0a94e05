"""How fast are weights loaded by one rank and by four of one machine, how much does the origin send for it, and does a
fault matter?

    python benchmarks/weights.py                             # everything, about three hours
    python benchmarks/weights.py --only "safetensors 4 GiB"  # the cases whose label has these words
    python benchmarks/weights.py --only reset --only silence # faults
    python benchmarks/weights.py --only MLPerf               # a sharded checkpoint of eight ranks, saved and loaded
    python benchmarks/weights.py --quick                     # a preview, a minute: not for publication

Needs the extra `bench`, a C compiler for the origin, and nginx for TLS. Each format is written by its own library, and
read by one client after the other, round after round; each run has a process for each rank, which are a gloo group.
Every byte is compared in each rank. MB/s are those of the weights, once, until the last rank has them; CPU-s per GB are
of the weights, too, and are used by all ranks. "sent" are the bytes that the origin sent as a multiple of the weights.
Memory is the growth of all ranks at its peak, what they share counted once; a file in `/dev/shm` that a client reads is
not counted. "400 MB/s" is what the origin sends to all connections together. The server, and for TLS nginx before it,
run on the same machine.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Rounds, Timed, Verdict, targets
from benchmarks.harness.rivals.weights import CLIENTS
from benchmarks.harness.states import States
from benchmarks.harness.transfers import FIGURES
from benchmarks.harness.weights import (
    DCP,
    FLASHPACK,
    PT,
    SAFETENSORS,
    SHARDS,
    Llama,
    Weights,
    checkpointing,
    loading,
    remove,
    store,
)
from benchmarks.lab import nginx, origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB
from benchmarks.lab.progress import progress

SHARED, JOB = "torchobj, share=host", "torchobj, share=job, 2 machines"
RUNAI = [name for name in CLIENTS if name.startswith("runai")]
# Where its number of requests is not swept.
_RUNAI_ELSEWHERE = "runai, 8 requests"
FORMATS = {PT: 1, DCP: 1, SAFETENSORS: 1, SHARDS: 8, FLASHPACK: 1}
_CAP = 400_000_000
_LIMIT_S = 600.0
_FAULTS = {"reset": "reset in one body of", "silence": "1.5 s of silence in one body of"}
# The targets.
_SENT, _SENT_MACHINES, _TIMES_RANKS, _RUNAI_RATE, _RUNAI_CPU, _OF_PT = 1.02, 1.04, 3.5, 2.0, 0.5, 0.95
# The ring of shared memory: 64 parts of 8 MiB. Besides it, what a process allocates for its threads.
_RING_MIB, _PROCESS_MIB = 512, 4


@dataclass(frozen=True)
class Scale:
    """How much is loaded."""

    one: States
    """By one rank."""
    many: States
    """By each of four."""
    formats: States
    """By one rank in each format of ours."""
    faulty: States
    """In as many files, so that clients that send one request for each meet faults."""
    every: int
    """Number of bodies for each fault."""
    llama: Llama


FULL = Scale(States.of_mib(4096), States.of_mib(1024), States.of_mib(2048), States(256, 4 * MIB), 200, Llama(64))
QUICK = Scale(States.of_mib(64), States.of_mib(64), States.of_mib(64), States(16, 2 * MIB), 10, Llama(256, layers=4))
QUICK_CLIENTS = (OURS, SHARED, JOB, _RUNAI_ELSEWHERE)


@dataclass(frozen=True)
class Plan:
    """A load to measure."""

    weights: Weights
    ranks: int
    tls: bool = False
    capped: bool = False
    fault: str = ""
    every: int = 0

    @property
    def label(self) -> str:
        what = f"{self.weights.label}, {self.ranks} rank{'s' * (self.ranks > 1)}"
        if self.fault:
            return f"{what}, {_FAULTS[self.fault]} {self.every}"
        return f"{what}, {'TLS' if self.tls else 'plain'}, {'400 MB/s' if self.capped else 'unlimited'}"

    @property
    def needed_bytes(self) -> int:
        """The memory of the origin and of the client that needs most."""
        return self.weights.states.payload_bytes * (1 + 4 * self.ranks)

    @property
    def is_swept(self) -> bool:
        """Whether runai is measured with each number of requests."""
        return not (self.tls or self.capped or self.fault)

    def has(self, client: str) -> bool:
        """Whether a client is measured."""
        if client in RUNAI and client != _RUNAI_ELSEWHERE and not self.is_swept:
            return False
        return self.weights.is_read_by(CLIENTS[client]) and (client not in (SHARED, JOB) or self.ranks > 1)


def plans(scale: Scale, *, quick: bool) -> Iterator[Plan]:
    """Yields the loads, with the same weights one after the other."""
    ways = [(False, False)] if quick else list(itertools.product((False, True), (False, True)))
    for (name, shards), (states, ranks) in itertools.product(FORMATS.items(), ((scale.one, 1), (scale.many, 4))):
        yield from (Plan(Weights(name, states, shards), ranks, tls, capped) for tls, capped in ways)
    faulty = Weights(SHARDS, scale.faulty, scale.faulty.layers)
    yield from (Plan(faulty, ranks, fault=fault, every=scale.every) for ranks in (1, 4) for fault in _FAULTS)


class Bench(contextlib.ExitStack):
    """Runs cases."""

    def __init__(self, program: Program, counted: origin.Origin, locations: dict[bool, Location]) -> None:
        super().__init__()
        self._program, self._origin, self._locations = program, counted, locations
        self._pool = self.enter_context(Clients("harness.rivals.weights", _LIMIT_S, lives=1))
        self._stored: list[Weights] = []
        self._clients = [name for name in CLIENTS if name in QUICK_CLIENTS or not program.given.quick]

    def _store(self, wanted: Sequence[Weights]) -> None:
        """Replaces the weights in the memory of the origin."""
        self._origin.set()
        for weights in [each for each in self._stored if each not in wanted]:
            remove(self._origin.memory, weights.folder)
            self._stored.remove(weights)
        for weights in [each for each in wanted if each not in self._stored]:
            with progress(f"writing {weights.label} to the origin"):
                self._pool.run("", partial(store, self._origin.memory, weights))
            self._stored.append(weights)

    def _ask(self, client: str, job: partial[Timed]) -> Timed:
        missing = [name for name in CLIENTS[client].modules if importlib.util.find_spec(name.partition(".")[0]) is None]
        if missing:
            raise RuntimeError(f"ModuleNotFoundError: {missing[0]} is not installed")
        found: Timed = self._pool.run(client, job)
        return found

    def _load(self, plan: Plan, client: str) -> Timed:
        faults = {plan.fault: plan.every} if plan.fault else {}
        self._origin.set(rate=_CAP if plan.capped else 0, **faults)
        return self._ask(client, loading(self._locations[plan.tls], self._origin.memory, plan.weights, plan.ranks))

    def _measure(
        self,
        case: Rounds,
        clients: Iterable[str],
        run: Callable[[str], Timed],
        verdicts: Callable[[Rounds], Iterable[Verdict]] = lambda _: (),
        fewer: dict[str, int] | None = None,
    ) -> None:
        more = {
            "of the weights": case.spreads("grown_share", 2, "x"),
            "sent": case.spreads("sent_share", 2, "x"),
            "requests": case.medians("requests", 0),
            "faults": case.medians("origin_faults", 0),
        }
        self._program.measure(case, clients, run, FIGURES, verdicts, more=more, fewer=fewer)

    def load(self, plan: Plan) -> None:
        """Runs a load by each client. Clients without a target run fewer rounds, except where runai is swept."""
        clients = [name for name in self._clients if plan.has(name)]
        if not clients:
            return
        self._store([plan.weights])
        fewer = {} if plan.is_swept else {name: 1 for name in CLIENTS if name not in (OURS, SHARED, JOB)}
        self._measure(Rounds(plan.label), clients, partial(self._load, plan), partial(verdicts, plan), fewer)

    def formats(self, states: States) -> None:
        """Compares the formats that torchobj reads."""
        found = {name: Weights(name, states, shards) for name, shards in FORMATS.items() if name != FLASHPACK}
        self._store(list(found.values()))
        case = Rounds(f"formats of torchobj, {found[PT].label.removeprefix(PT).strip()}, 1 rank, plain, unlimited")

        def run(name: str) -> Timed:
            return self._load(Plan(found[name], 1), OURS)

        def judged(case: Rounds) -> Iterator[Verdict]:
            yield targets.ratio(case, "MB/s", "mb_per_s", PT, least=_OF_PT, ours=SAFETENSORS)

        self._measure(case, found, run, judged)

    def mlperf(self, llama: Llama, action: str) -> None:
        """Saves or loads MLPerf's checkpoint."""
        self._store([])
        size = f"{llama.payload_bytes / 1e9:.2f} GB"
        case = Rounds(f"{action} MLPerf Storage's Llama 3 8B / {llama.divisor}, {size}, {llama.ranks} ranks, DCP")

        def run(client: str) -> Timed:
            folder = "mlperf"
            try:
                return self._ask(client, checkpointing(self._locations[False], llama, action, folder))
            finally:
                remove(self._origin.memory, folder)
                remove(self._origin.memory, f"{folder}-warm")

        writers = [name for name in self._clients if name != SHARED and hasattr(CLIENTS[name], "writer")]
        self._measure(case, writers, run)


def verdicts(plan: Plan, case: Rounds) -> Iterator[Verdict]:
    """The targets of a load."""
    if plan.fault:
        for name in (OURS,) if plan.ranks == 1 else (OURS, SHARED):
            faults = case.spread("origin_faults", name) if case.has(name) else None
            yield targets.bounded(f"{case.label}: {name}: right bytes", faults, 0, " faults", least=1)
    elif plan.ranks > 1 and plan.weights.format != FLASHPACK:
        sent = case.spread("sent_share", SHARED) if case.has(SHARED) else None
        yield targets.bounded(f"{case.label}: the origin sends <= {_SENT}x", sent, 3, "x", most=_SENT)
        if case.has(JOB):
            sent = case.spread("sent_share", JOB)
            yield targets.bounded(
                f"{case.label}: two machines: <= {_SENT_MACHINES}x", sent, 3, "x", most=_SENT_MACHINES
            )
        if plan.capped:
            yield targets.ratio(case, "MB/s", "mb_per_s", OURS, least=_TIMES_RANKS, ours=SHARED)
        own_mib = plan.ranks * (plan.weights.states.payload_bytes / MIB + _PROCESS_MIB)
        yield targets.grows_at_most(case, own_mib + _RING_MIB, SHARED, "of all ranks, ")
    elif plan.weights.format == SAFETENSORS and plan.is_swept and plan.ranks == 1:
        found = [name for name in RUNAI if case.has(name)]
        best = max(found, key=lambda name: case.spread("mb_per_s", name).median, default=RUNAI[0])
        yield targets.ratio(case, "MB/s", "mb_per_s", best, least=_RUNAI_RATE)
        yield targets.ratio(case, "CPU-s per GB", "cpu_s_per_gb", best, most=_RUNAI_CPU)


def _possible(chosen: Sequence[Plan]) -> Iterator[Plan]:
    for plan in chosen:
        if psutil.virtual_memory().available < plan.needed_bytes:
            print(f"{plan.label}: left out, because it needs {plan.needed_bytes / (1 << 30):.0f} GiB of memory\n")
            continue
        yield plan


def main() -> None:
    program = Program("weights", __doc__, 3, ("small weights, plain and unlimited, one round, few clients", 1))
    given = program.start()
    scale = QUICK if given.quick else FULL
    chosen = list(_possible(program.selected(list(plans(scale, quick=given.quick)), lambda plan: plan.label)))
    with contextlib.ExitStack() as stack:
        counted = stack.enter_context(origin.running())
        locations = {False: counted.memory}
        if any(plan.tls for plan in chosen):
            endpoint = nginx.Endpoint(tls=True, upstream_port=counted.port)
            found = stack.enter_context(nginx.running([], [endpoint]))
            locations[True] = dataclasses.replace(found[endpoint], bucket=counted.memory.bucket)
        bench = stack.enter_context(Bench(program, counted, locations))
        for plan in chosen:
            bench.load(plan)
        if program.selected(["formats"]):
            bench.formats(scale.formats)
        for action in program.selected(["save MLPerf", "load MLPerf"]):
            bench.mlperf(scale.llama, action.split()[0])
    program.finish()


if __name__ == "__main__":
    main()
