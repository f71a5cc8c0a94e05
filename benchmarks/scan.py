"""How fast, and with how much CPU, is the metadata of every object read, compared with boto3, its threads, processes?

    python benchmarks/scan.py               # everything, some minutes
    python benchmarks/scan.py --quick       # 2000 objects, without the million: not for publication

Needs the extra `bench` and a C compiler. 20 000 objects are listed, and each is asked by HEAD, with a latency of 1 ms
of each response, as between the machines of one rack; the server is that of `list.py`. CPU time includes that of the
processes that a client starts. Every client adds up a number in the metadata, and the sums are compared. A case with a
million objects and no latency measures the memory of torchobj alone. Round after round, each run in its own process.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Rounds, Verdict, targets, timed
from benchmarks.harness.rivals.listing import SCANNERS
from benchmarks.lab import origin
from benchmarks.lab.keys import flat
from benchmarks.lab.objects import MIB

_PROCESSES, _NAIVE = "boto3 processes", "boto3"
_MOST_MIB = 64


def verdicts(case: Rounds) -> Iterator[Verdict]:
    """The targets of a case."""
    if "no latency" in case.label:
        yield targets.grows_at_most(case, _MOST_MIB)
        return
    yield targets.ratio(case, "objects/s", "rate", _PROCESSES, least=15)
    yield targets.ratio(case, "objects/s", "rate", _NAIVE, least=100)
    yield targets.ratio(case, "CPU", "cpu_s", _PROCESSES, most=1 / 10)


def main() -> None:
    program = Program("scan", __doc__, 5, ("2000 objects and two rounds, without the million", 2), only="")
    given = program.start()
    count = 2000 if given.quick else 20_000
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchobj-keys-")))
        pool = stack.enter_context(Clients("harness.rivals.listing"))

        def measure(label: str, name: str, number: int, delay_ms: int, names: list[str]) -> None:
            """Lists `number` objects of the bucket `name`, and asks for each."""
            keys = flat(number, name)
            location = stack.enter_context(origin.running(delay_ms, [keys.write(folder)])).listed(name)
            expected = None
            if delay_ms:
                location.enter()
                reference = SCANNERS["boto3 threads"](location, count=number)
                reference.run()
                expected = reference.found[1]
            job = partial(timed, location, {"count": number, "expected": expected}, 64 * MIB)
            figures = {"objects/s": ("rate", 0), "CPU s": ("cpu_s", 2), "s": ("wall_s", 2)}
            fewer = {_NAIVE: 2} if delay_ms else {OURS: 2}
            program.measure(
                Rounds(label), names, lambda client: pool.run(f"scan {client}", job), figures, verdicts, fewer=fewer
            )

        measure(f"{count} objects, 1 ms", "objects", count, 1, list(SCANNERS))
        if not given.quick:
            measure("1000000 objects, no latency", "million", 1_000_000, 0, [OURS])
    program.finish()


if __name__ == "__main__":
    main()
