"""How fast, with how much CPU and how much memory, is a checkpoint saved to S3 and loaded, compared with other clients?

    python benchmarks/checkpoint.py                          # everything, about half an hour
    python benchmarks/checkpoint.py --only "512 MiB, origin" # the cases whose label has these words
    python benchmarks/checkpoint.py --only dcp               # distributed checkpoints
    python benchmarks/checkpoint.py --only loop              # a training loop beside an upload
    python benchmarks/checkpoint.py --only blocking          # how long save_async blocks the loop
    python benchmarks/checkpoint.py --only nearest           # restores from a local disk
    python benchmarks/checkpoint.py --quick                  # a preview, under two minutes: not for publication

Needs the extra `bench` and a C compiler for the origin. A state dict is saved or loaded by one client after the other,
round after round; each run is a process of its own. CPU and memory are those of the client's process; the server runs
on the same machine, as may other processes. Every loaded byte is compared. Before the measurement, what each client
saves is loaded from versitygw by itself and by the stock torch.load. One bucket of the origin discards what is saved,
the other serves from memory what is loaded. MB and GB are of the tensors, and decimal.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import blocking, dcp, loop_during_upload, nearest
from benchmarks.harness import OURS, Clients, Part, Program, Rounds, Timed, Verdict, targets
from benchmarks.harness.rivals.checkpoint import CLIENTS
from benchmarks.harness.states import States, prepare, saving
from benchmarks.harness.transfers import FIGURES
from benchmarks.lab import origin, versitygw
from benchmarks.lab.location import Location
from benchmarks.lab.progress import progress

RIVAL = "s3torchconnector"
STATES = {"512 MiB": States.of_mib(512), "2 GiB": States.of_mib(2048), "10k small tensors": States.of_tensors(10_000)}
QUICK_STATES = {"128 MiB": States.of_mib(128), "1k small tensors": States.of_tensors(1000)}
SMALL_TENSORS = 10_000
# Forty seconds for 512 MiB, at 55 CPU-s per GB: its case is the save.
LOADS_NOTHING = ("multi-storage-client in Rust",)
_LIMIT_S = 300.0
_CPU = 0.4
# Minimum MB/s as a multiple of the rival's, per action and location.
_RATES = {("save", "origin"): 1.5, ("save", "versitygw"): 1.0, ("load", "origin"): 4.0, ("load", "versitygw"): 2.5}
_GROWN_MIB = 64
_GROWN_SHARE = 1.05


@dataclasses.dataclass(frozen=True)
class Plan:
    """A case to measure."""

    action: str
    states: str
    location: str

    def label(self) -> str:
        return f"{self.action} {self.states}, {self.location}"


class Bench(contextlib.ExitStack):
    """Runs cases."""

    def __init__(self, servers: dict[str, tuple[Location, Location]], states: dict[str, States]) -> None:
        super().__init__()
        self._servers, self._states = servers, states
        self._wrong: dict[str, str] = {}
        self._pool = self.enter_context(Clients("harness.rivals.checkpoint", _LIMIT_S))
        self._prepared = cache(self._prepare)

    def _prepare(self, server: str, name: str) -> str:
        """Writes the objects to load, and the one to warm up with; returns the key."""
        states = self._states[name]
        key = f"load-{states.payload_bytes}.pt"
        prepare(self._pool, self._servers[server][1], states, key)
        return key

    def _check(self, client: str) -> None:
        """Saves large and small tensors to a real server and loads them, also with the stock torch.load.

        Raises:
            RuntimeError: What was loaded is not what was saved, or the client failed.
        """
        location, key = self._servers["versitygw"][0], f"check-{client.replace(' ', '-')}.pt"
        large, *_, small = self._states
        for name in (large, small):
            self._prepared("versitygw", name)
            self._pool.run(client, saving("save", location, self._states[name], key))
            for reader in dict.fromkeys([client, "boto3"]):
                if reader not in LOADS_NOTHING:
                    self._pool.run(reader, saving("load", location, self._states[name], key))
            _delete(location, key)

    def check(self, clients: Sequence[str]) -> None:
        """Checks clients, of which ours must work; others are left out of the cases."""
        for client in clients:
            try:
                with progress(f"comparing what {client} saves"):
                    self._check(client)
            except RuntimeError as error:
                if client == OURS:
                    raise
                self._wrong[client] = str(error)

    def _measure(self, plan: Plan, client: str) -> Timed:
        location, loads = self._servers[plan.location][plan.action == "load"], plan.action == "load"
        key = self._prepared(plan.location, plan.states) if loads else f"save-{client.replace(' ', '-')}.pt"
        found: Timed = self._pool.run(client, saving(plan.action, location, self._states[plan.states], key))
        if not loads and plan.location == "versitygw":
            _delete(location, key)
        return found

    def run(self, program: Program, plan: Plan, clients: Sequence[str]) -> None:
        """Runs all rounds of a case. Clients without a target run fewer."""
        case = Rounds(plan.label(), failed=dict(self._wrong))
        clients = [name for name in clients if plan.action == "save" or name not in LOADS_NOTHING]
        more = {"of the payload": case.spreads("grown_share", 2, "x"), "requests": case.medians("requests", 0)}
        is_first = plan.states == next(iter(self._states))
        fewer = {} if is_first else {name: 1 for name in clients if name not in (OURS, RIVAL)}
        program.measure(case, clients, partial(self._measure, plan), FIGURES, verdicts, more=more, fewer=fewer)


def _delete(location: Location, key: str) -> None:
    """Deletes a saved object, to limit disk use."""
    location.enter()
    location.store().delete(key)


def verdicts(case: Rounds) -> Iterator[Verdict]:
    """The targets of a case with large tensors."""
    if "small" in case.label:
        return
    action, location = case.label.split()[0], case.label.rsplit(", ", 1)[1]
    yield targets.ratio(case, "MB/s", "mb_per_s", RIVAL, least=_RATES[action, location])
    if action == "save" and location == "origin":
        yield targets.ratio(case, "CPU-s per GB", "cpu_s_per_gb", RIVAL, most=_CPU)
    if not case.has(OURS):
        return
    figure, limit, digits, unit = (
        ("grown_mib", _GROWN_MIB, 1, " MiB") if action == "save" else ("grown_share", _GROWN_SHARE, 3, "x")
    )
    grown = case.spread(figure, OURS)
    target = f"{case.label}: RSS grows by <= {limit}{unit}{'' if action == 'save' else ' of the payload'}"
    yield Verdict(target, f"{grown.text(digits)}{unit}", grown.most <= limit)


def main() -> None:
    program = Program("checkpoint", __doc__, 3, ("small states, one round, two clients", 1))
    given = program.start()
    states = QUICK_STATES if given.quick else STATES
    every = itertools.product(states, ("origin", "versitygw"), ("save", "load"))
    plans = program.selected([Plan(action, name, location) for name, location, action in every], Plan.label)
    clients = [name for name in ([OURS, RIVAL] if given.quick else CLIENTS) if name not in given.without]

    def run(module: str, *jobs: Callable[[], Part]) -> None:
        """Runs jobs of another file, in processes of their own."""
        with Clients(module, _LIMIT_S) as process:
            for job in jobs:
                with progress(f"{module}.py"):
                    cases, found = process.run("", job)
                for case in cases:
                    program.show(case, case.shown())
                program.judge(found)

    with contextlib.ExitStack() as stack:
        cheap = stack.enter_context(origin.running())
        if plans:
            real = stack.enter_context(versitygw.running([]))
            servers = {"origin": (cheap.discard, cheap.memory), "versitygw": (real, real)}
            bench = stack.enter_context(Bench(servers, states))
            bench.check(clients)
        for plan in plans:
            bench.run(program, plan, clients)
        if program.selected(["dcp"]):
            tensors = SMALL_TENSORS // 10 if given.quick else SMALL_TENSORS
            small = partial(dcp.small, cheap.memory, tensors, given.rounds)
            run("dcp", small, partial(dcp.share, cheap.memory))
    if program.selected(["loop"]):
        scale = loop_during_upload.QUICK if given.quick else loop_during_upload.FULL
        with origin.running(loop_during_upload.LATENCY_MS) as far:
            far.fill([scale.family])
            loop = partial(loop_during_upload.measure, far.memory, scale, given.rounds)
            run("loop_during_upload", *(partial(loop, kind) for kind in loop_during_upload.KINDS))
    if program.selected(["nearest"]):
        with origin.running() as capped:
            capped.set(rate=nearest.CAP)
            restore = partial(nearest.measure, capped.memory, next(iter(states.values())), given.rounds)
            run("nearest", partial(restore, sharded=False), partial(restore, sharded=True))
    if program.selected(["blocking"]):
        run("blocking", partial(blocking.measure, next(iter(states.values())), given.rounds))
    program.finish()


if __name__ == "__main__":
    main()
