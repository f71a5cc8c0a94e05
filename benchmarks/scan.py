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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import scan_rivals, timed
from benchmarks.keys import flat
from benchmarks.lab import origin
from benchmarks.program import Program
from benchmarks.ratio_target import Target, at_most
from benchmarks.report import OURS, Verdict
from benchmarks.timed import Timed, TimedRounds

_PROCESSES, _NAIVE = "boto3 processes", "boto3"
_MOST_MIB = 64


def verdicts(case: TimedRounds, ours: str) -> Iterator[Verdict]:
    """The targets of a case."""
    if "no latency" in case.label:
        yield at_most(f"{case.label}: growth of RSS", case.grown_mib(ours) if case.runs else None, _MOST_MIB, "MiB")
        return
    yield Target("objects/s", _PROCESSES, 15, least=True, ours=ours).verdict(case, Timed.rate)
    yield Target("objects/s", _NAIVE, 100, least=True, ours=ours).verdict(case, Timed.rate)
    yield Target("CPU", _PROCESSES, 1 / 10, ours=ours).verdict(case, Timed.cpu_seconds)


def main() -> None:
    import torchobj

    program = Program(__doc__, 5, ("2000 objects and two rounds, without the million", 2))
    given = program.start()
    count = 2000 if given.quick else 20_000
    has_scan = hasattr(torchobj.Store, "scan")
    ours = OURS if has_scan else "torchobj head"
    clients = [name for name in scan_rivals.CLIENTS if name not in given.without and (has_scan or name != OURS)]
    figures = [("objects/s", Timed.rate, 0), ("CPU s", Timed.cpu_seconds, 2), ("s", Timed.seconds, 2)]
    done = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchobj-keys-")))
        pool = timed.Clients("scan_rivals")
        stack.callback(pool.close)
        keys = flat(count, "objects")
        far = stack.enter_context(origin.running(1, [keys.write(folder)])).listed(keys.name)
        labels = scan_rivals.Boto3Threads(far, count, None)
        far.enter()
        labels.run()
        job = {"count": count, "labels": labels._found[1]}
        case = TimedRounds(f"{count} objects, 1 ms")
        timed.in_turn(clients, given.rounds, lambda name: pool.run(name, far, job), case.runs, case.failed, (_NAIVE,))
        done.append(case)
        print(timed.table(case, figures, ours), "", sep="\n", flush=True)
        if not given.quick and has_scan:
            million = flat(1_000_000, "million")
            near = stack.enter_context(origin.running(0, [million.write(folder)])).listed(million.name)
            case = TimedRounds("1000000 objects, no latency")
            job = {"count": 1_000_000, "labels": None}
            timed.in_turn([ours], 2, lambda name: pool.run(name, near, job), case.runs, case.failed)
            done.append(case)
            print(timed.table(case, figures, ours), "", sep="\n", flush=True)
    found = [verdict for case in done for verdict in verdicts(case, ours)]
    program.finish("scan", found, {"cases": [timed.fields(case) for case in done]})


if __name__ == "__main__":
    main()
