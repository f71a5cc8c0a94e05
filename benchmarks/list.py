"""How fast, and with how much CPU and memory, are 400 000 keys listed, compared with boto3, s3fs and obstore?

    python benchmarks/list.py                   # everything, half an hour
    python benchmarks/list.py --quick           # 40 000 keys, a few minutes: not for publication
    python benchmarks/list.py --only "flat"     # the cases whose label has these words

Needs the extra `bench`, pyarrow, arro3-core for obstore's Arrow form, and a C compiler. The server is `lab/origin.c`,
because nginx cannot answer listings, and real servers on this machine need longer for a page than the network of a
cloud: it renders the entries of all keys at its start, in the form of S3, so that a page is a copy. Each page is
delayed by 20 ms on its own connection, which delays no other; a case without delay shows the cost of the clients.
"bare limit" fetches the same pages with 64 connections and parses nothing: if we come close to it, the origin is the
limit. Each client first lists all keys once, which are compared. Round after round, each run in its own process.
"""

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import list_rivals, timed
from benchmarks.keys import KeySet, flat, nested
from benchmarks.lab import origin
from benchmarks.program import Program
from benchmarks.ratio_target import Target, at_most
from benchmarks.report import LIMIT, OURS, Verdict
from benchmarks.timed import Timed, TimedRounds

_ARROW = "torchobj arrow"
_MOST_MIB = 48

#: Clients that need more than a minute.
_SLOW = ("boto3", "s3fs")


@dataclass(frozen=True)
class Case:
    """What is listed."""

    keys: KeySet
    delay_ms: int

    @property
    def label(self) -> str:
        count = f"{len(self.keys.keys):,}".replace(",", " ")
        return f"{self.keys.name}, {count} keys, {self.delay_ms} ms a page"


def cases(*, quick: bool) -> Iterator[Case]:
    """Yields all cases."""
    count = 40_000 if quick else 400_000
    large, tree = flat(count), nested(count)
    yield Case(large, 20)
    yield Case(tree, 20)
    yield Case(flat(10_000, "small"), 20)
    yield Case(large, 0)


def verdicts(case: TimedRounds) -> Iterator[Verdict]:
    """The targets, which are those of the large set with a delay."""
    if "flat" not in case.label or "20 ms" not in case.label:
        return
    for ours in (OURS, _ARROW):
        yield Target("keys/s", "boto3", 20, least=True, ours=ours).verdict(case, Timed.rate)
        yield Target("keys/s", "obstore", 6, least=True, ours=ours).verdict(case, Timed.rate)
        yield Target("CPU", "boto3", 1 / 20, ours=ours).verdict(case, Timed.cpu_seconds)
        grown = case.grown_mib(ours) if ours in case.runs else None
        yield at_most(f"{case.label}: {ours}: growth of RSS", grown, _MOST_MIB, "MiB")


def _clients(without: Sequence[str]) -> list[str]:
    import torchobj

    names = [name for name in list_rivals.CLIENTS if name not in without]
    listing = torchobj.Store("memory://forms").list()
    missing = [] if hasattr(listing, "to_arrow") else [_ARROW]
    if importlib.util.find_spec("arro3") is None:
        missing.append("obstore arrow")
    if "ordered" not in (torchobj.Store.list.__kwdefaults__ or {}):
        missing.append("torchobj unordered")
    return [name for name in names if name not in missing]


def run(case: Case, clients: Sequence[str], rounds: int, found: origin.Origin, pool: timed.Clients) -> TimedRounds:
    """Runs all rounds of a case, after a round whose keys are compared."""
    done = TimedRounds(case.label)
    location = found.listed(case.keys.name)
    verified = case.keys.job(verify=True)
    timed.in_turn([name for name in clients if name != LIMIT], 1, lambda name: pool.run(name, location, verified), {},
                  done.failed)  # fmt: skip
    job = case.keys.job()
    timed.in_turn(clients, rounds, lambda name: pool.run(name, location, job), done.runs, done.failed, _SLOW)
    return done


def main() -> None:
    program = Program(__doc__, 5, ("40 000 keys and two rounds", 2)).has_cases()
    given = program.start()
    chosen = program.selected(list(cases(quick=given.quick)), lambda case: case.label)
    clients = _clients(given.without)
    done = []
    figures = [("keys/s", Timed.rate, 0), ("CPU s", Timed.cpu_seconds, 2), ("s", Timed.seconds, 2)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchobj-keys-")))
        pool = timed.Clients("list_rivals")
        stack.callback(pool.close)
        files = {case.keys.name: case.keys.write(folder) for case in chosen}
        origins = {
            delay_ms: stack.enter_context(origin.running(delay_ms, list(files.values())))
            for delay_ms in {case.delay_ms for case in chosen}
        }
        for case in chosen:
            done.append(run(case, clients, given.rounds, origins[case.delay_ms], pool))
            print(timed.table(done[-1], figures), "", sep="\n", flush=True)
    found = [verdict for case in done for verdict in verdicts(case)]
    program.finish("list", found, {"cases": [timed.fields(case) for case in done]})


if __name__ == "__main__":
    main()
