"""How fast, with how much CPU and how much memory, is a checkpoint saved to S3 and loaded, compared with other clients?

    python benchmarks/checkpoint.py                          # everything, about half an hour
    python benchmarks/checkpoint.py --only "512 MiB, origin" # the cases whose label has these words
    python benchmarks/checkpoint.py --only dcp               # distributed checkpoints
    python benchmarks/checkpoint.py --only loop              # a training loop beside an upload
    python benchmarks/checkpoint.py --only blocking          # how long save_async blocks the loop
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
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import blocking, dcp, loop_during_upload
from benchmarks.harness import OURS, Clients, Program, Rounds, Timed, Verdict, targets
from benchmarks.harness.rivals.checkpoint import CLIENTS
from benchmarks.harness.states import States, prepare, saving
from benchmarks.harness.transfers import FIGURES
from benchmarks.lab import origin, versitygw
from benchmarks.lab.location import Location

RIVAL = "s3torchconnector"
STATES = {
    "512 MiB": States.of_mib(512),
    "2 GiB": States.of_mib(2048),
    "10k small tensors": States.of_tensors(10_000),
}
QUICK_STATES = {"128 MiB": States.of_mib(128), "1k small tensors": States.of_tensors(1000)}
SMALL_TENSORS = 10_000
# Forty seconds for 512 MiB, at 55 CPU-s per GB: its case is the save.
LOADS_NOTHING = ("multi-storage-client in Rust",)
_LIMIT_S = 300.0
_CPU = 0.4
# Minimum MB/s as a multiple of the rival's, per action and location.
_RATES = {
    ("save", "origin"): 1.5,
    ("save", "versitygw"): 1.0,
    ("load", "origin"): 4.0,
    ("load", "versitygw"): 2.5,
}
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
        self._pool = self.enter_context(Clients("harness.rivals.checkpoint", _LIMIT_S))
        self._prepared = cache(self._prepare)

    def _prepare(self, server: str, name: str) -> str:
        """Writes the objects to load, and the one to warm up with; returns the key."""
        states = self._states[name]
        key = f"load-{states.payload_bytes}.pt"
        prepare(self._pool, self._servers[server][1], states, key)
        return key

    def check(self, client: str) -> None:
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

    def measure(self, plan: Plan, client: str) -> Timed:
        (saved, loaded), states = self._servers[plan.location], self._states[plan.states]
        if plan.action == "load":
            key = self._prepared(plan.location, plan.states)
            return self._pool.run(client, saving("load", loaded, states, key))
        key = f"save-{client.replace(' ', '-')}.pt"
        try:
            return self._pool.run(client, saving("save", saved, states, key))
        finally:
            if plan.location == "versitygw":
                _delete(saved, key)


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


def _checked(bench: Bench, client: str) -> bool:
    """Returns whether a client can be measured; prints the reason if not. Ours must work."""
    try:
        bench.check(client)
    except RuntimeError as error:
        if client == OURS:
            raise
        print(f"{client} is left out: {str(error).strip()}\n", flush=True)
        return False
    return True


def main() -> None:
    program = Program("checkpoint", __doc__, 3, ("small states, one round, two clients", 1))
    given = program.start()
    states = QUICK_STATES if given.quick else STATES
    every = itertools.product(states, ("origin", "versitygw"), ("save", "load"))
    plans = program.selected([Plan(action, name, location) for name, location, action in every], Plan.label)
    clients = [name for name in ([OURS, RIVAL] if given.quick else CLIENTS) if name not in given.without]

    calls, phases, stops = [], [], []
    with contextlib.ExitStack() as stack:
        cheap, real = stack.enter_context(origin.running()), stack.enter_context(versitygw.running([]))
        servers = {"origin": (cheap.discard, cheap.memory), "versitygw": (real, real)}
        bench = stack.enter_context(Bench(servers, states))
        if plans:
            clients[:] = [client for client in clients if _checked(bench, client)]
            print(f"saved to versitygw, loaded and compared: {', '.join(clients)}\n", flush=True)
        for plan in plans:
            case, names = Rounds(plan.label()), clients
            if plan.action == "load":
                names = [name for name in clients if name not in LOADS_NOTHING]
            more = {"of the payload": case.spreads("grown_share", 2, "x"), "requests": case.medians("requests", 0)}
            # Clients without a target run fewer rounds.
            others = [] if plan.states == next(iter(states)) else [name for name in names if name not in (OURS, RIVAL)]
            fewer, run = dict.fromkeys(others, 1), partial(bench.measure, plan)
            program.measure(case, names, run, FIGURES, verdicts, more=more, fewer=fewer, rotated=False)
        if program.selected(["dcp"]):
            tensors = SMALL_TENSORS // 10 if given.quick else SMALL_TENSORS
            calls, share = dcp.run(cheap.memory, tensors, given.rounds)
            program.judge([*(verdict for each in calls for verdict in each.verdicts()), share])
    if program.selected(["loop"]):
        scale = loop_during_upload.QUICK if given.quick else loop_during_upload.FULL
        with origin.running(loop_during_upload.LATENCY_MS) as far:
            phases = loop_during_upload.run(far.memory, scale, given.rounds)
        print(*(each.shown() for each in phases), "", sep="\n", flush=True)
        program.judge(each.verdict() for each in phases)
    if program.selected(["blocking"]):
        stops = [blocking.run(next(iter(states.values())), given.rounds)]
        print(*(each.shown() for each in stops), "", sep="\n", flush=True)
        program.judge(stops[0].verdicts())
    content = {
        "dcp": [each.fields() for each in calls],
        "loops": [each.fields() for each in phases],
        "blocking": [each.fields() for each in stops],
    }
    program.finish(content)


if __name__ == "__main__":
    main()
