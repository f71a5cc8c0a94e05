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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import LIMIT, OURS, Clients, Program, Rounds, Verdict, targets, timed
from benchmarks.harness.rivals.listing import LISTERS
from benchmarks.lab import origin
from benchmarks.lab.keys import KeySet, digest, flat, nested
from benchmarks.lab.objects import MIB

_ARROW = "torchobj arrow"
_MOST_MIB = 48

#: Rounds of clients that need more than a minute.
_SLOW = {"boto3": 2, "s3fs": 2}


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


def verdicts(case: Rounds) -> Iterator[Verdict]:
    """The targets, which are those of the large set with a delay."""
    if "flat" not in case.label or "20 ms" not in case.label:
        return
    for ours in (OURS, _ARROW):
        yield targets.ratio(case, "keys/s", "rate", "boto3", least=20, ours=ours)
        yield targets.ratio(case, "keys/s", "rate", "obstore", least=6, ours=ours)
        yield targets.ratio(case, "CPU", "cpu_s", "boto3", most=1 / 20, ours=ours)
        yield targets.grows_at_most(case, _MOST_MIB, ours, f"{ours}: ")


def main() -> None:
    program = Program("list", __doc__, 5, ("40 000 keys and two rounds", 2))
    given = program.start()
    chosen = program.selected(list(cases(quick=given.quick)), lambda case: case.label)
    has_arro3 = importlib.util.find_spec("arro3") is not None
    clients = [name for name in LISTERS if has_arro3 or name != "obstore arrow"]
    figures = {"keys/s": ("rate", 0), "CPU s": ("cpu_s", 2), "s": ("wall_s", 2)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchobj-keys-")))
        pool = stack.enter_context(Clients("harness.rivals.listing"))
        files = {case.keys.name: case.keys.write(folder) for case in chosen}
        origins = {
            delay_ms: stack.enter_context(origin.running(delay_ms, list(files.values())))
            for delay_ms in {case.delay_ms for case in chosen}
        }

        def run(case: Case, client: str, *, verify: bool = False) -> Any:
            location, keys = origins[case.delay_ms].listed(case.keys.name), case.keys.keys
            job = {"count": len(keys), "expected": digest(keys) if verify else None, "verify": verify}
            return pool.run(f"list {client}", partial(timed, location, job, 64 * MIB))

        for case in chosen:
            # A round whose keys are compared.
            verified = Rounds(f"{case.label}, compared")
            listers = [name for name in clients if name not in (LIMIT, *given.without)]
            verified.take(listers, 1, partial(run, case, verify=True))
            done = Rounds(case.label, failed=verified.failed)
            program.measure(done, clients, partial(run, case), figures, verdicts, fewer=_SLOW)
    program.finish()


if __name__ == "__main__":
    main()
