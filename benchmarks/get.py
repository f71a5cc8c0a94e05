"""How much CPU and time does a GET cost, for many small objects and for a large one, compared with other clients?

    python benchmarks/get.py                           # everything, about ten minutes
    python benchmarks/get.py --quick                   # a preview, about a minute
    python benchmarks/get.py --only "many 110 KiB"     # the cases whose label has these words
    python benchmarks/get.py --url s3://bucket/prefix/ --prepare      # a real bucket; writes 2.5 GiB to it first

Needs the extra `bench`, and for the lab nginx with its lua module and, for the bare limit, cargo. A case is read by one
client after the other, round after round; each run is its own process. Figures are those of the client's process; the
server runs on the same machine, as may other processes.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report, targets
from benchmarks.fork_server import ForkServer
from benchmarks.lab import limit, nginx, versitygw
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family, size_text
from benchmarks.lab.prepare import upload
from benchmarks.measure import Job, Measured, run
from benchmarks.program import Program
from benchmarks.report import LIMIT, OURS, Outcome
from benchmarks.rivals import CLIENTS

SMALL = (Family(4 * KIB, 1024), Family(110 * KIB, 1024))
PARTS = Family(8 * MIB, 32)
LARGE = tuple(Family(mib * MIB, 1) for mib in (1, 4, 8, 16, 32, 64, 128, 512, 1024))
QUICK = ("many 4 KiB plain", "many 110 KiB plain", "many 110 KiB TLS", "one 16 MiB plain", "one 128 MiB")
# At 80 MiB/s per connection a larger object takes a second or more without showing more.
ONE_CONNECTION_MOST = 64 * MIB


@dataclass(frozen=True)
class Case:
    """What is read, from where, and by which client."""

    kind: str
    family: Family
    batch: int
    origin: str
    clients: Sequence[str]

    @property
    def label(self) -> str:
        return f"{self.kind} {size_text(self.family.size)} {self.origin}"


def lab_cases() -> Iterator[Case]:
    everybody = list(CLIENTS)
    for family in SMALL:
        yield Case("many", family, 256, "plain", [OURS, LIMIT, *everybody[1:]])
    for family in SMALL:
        yield Case("many", family, 256, "TLS", everybody)
    yield Case("many", PARTS, 32, "plain", [OURS, LIMIT, *everybody[1:]])
    for family in LARGE:
        yield Case("one", family, 0, "plain", everybody)
    for family in LARGE:
        alone = family.size > ONE_CONNECTION_MOST
        yield Case("one", family, 0, "limited", [name for name in everybody if not (alone and name == "obstore")])
    for family in SMALL:
        yield Case("many", family, 256, "versitygw", everybody)


def bucket_cases() -> Iterator[Case]:
    for family in (*SMALL, PARTS):
        yield Case("many", family, min(256, family.count), "bucket", list(CLIENTS))
    for family in LARGE:
        yield Case("one", family, 0, "bucket", list(CLIENTS))


@contextlib.contextmanager
def origins(cases: Sequence[Case]) -> Iterator[dict[str, Location]]:
    """Starts the locations of the lab that `cases` need."""
    endpoints = {"plain": nginx.PLAIN, "TLS": nginx.TLS, "limited": nginx.LIMITED}
    wanted = {case.origin for case in cases}
    with contextlib.ExitStack() as stack:
        locations = {}
        chosen = {name: endpoint for name, endpoint in endpoints.items() if name in wanted}
        if chosen:
            found = stack.enter_context(nginx.running([*SMALL, PARTS, *LARGE], list(chosen.values())))
            locations |= {name: found[endpoint] for name, endpoint in chosen.items()}
        if "versitygw" in wanted:
            locations["versitygw"] = stack.enter_context(versitygw.running(SMALL))
        yield locations


class Bench:
    """Runs cases on a fork server per client."""

    def __init__(self, rounds: int, min_s: float) -> None:
        self._rounds = rounds
        self._min_s = min_s
        self._fork_servers: dict[str, ForkServer] = {}
        self._limit: Path | None = None

    def close(self) -> None:
        for fork_server in self._fork_servers.values():
            fork_server.close()

    def _measure(self, client: str, case: Case, location: Location) -> Measured:
        if client == LIMIT:
            self._limit = self._limit or limit.build()
            return limit.run(self._limit, location, case.family, self._min_s)
        if client not in self._fork_servers:
            self._fork_servers[client] = ForkServer("benchmarks.measure", client)
        # One object is read repeatedly within a short time, at least once.
        min_s = self._min_s if case.batch else self._min_s / 4
        return run(self._fork_servers[client], Job(location, case.family, case.batch, min_s))

    def run(self, case: Case, location: Location, without: Sequence[str]) -> Outcome:
        """Runs all rounds of a case: A B C A B C."""
        outcome = Outcome(case.label, case.family.size, case.batch)
        clients = [client for client in case.clients if client not in without]
        for _, client in itertools.product(range(self._rounds), clients):
            outcome.runs.setdefault(client, []).append(self._measure(client, case, location))
        return outcome


def main() -> None:
    program = Program(__doc__, 5, ("a few cases, three short rounds", 3)).has_cases()
    program.parser.add_argument(
        "--url", help="s3://bucket/prefix/ instead of the lab; credentials from the environment"
    )
    program.parser.add_argument(
        "--prepare", action="store_true", help="write the objects to --url first, where missing"
    )
    given = program.start()
    every = list(bucket_cases() if given.url else lab_cases())
    cases = program.selected(every, lambda case: case.label, QUICK if given.quick and not given.url else ())
    bench = Bench(given.rounds, 0.4 if given.quick else 1.0)
    outcomes = []
    with contextlib.ExitStack() as stack:
        stack.callback(bench.close)
        if given.url:
            location = Location.from_url(given.url)
            if given.prepare:
                print(f"{upload(location, [*SMALL, PARTS, *LARGE])} objects written to {given.url}\n", flush=True)
            locations = {"bucket": location}
        else:
            locations = stack.enter_context(origins(cases))
        for case in cases:
            outcomes.append(bench.run(case, locations[case.origin], given.without))
            print(report.table(outcomes[-1]), "", sep="\n", flush=True)
    verdicts = [] if given.url else targets.verdicts(outcomes)
    content = {"cases": [report.fields(outcome) for outcome in outcomes]}
    program.finish("get-url" if given.url else "get", verdicts, content)


if __name__ == "__main__":
    main()
