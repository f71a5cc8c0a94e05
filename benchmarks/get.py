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
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import LIMIT, OURS, Clients, Program, Rounds, Timed, Verdict, targets
from benchmarks.harness.transfers import MANY, ONE, read
from benchmarks.lab import limit, nginx, versitygw
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family, size_text, upload

SMALL = (Family(4 * KIB, 1024), Family(110 * KIB, 1024))
PARTS = Family(8 * MIB, 32)
LARGE = tuple(Family(mib * MIB, 1) for mib in (1, 4, 8, 16, 32, 64, 128, 512, 1024))
CLIENTS = (OURS, "obstore", "obstore by hand", "s3torchconnector", "boto3")
QUICK = ("many 4 KiB plain", "many 110 KiB plain", "many 110 KiB TLS", "one 16 MiB plain", "one 128 MiB")
ENDPOINTS = {"plain": nginx.PLAIN, "TLS": nginx.TLS, "limited": nginx.LIMITED}
# At 80 MiB/s per connection a larger object takes a second or more without showing more.
ONE_CONNECTION_MOST = 64 * MIB

# Case, client, the maximum of our CPU time as a multiple of theirs.
_CPU = {
    "many 4 KiB plain": {"obstore": 0.25, "s3torchconnector": 0.15, LIMIT: 2.5},
    "many 110 KiB plain": {"obstore": 0.3, "s3torchconnector": 0.2, LIMIT: 1.6},
    "many 110 KiB TLS": {"obstore": 0.5},
}
_FASTER = 3.0
_FASTER_FROM = 128 * MIB
# Memory that a GET may need in addition to the object.
_EXTRA_MIB = 64


@dataclass(frozen=True)
class Case:
    """What is read, from where, and by which client."""

    kind: str
    family: Family
    origin: str
    clients: Sequence[str]

    @property
    def label(self) -> str:
        return f"{self.kind} {size_text(self.family.size)} {self.origin}"

    @property
    def batch(self) -> int:
        return min(256, self.family.count) if self.kind == "many" else 0


def lab_cases() -> Iterator[Case]:
    everybody = list(CLIENTS)
    with_limit = [OURS, LIMIT, *everybody[1:]]
    yield from (Case("many", family, "plain", with_limit) for family in SMALL)
    yield from (Case("many", family, "TLS", everybody) for family in SMALL)
    yield Case("many", PARTS, "plain", with_limit)
    yield from (Case("one", family, "plain", everybody) for family in LARGE)
    for family in LARGE:
        alone = family.size > ONE_CONNECTION_MOST
        yield Case("one", family, "limited", [name for name in everybody if not (alone and name == "obstore")])
    yield from (Case("many", family, "versitygw", everybody) for family in SMALL)


def bucket_cases() -> Iterator[Case]:
    yield from (Case("many", family, "bucket", list(CLIENTS)) for family in (*SMALL, PARTS))
    yield from (Case("one", family, "bucket", list(CLIENTS)) for family in LARGE)


def verdicts(case: Case, done: Rounds) -> Iterator[Verdict]:
    """The targets of a case that was measured with our client."""
    if not done.has(OURS):
        return
    for rival, most in _CPU.get(case.label, {}).items():
        for name in filter(done.has, (rival, f"{rival} by hand")):
            yield targets.ratio(done, "CPU", "cpu_us", name, most=most, beyond=name != rival)
    if case.label in ("many 4 KiB plain", "many 110 KiB plain"):
        for name in filter(done.has, ("obstore", "obstore by hand")):
            yield targets.ratio(done, "objects/s", "rate", name, least=_FASTER, beyond=name != "obstore")
    if case.batch:
        return
    rivals = [name for name in done.runs if name != OURS]
    if case.origin == "limited" and "boto3" in rivals:
        yield targets.ratio(done, "MB/s", "rate", "boto3", least=2.0 if case.family.size >= _FASTER_FROM else 1.0)
    if case.origin == "plain" and rivals:
        rival = max(rivals, key=lambda name: done.spread("rate", name).median)
        target = f"{case.label}: MB/s >= the best rival"
        yield targets.bounded(target, done.ratio("rate", rival), 2, f"x of {rival}", least=1.0)
    yield targets.grows_by_object(done, case.family.size, _EXTRA_MIB)


def main() -> None:
    program = Program("get", __doc__, 5, ("a few cases, three short rounds", 3))
    url_help = "s3://bucket/prefix/ instead of the lab; credentials from the environment"
    program.parser.add_argument("--url", help=url_help)
    prepare_help = "write the objects to --url first, where missing"
    program.parser.add_argument("--prepare", action="store_true", help=prepare_help)
    given = program.start()
    every = list(bucket_cases() if given.url else lab_cases())
    cases = program.selected(every, lambda case: case.label, QUICK if given.quick and not given.url else ())
    with contextlib.ExitStack() as stack:
        pool, min_s = stack.enter_context(Clients("harness.rivals.objects")), 0.4 if given.quick else 1.0
        if given.url:
            program.name, location = "get-url", Location.from_url(given.url)
            if given.prepare:
                print(f"{upload(location, [*SMALL, PARTS, *LARGE])} objects written to {given.url}\n", flush=True)
            locations = {"bucket": location}
        else:
            chosen = {case.origin for case in cases}
            endpoints = {name: endpoint for name, endpoint in ENDPOINTS.items() if name in chosen}
            found = stack.enter_context(nginx.running([*SMALL, PARTS, *LARGE], endpoints.values()))
            locations = {name: found[endpoint] for name, endpoint in endpoints.items()}
            if "versitygw" in chosen:
                locations["versitygw"] = stack.enter_context(versitygw.running(SMALL))

        def measure(case: Case, client: str) -> Timed:
            location = locations[case.origin]
            if client == LIMIT:
                return limit.run(location, case.family, min_s)
            # One object is read repeatedly within a short time, at least once.
            job = partial(read, location, case.family, case.batch, min_s if case.batch else min_s / 4)
            found: Timed = pool.run(client, job)
            return found

        for case in cases:
            judged = partial(verdicts, case) if not given.url else lambda _: ()
            figures, run = MANY if case.batch else ONE, partial(measure, case)
            program.measure(Rounds(case.label), case.clients, run, figures, judged)
    program.finish()


if __name__ == "__main__":
    main()
