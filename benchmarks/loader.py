"""How fast is a trainer fed with shuffled small objects, and how long does it wait, compared with other loaders?

    python benchmarks/loader.py                            # everything, about twelve minutes
    python benchmarks/loader.py --only "tail, 4 workers"   # the cases whose label has these words
    python benchmarks/loader.py --rounds 1 --objects 1024  # a preview: not for publication

Needs the extra `bench` and nginx with its lua module. Each run is a training loop in its own process, with its
workers; the order is one seeded permutation, the batch 64, and every byte reaches the trainer as uint8. There is no
transform, except in two kinds of cases: the samples of "tensor" are tensors, which the default collation stacks; those
of "jpeg" are decoded photos. "1st epoch" is the rate of the first epoch, after its first batch, beside that of later
ones. Batches are verified: the number of bytes, the objects, and one object of each batch byte for byte. CPU time and
memory are those of the trainer and its workers; the server runs on the same machine.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import loader_targets, report
from benchmarks.feeds import Plan
from benchmarks.lab import nginx, versitygw
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family
from benchmarks.lab.photos import DECODERS, photos
from benchmarks.loader_targets import FLAT, RAM
from benchmarks.loop import Job, Loops, Run
from benchmarks.program import Program
from benchmarks.report import OURS, Rounds

BATCH = 64
PHOTOS = 1024
ENDPOINTS = {"no latency": nginx.PLAIN, "20 ms": nginx.LATENCY, "tail": nginx.TAIL}
SLOW = ("s3torchconnector", "boto3", "litData")
_STEADY_S = 1.0


@dataclass(frozen=True)
class Entry:
    """One client of a case."""

    name: str
    feed: str
    job: Job
    once: bool = False
    """Only in the first round: no target depends on it."""


@dataclass
class Loop(Rounds):
    """All rounds of one case."""

    label: str
    kind: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    step_s: dict[str, float] = field(default_factory=dict)
    grown_mib: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """What is measured, and where."""

    kind: str
    endpoint: str
    workers: int

    @property
    def label(self) -> str:
        return f"{self.kind}, {self.endpoint}, {self.workers} workers"


CASES = [
    *(Case("rate", endpoint, workers) for endpoint in ENDPOINTS for workers in (0, 1, 2, 4)),
    Case("rate", "versitygw", 4),
    *(Case("tensor", endpoint, workers) for endpoint in ENDPOINTS for workers in (1, 4)),
    *(Case(f"jpeg {decoder}", endpoint, 2) for decoder in DECODERS for endpoint in ("no latency", "20 ms")),
    Case("spawned rate", "20 ms", 2),
    *(Case("half-speed trainer", endpoint, 4) for endpoint in ("20 ms", "tail")),
    Case("epoch gap at full speed", "20 ms", 4),
    Case("memory", "20 ms", 2),
]


class Bench:
    """Runs cases."""

    def __init__(self, locations: dict[str, Location], objects: int, rounds: int, without: Sequence[str]) -> None:
        self._locations, self._objects, self._rounds, self._without = locations, objects, rounds, without
        self._loops = Loops()
        self._done: dict[Case, Loop] = {}

    def close(self) -> None:
        self._loops.close()

    def _job(self, case: Case, feed: str, most: int | None = None, **more: Any) -> Job:
        """Returns a feed's job: fast feeds run epochs, slow ones as many objects as a few seconds allow."""
        each_worker = max(1, case.workers)
        delayed = case.endpoint in ("20 ms", "tail")
        if feed in SLOW:
            objects, min_s = (256 if delayed else 512) * each_worker, 0.0
        elif feed == "getitems" and delayed:
            objects, min_s = 1024 * each_worker, 0.1
        else:
            objects, min_s = self._objects, _STEADY_S
        # A worker has at least one batch after its first.
        count = max(2 * BATCH * each_worker, min(objects, self._objects, most or self._objects))
        family = Family(110 * KIB, count) if more.get("decoder") is None else photos(min(PHOTOS, count))
        plan_names = {each.name for each in dataclasses.fields(Plan)}
        plan = {name: value for name, value in more.items() if name in plan_names}
        rest = {"min_s": min_s} | {name: value for name, value in more.items() if name not in plan_names}
        return Job(Plan(self._locations[case.endpoint], family, BATCH, case.workers, **plan), **rest)

    def _entries(self, case: Case) -> Iterator[Entry]:
        if case.kind == "rate":
            # Feeds with a target run in all rounds.
            aimed = case.workers in (1, 4)
            yield Entry(OURS, OURS, self._job(case, OURS), once=not aimed)
            if aimed:
                yield Entry(FLAT, FLAT, self._job(case, FLAT))
            yield Entry("getitems", "getitems", self._job(case, "getitems"), once=not aimed)
            slow = "s3torchconnector"
            yield Entry(slow, slow, self._job(case, slow), once=not aimed or case.endpoint != "20 ms")
            yield Entry("boto3", "boto3", self._job(case, "boto3"), once=True)
            if case.endpoint == "versitygw":
                yield Entry("litData", "litData", self._job(case, "litData"), once=True)
        elif case.kind == "tensor":
            yield from self._tensor_entries(case)
        elif case.kind.startswith("jpeg"):
            for feed in (OURS, RAM, "getitems", "s3torchconnector"):
                job = self._job(case, feed, decoder=case.kind.removeprefix("jpeg "))
                yield Entry(feed, f"{feed}, photos", job, once=feed not in (OURS, RAM))
        elif case.kind == "half-speed trainer":
            ours, theirs = (self._half_speed_s(case, feed) for feed in (OURS, "getitems"))
            long = {"elastic": True, "min_s": 3 * _STEADY_S, "step_s": ours}
            yield Entry(OURS, OURS, self._job(case, OURS, **long))
            without = self._job(case, OURS, most=2048, **long | {"lookahead": 0, "min_s": 0.1})
            yield Entry(loader_targets.WITHOUT, OURS, without)
            yield Entry("getitems", "getitems", self._job(case, "getitems", most=1024, step_s=theirs))
            extra_fields = self._job(case, "getitems", most=1024, step_s=ours)
            yield Entry("getitems, our trainer", "getitems", extra_fields)
        elif case.kind == "epoch gap at full speed":
            yield Entry(OURS, OURS, self._job(case, OURS, elastic=True))
            yield Entry("getitems", "getitems", self._job(case, "getitems"), once=True)
        else:
            more = {"memory": True} if case.kind == "memory" else {"context": "spawn"}
            for feed in (OURS, "getitems", "s3torchconnector"):
                yield Entry(feed, feed, self._job(case, feed, **more), once=True)

    def _tensor_entries(self, case: Case) -> Iterator[Entry]:
        tensors, slow = "torchobj, tensors", "s3torchconnector"
        yield Entry(OURS, tensors, self._job(case, tensors))
        if case.endpoint == "no latency":
            yield Entry(RAM, RAM, self._job(case, RAM))
        yield Entry("getitems", "getitems", self._job(case, "getitems"))
        yield Entry(slow, slow, self._job(case, slow), once=True)

    def _half_speed_s(self, case: Case, feed: str) -> float:
        """Returns the step time at which a trainer runs at half of the feed's rate without one."""
        rate = Case("rate", case.endpoint, case.workers)
        if rate in self._done and feed in self._done[rate].runs:
            loop = self._done[rate]
        else:
            loop = Loop(rate.label, rate.kind)
            self._run_entry(loop, Entry(feed, feed, self._job(rate, feed)))
        return 2 * BATCH / loop.spread(Run.rate, feed).median

    def _run_entry(self, loop: Loop, entry: Entry) -> None:
        try:
            run = self._loops.run(entry.feed, entry.job)
            if entry.job.memory:
                base = self._loops.run(entry.feed, dataclasses.replace(entry.job, in_memory=True))
                loop.grown_mib[entry.name] = ((run.peak_bytes or 0) - (base.peak_bytes or 0)) / MIB
        except RuntimeError as error:
            loop.failed[entry.name] = str(error)
            return
        loop.runs.setdefault(entry.name, []).append(run)
        loop.step_s[entry.name] = entry.job.step_s

    def run(self, case: Case) -> Loop:
        """Runs all rounds of a case: A B C A B C. A feed that fails is left out of later rounds."""
        loop = Loop(case.label, case.kind)
        entries = [entry for entry in self._entries(case) if entry.feed not in self._without]
        for number, entry in itertools.product(range(self._rounds), entries):
            if entry.name not in loop.failed and not (number and entry.once):
                self._run_entry(loop, entry)
        self._done[case] = loop
        return loop


def table(loop: Loop) -> str:
    """Returns the lines of one case: medians, with minimum and maximum if there were several rounds."""
    waits = loop.kind == "half-speed trainer"
    head = ["", "n", "rounds", "samples/s", "CPU-s per 1000", "wait p50 ms", "p99 ms", "first batch s", "epoch gap ms"]
    head.append("in batch times")
    head.append("1st epoch")
    head += ["worker faults"] if loop.kind == "tensor" else []
    head += ["trainer ms a batch", "waiting"] if waits else ["our CPU is", "our rate is"]
    if loop.grown_mib:
        head.append("PSS +MiB")
    rows = [head]
    for name, runs in loop.runs.items():
        gaps = [gap_s for run in runs for gap_s in run.gap_s]
        row = [
            name,
            str(runs[0].objects),
            str(len(runs)),
            loop.spread(Run.rate, name).text(0),
            loop.spread(Run.cpu_s_per_1000, name).text(3),
            f"{loop.spread(lambda run: run.wait_ms(0.5), name).median:.1f}",
            f"{loop.spread(lambda run: run.wait_ms(0.99), name).median:.1f}",
            f"{loop.spread(lambda run: run.first_batch_s, name).median:.2f}",
            f"{report.Spread.of(gaps).median * 1000:.1f}" if gaps else "",
            loop.spread(Run.gap_batches, name).text(1) if gaps else "",
        ]
        row.append(f"{loop.spread(Run.first_epoch, name).text(2)}x" if runs[0].first_epoch_rate else "")
        if loop.kind == "tensor":
            row.append(loop.spread(Run.faults, name).text(1))
        if waits:
            waiting = loop.spread(lambda run: 100 * run.waiting(), name)
            row += [f"{loop.step_s[name] * 1000:.1f}", f"{waiting.text(1)} %"]
        elif name != OURS and OURS in loop.runs:
            row += [f"{loop.ratio(figure, name).text(2)}x" for figure in (Run.cpu_s_per_1000, Run.rate)]
        else:
            row += ["", ""]
        if loop.grown_mib:
            row.append(f"{loop.grown_mib[name]:+.0f}")
        rows.append(row)
    lines = [report.aligned(f"{loop.label}: median (min-max)", rows)]
    lines += [f"  {name} is left out: {_last_error(text)}" for name, text in loop.failed.items()]
    return "\n".join(lines)


def _last_error(text: str) -> str:
    """Returns the first line of the last exception in a traceback."""
    lines = text.strip().splitlines()
    ends = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith(" ")]
    scheme = " (BadScheme: it takes no plain HTTP)" if "BadScheme" in text else ""
    return (ends[-1] if ends else lines[-1]) + scheme


def _fields(loop: Loop) -> dict[str, Any]:
    runs = {name: [dataclasses.asdict(run) for run in runs] for name, runs in loop.runs.items()}
    extra_fields = {"step_s": loop.step_s, "grown_mib": loop.grown_mib, "failed": loop.failed}
    return {"label": loop.label, "batch": BATCH, **extra_fields, "rounds": runs}


@contextlib.contextmanager
def origins(cases: Sequence[Case], families: Sequence[Family]) -> Iterator[dict[str, Location]]:
    """Starts the locations that `cases` need."""
    wanted = {case.endpoint for case in cases}
    endpoints = {name: endpoint for name, endpoint in ENDPOINTS.items() if name in wanted}
    with contextlib.ExitStack() as stack:
        locations = {}
        if endpoints:
            found = stack.enter_context(nginx.running(families, list(endpoints.values())))
            locations |= {name: found[endpoint] for name, endpoint in endpoints.items()}
        if "versitygw" in wanted:
            locations["versitygw"] = stack.enter_context(versitygw.running(families[:1]))
        yield locations


def main() -> None:
    program = Program(__doc__, 3).has_cases()
    program.parser.add_argument("--objects", type=int, default=4000, help="objects of 110 KiB (default 4000)")
    given = program.start()
    cases = program.selected(CASES, lambda case: case.label)
    loops = []
    with contextlib.ExitStack() as stack:
        # Rivals with few objects still get two batches per worker.
        families = [Family(110 * KIB, max(given.objects, 2 * BATCH * 4))]
        families += [photos(PHOTOS)] if any(case.kind.startswith("jpeg") for case in cases) else []
        bench = Bench(stack.enter_context(origins(cases, families)), given.objects, given.rounds, given.without)
        stack.callback(bench.close)
        for case in cases:
            loops.append(bench.run(case))
            print(table(loops[-1]), "", sep="\n", flush=True)
    verdicts = loader_targets.verdicts(loops)
    program.finish("loader", verdicts, {"cases": [_fields(loop) for loop in loops]}, part=given.objects < 4000)


if __name__ == "__main__":
    main()
