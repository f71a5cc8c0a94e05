"""How fast, with how much CPU and how much memory, is a checkpoint saved to S3 and loaded, compared with other clients?

    python benchmarks/checkpoint.py                          # everything, about half an hour
    python benchmarks/checkpoint.py --only "512 MiB, origin" # the cases whose label has these words
    python benchmarks/checkpoint.py --only dcp               # distributed checkpoints
    python benchmarks/checkpoint.py --only loop              # a training loop beside an upload
    python benchmarks/checkpoint.py --only blocking          # how long save_async blocks the loop
    python benchmarks/checkpoint.py --quick                  # a preview, under two minutes: not for publication

Needs the extra `bench`, a C compiler for the origin, and pip for the rivals that cannot be in one environment with
others. A state dict is saved or loaded by one client after the other, round after round; each run is a process of its
own. CPU and memory are those of the client's process; the server runs on the same machine, as may other processes.
Every loaded byte is compared. Before the measurement, what each client saves is loaded from versitygw by itself and by
the stock torch.load. One bucket of the origin discards what is saved, the other serves from memory what is loaded.
MB and GB are of the tensors, and decimal.
"""

import argparse
import contextlib
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import beside, blocking, checkpoint_report, checkpoint_targets, dcp
from benchmarks.checkpoint_measure import Case, Job, Savers
from benchmarks.checkpoint_rivals import CLIENTS, needs_packages
from benchmarks.checkpoint_targets import RIVAL
from benchmarks.lab import origin, packages, versitygw
from benchmarks.lab.location import Location
from benchmarks.program import Program
from benchmarks.report import OURS
from benchmarks.states import States

STATES = {
    "512 MiB": States.of_mib(512),
    "2 GiB": States.of_mib(2048),
    "10k small tensors": States.of_tensors(10_000),
}
QUICK_STATES = {"128 MiB": States.of_mib(128), "1k small tensors": States.of_tensors(1000)}
SMALL_TENSORS = 10_000
# Forty seconds for 512 MiB, at 55 CPU-s per GB: its case is the save.
LOADS_NOTHING = ("multi-storage-client in Rust",)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A case to measure."""

    action: str
    states: str
    location: str

    @property
    def label(self) -> str:
        return f"{self.action} {self.states}, {self.location}"


@dataclasses.dataclass(frozen=True)
class Server:
    """Where states are saved and loaded."""

    save: Location
    load: Location
    counts: bool


class Bench:
    """Runs cases."""

    def __init__(self, servers: dict[str, Server], states: dict[str, States], clients: Sequence[str]) -> None:
        self._servers, self._states, self._clients = servers, states, clients
        self._savers = Savers()
        self._prepared: set[tuple[str, str]] = set()

    def close(self) -> None:
        self._savers.close()

    def _prepare(self, server: str, name: str) -> None:
        """Writes the objects to load, once."""
        if (server, name) not in self._prepared:
            states = self._states[name]
            self._savers.prepare(self._servers[server].load, states, _key(states))
            self._prepared.add((server, name))

    def check(self, client: str) -> None:
        """Saves large and small tensors to a real server and loads them, also with the stock torch.load.

        Raises:
            RuntimeError: What was loaded is not what was saved, or the client failed.
        """
        location, key = self._servers["versitygw"].save, f"check-{client.replace(' ', '-')}.pt"
        large, *_, small = self._states
        for name in (large, small):
            states = self._states[name]
            # An object to warm up with.
            self._prepare("versitygw", name)
            self._savers.run(client, Job("save", location, states, key))
            for reader in dict.fromkeys([client, "boto3"]):
                if reader not in LOADS_NOTHING:
                    self._savers.run(reader, Job("load", location, states, key))
            _delete(location, key)

    def _job(self, client: str, plan: Plan) -> Job:
        server, states = self._servers[plan.location], self._states[plan.states]
        if plan.action == "save":
            key = f"save-{client.replace(' ', '-')}.pt"
            return Job("save", server.save, states, key, server.counts)
        self._prepare(plan.location, plan.states)
        return Job("load", server.load, states, _key(states), server.counts)

    def run(self, plan: Plan, rounds: int) -> Case:
        """Runs all rounds of a case: A B C A B C. Clients without a target run fewer rounds."""
        case, first = Case(plan.label, plan.action), next(iter(self._states))
        for number, client in itertools.product(range(rounds), self._clients):
            aimed = client in (OURS, RIVAL)
            if client in case.failed or (number and not aimed and plan.states != first):
                continue
            if plan.action == "load" and client in LOADS_NOTHING:
                continue
            job = self._job(client, plan)
            try:
                case.runs.setdefault(client, []).append(self._savers.run(client, job))
            except RuntimeError as error:
                case.failed[client] = str(error).strip().splitlines()[-1]
                case.runs.pop(client, None)
            if plan.action == "save" and plan.location == "versitygw":
                _delete(job.location, job.key)
        return case


def _key(states: States) -> str:
    return f"load-{states.payload_bytes}.pt"


def _delete(location: Location, key: str) -> None:
    """Deletes a saved object, to limit disk use."""
    import torchobj

    location.enter()
    config = torchobj.StoreConfig(s3=torchobj.S3Options(endpoint_url=location.endpoint_url, region=location.region))
    torchobj.Store(f"s3://{location.bucket}", config=config).delete(key)


@contextlib.contextmanager
def servers() -> Iterator[dict[str, Server]]:
    """The locations of the lab."""
    with origin.running() as cheap, versitygw.running([]) as real:
        yield {
            "origin": Server(cheap.discard, cheap.memory, counts=True),
            "versitygw": Server(real, real, counts=False),
        }


def _clients(given: argparse.Namespace) -> list[str]:
    """The clients to measure."""
    chosen = [OURS, RIVAL] if given.quick else list(CLIENTS)
    chosen = [name for name in chosen if name not in given.without]
    if any(map(needs_packages, chosen)):
        try:
            packages.install()
        except subprocess.CalledProcessError as error:
            print(f"left out, since pip failed ({error.returncode}): {', '.join(packages.REQUIREMENTS)}\n", flush=True)
            chosen = [name for name in chosen if not needs_packages(name)]
    return chosen


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
    program = Program(__doc__, 3, ("small states, one round, two clients", 1)).has_cases()
    given = program.start()
    rounds = given.rounds

    def wanted(label: str) -> bool:
        return bool(program.selected([label], str))

    states = QUICK_STATES if given.quick else STATES
    every = itertools.product(states, ("origin", "versitygw"), ("save", "load"))
    plans = [plan for name, location, action in every if wanted((plan := Plan(action, name, location)).label)]
    clients = _clients(given) if plans else []
    if any(map(needs_packages, clients)):
        program.about["packages"] |= packages.versions()

    cases, calls, share, phases, stops = [], [], None, [], []
    with contextlib.ExitStack() as stack:
        locations = stack.enter_context(servers())
        bench = Bench(locations, states, clients)
        stack.callback(bench.close)
        if plans:
            clients[:] = [client for client in clients if _checked(bench, client)]
            print(f"saved to versitygw, loaded and compared: {', '.join(clients)}\n", flush=True)
        for plan in plans:
            cases.append(bench.run(plan, rounds))
            print(checkpoint_report.table(cases[-1]), "", sep="\n", flush=True)
        if wanted("dcp"):
            measuring = stack.enter_context(contextlib.closing(dcp.Measuring(locations["origin"].load)))
            calls = measuring.small(SMALL_TENSORS // 10 if given.quick else SMALL_TENSORS, rounds)
            print(*map(checkpoint_report.calls_table, calls), "", sep="\n", flush=True)
            share = measuring.share()
    if wanted("loop"):
        with origin.running(beside.LATENCY_MS) as far:
            phases = beside.run(far.memory, beside.QUICK if given.quick else beside.FULL, rounds)
        print(*map(checkpoint_report.phases_table, phases), "", sep="\n", flush=True)
    if wanted("blocking"):
        stops = [blocking.run(next(iter(states.values())), rounds)]
        print(*map(checkpoint_report.stops_table, stops), "", sep="\n", flush=True)
    verdicts = checkpoint_targets.verdicts(cases, calls, share, phases, stops)
    content: dict[str, Any] = {
        "cases": [dataclasses.asdict(case) for case in cases],
        "dcp": [dataclasses.asdict(each) for each in calls],
        "share": dataclasses.asdict(share) if share is not None else None,
        "loops": [dataclasses.asdict(each) for each in phases],
        "blocking": [dataclasses.asdict(each) for each in stops],
    }
    program.finish("checkpoint", verdicts, content)


if __name__ == "__main__":
    main()
