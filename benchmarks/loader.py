"""How fast is a trainer fed with shuffled small objects, and how long does it wait, compared with other loaders?

    python benchmarks/loader.py                            # everything, about twelve minutes
    python benchmarks/loader.py --only "tail, 4 workers"   # the cases whose label has these words
    python benchmarks/loader.py --rounds 1 --objects 1024  # a preview: not for publication

Needs the extras `bench` and `otel`, and nginx with its lua module. Each run is a training loop in its own process,
with its workers; the order is one seeded permutation, the batch 64, and every byte reaches the trainer as uint8. There
is no transform, except in two kinds of cases: the samples of "tensor" are tensors, which the default collation stacks;
those of "jpeg" are decoded photos. "1st epoch" is the rate of the first epoch, after its first batch, beside that of
later ones. Batches are verified: the number of bytes, the objects, and one object of each batch byte for byte. CPU
time and memory are those of the trainer and its workers; the server runs on the same machine. The loop of "torchobj,
otel" has installed the instruments of OpenTelemetry, which no SDK reads.
"""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Spread, Verdict, targets
from benchmarks.harness.loop import FIGURES, LIMIT_S, Job, Loop, Run, measure
from benchmarks.harness.rivals.feeds import Plan
from benchmarks.lab import nginx, versitygw
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family
from benchmarks.lab.photos import DECODERS, photos

BATCH = 64
PHOTOS = 1024
ENDPOINTS = {"no latency": nginx.PLAIN, "20 ms": nginx.LATENCY, "tail": nginx.TAIL}
SLOW = ("s3torchconnector", "boto3", "litData")
_STEADY_S = 1.0
_GETITEMS, _CONNECTOR = "getitems", "s3torchconnector"
_WITHOUT, _FLAT, _RAM, _OTEL = f"{OURS}, lookahead=0", f"{OURS}, one tensor", "torch, RAM", f"{OURS}, otel"

# Case and rival: the minimum rate as a multiple of the rival's.
_RATES = {
    ("rate, 20 ms, 1 workers", _GETITEMS): 3.0,
    ("rate, 20 ms, 4 workers", _GETITEMS): 1.5,
    ("rate, tail, 1 workers", _GETITEMS): 10.0,
    ("rate, tail, 4 workers", _GETITEMS): 6.0,
    ("rate, no latency, 1 workers", _GETITEMS): 1.5,
    ("rate, no latency, 4 workers", _GETITEMS): 1.5,
    ("rate, 20 ms, 1 workers", _CONNECTOR): 60.0,
    ("rate, 20 ms, 4 workers", _CONNECTOR): 20.0,
    ("tensor, no latency, 1 workers", _RAM): 0.9,
    ("tensor, no latency, 4 workers", _RAM): 0.9,
    ("tensor, 20 ms, 1 workers", _GETITEMS): 6.0,
    ("tensor, 20 ms, 4 workers", _GETITEMS): 3.0,
    ("tensor, tail, 1 workers", _GETITEMS): 15.0,
    ("tensor, tail, 4 workers", _GETITEMS): 8.0,
    **{(f"jpeg {decoder}, {endpoint}, 2 workers", _RAM): 0.95 for decoder in DECODERS for endpoint in ENDPOINTS},
}
# Kind and rival: the maximum CPU time as a multiple of the rival's.
_CPU = {("rate", _GETITEMS): 0.5, ("tensor", _RAM): 1.1}
_OTEL_CPU = 1.01
_FIRST_EPOCH = 0.8
_ROUND_TRIP_S = 0.02
_FIRST_BATCH_ROUND_TRIPS = 1.5
_TENSOR_FAULTS = 1.0
_WAITING_PERCENT = 5
_GAP_BATCHES = 2.0


@dataclass(frozen=True)
class Entry:
    """One client of a case."""

    name: str
    feed: str
    job: Job
    once: bool = False
    """Only in the first round: no target depends on it."""


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
    *(Case("otel", "no latency", workers) for workers in (0, 4)),
]


class Bench:
    """Runs cases."""

    def __init__(self, program: Program, pool: Clients, locations: dict[str, Location], objects: int) -> None:
        self._program, self._pool, self._locations, self._objects = program, pool, locations, objects
        self._done: dict[Case, Loop] = {}

    def _job(
        self, case: Case, feed: str, most: int | None = None, plan: dict[str, Any] | None = None, **more: Any
    ) -> Job:
        """Returns a feed's job: fast feeds run epochs, slow ones as many objects as a few seconds allow."""
        each_worker = max(1, case.workers)
        delayed = case.endpoint in ("20 ms", "tail")
        if feed in SLOW:
            objects, min_s = (256 if delayed else 512) * each_worker, 0.0
        elif feed == _GETITEMS and delayed:
            objects, min_s = 1024 * each_worker, 0.1
        else:
            objects, min_s = self._objects, _STEADY_S
        # A worker has at least one batch after its first.
        count = max(2 * BATCH * each_worker, min(objects, self._objects, most or self._objects))
        plan = plan or {}
        family = photos(min(PHOTOS, count)) if plan.get("samples") == "photos" else Family(110 * KIB, count)
        whole = Plan(self._locations[case.endpoint], family, BATCH, case.workers, **plan)
        return Job(whole, **{"min_s": min_s} | more)

    def _entry(self, case: Case, name: str, feed: str = "", *, once: bool = False, **job: Any) -> Entry:
        return Entry(name, feed or name, self._job(case, feed or name, **job), once)

    def _entries(self, case: Case) -> Iterator[Entry]:
        entry = partial(self._entry, case)
        if case.kind == "rate":
            yield from self._rate_entries(case)
        elif case.kind == "tensor":
            yield entry(OURS, plan={"samples": "tensors"})
            if case.endpoint == "no latency":
                yield entry(_RAM, plan={"samples": "tensors"})
            yield entry(_GETITEMS)
            yield entry(_CONNECTOR, once=True)
        elif case.kind.startswith("jpeg"):
            decoder = case.kind.removeprefix("jpeg ")
            for feed in (OURS, _RAM, _GETITEMS, _CONNECTOR):
                plan = {"samples": "photos", "decoder": decoder}
                yield entry(feed, plan=plan, once=feed not in (OURS, _RAM))
        elif case.kind == "half-speed trainer":
            ours, theirs = (self._half_speed_s(case, feed) for feed in (OURS, _GETITEMS))
            yield entry(OURS, plan={"elastic": True}, min_s=3 * _STEADY_S, step_s=ours)
            yield entry(_WITHOUT, OURS, most=2048, plan={"elastic": True, "lookahead": 0}, min_s=0.1, step_s=ours)
            yield entry(_GETITEMS, most=1024, step_s=theirs)
            yield entry("getitems, our trainer", _GETITEMS, most=1024, step_s=ours)
        elif case.kind == "otel":
            yield from (entry(feed) for feed in (OURS, _OTEL))
        elif case.kind == "epoch gap at full speed":
            yield entry(OURS, plan={"elastic": True})
            yield entry(_GETITEMS, once=True)
        else:
            more: Any = {"memory": True} if case.kind == "memory" else {"plan": {"context": "spawn"}}
            for feed in (OURS, _GETITEMS, _CONNECTOR):
                yield entry(feed, once=True, **more)

    def _rate_entries(self, case: Case) -> Iterator[Entry]:
        entry = partial(self._entry, case)
        # Feeds with a target run in all rounds.
        aimed = case.workers in (1, 4)
        yield entry(OURS, once=not aimed)
        if aimed:
            yield entry(_FLAT)
        yield entry(_GETITEMS, once=not aimed)
        yield entry(_CONNECTOR, once=not aimed or case.endpoint != "20 ms")
        yield entry("boto3", once=True)
        if case.endpoint == "versitygw":
            yield entry("litData", once=True)

    def _half_speed_s(self, case: Case, feed: str) -> float:
        """Returns the step time at which a trainer runs at half of the feed's rate without one."""
        rate = Case("rate", case.endpoint, case.workers)
        loop = self._done.get(rate)
        if loop is None or feed not in loop.runs:
            loop = Loop(rate.label)
            loop.take([feed], 1, partial(self._measure, loop, {feed: Entry(feed, feed, self._job(rate, feed))}))
            if feed in loop.failed:
                raise RuntimeError(loop.failed[feed])
        return 2 * BATCH / loop.spread("rate", feed).median

    def _measure(self, loop: Loop, entries: dict[str, Entry], name: str) -> Run:
        entry = entries[name]
        run: Run = self._pool.run(entry.feed, partial(measure, entry.job))
        if entry.job.memory:
            base = self._pool.run(entry.feed, partial(measure, dataclasses.replace(entry.job, in_memory=True)))
            loop.grown_mib[name] = ((run.peak_bytes or 0) - (base.peak_bytes or 0)) / MIB
        loop.step_s[name] = entry.job.step_s
        return run

    def run(self, case: Case) -> None:
        """Runs all rounds of a case."""
        loop = self._done[case] = Loop(case.label, kind=case.kind)
        entries = {entry.name: entry for entry in self._entries(case)}
        fewer, run = {name: 1 for name, entry in entries.items() if entry.once}, partial(self._measure, loop, entries)
        more = loop.columns()
        self._program.measure(loop, entries, run, FIGURES, verdicts, more=more, fewer=fewer)


def verdicts(loop: Any) -> Iterator[Verdict]:
    """The targets of a case."""
    for (label, rival), least in _RATES.items():
        if label != loop.label:
            continue
        for client in (OURS, _FLAT) if loop.kind == "rate" else (OURS,):
            beyond = client != OURS
            yield targets.ratio(loop, "samples/s", "rate", rival, least=least, ours=client, beyond=beyond)
        most = _CPU.get((loop.kind, rival))
        if most is not None:
            yield targets.ratio(loop, "CPU µs a sample", "cpu_us", rival, most=most)
    if not loop.has(OURS):
        return
    if loop.kind == "otel":
        yield targets.ratio(loop, "CPU µs a sample", "cpu_us", OURS, most=_OTEL_CPU, ours=_OTEL)
    elif loop.kind == "tensor":
        yield from _tensors(loop)
    elif loop.label == "half-speed trainer, tail, 4 workers":
        shares = {name: loop.spread("waiting_percent", name) for name in (OURS, _WITHOUT) if loop.has(name)}
        measured = ", ".join(f"{share.text(1)} % {name}" for name, share in shares.items())
        met = shares[OURS].median <= _WAITING_PERCENT
        yield Verdict(f"{loop.label}: waits <= {_WAITING_PERCENT}% of the time", measured, met)
    elif loop.kind in ("half-speed trainer", "epoch gap at full speed"):
        target = f"{loop.label}: epoch gap <= {_GAP_BATCHES:g} batch times"
        gap, beyond = loop.spread("gap_batches", OURS), "full speed" in loop.kind
        yield targets.bounded(target, gap, 2, "", most=_GAP_BATCHES, beyond=beyond)


def _tensors(loop: Loop) -> Iterator[Verdict]:
    if loop.has(_RAM):
        target = f"{loop.label}: page faults of workers per sample <= {_TENSOR_FAULTS:g}"
        yield targets.bounded(target, loop.spread("faults", OURS), 2, "", most=_TENSOR_FAULTS)
    target = f"{loop.label}: the first epoch >= {_FIRST_EPOCH:g}x the rate of later ones"
    yield targets.bounded(target, loop.spread("first_epoch", OURS), 2, "x", least=_FIRST_EPOCH)
    if ", 20 ms, " in loop.label:
        # An epoch begins with running workers, open connections and nothing read ahead. The time between batches is an
        # upper limit for that of decoding one.
        trips = [(statistics.median(run.gap_s) - run.batch / run.rate) / _ROUND_TRIP_S for run in loop.runs[OURS]]
        most = _FIRST_BATCH_ROUND_TRIPS
        target = f"{loop.label}: first batch of an epoch <= {most:g} round trips and a batch time"
        yield targets.bounded(target, Spread.of(trips), 2, "", most=most)


def main() -> None:
    program = Program("loader", __doc__, 3)
    program.parser.add_argument("--objects", type=int, default=4000, help="objects of 110 KiB (default 4000)")
    given = program.start()
    cases = program.selected(CASES, lambda case: case.label)
    endpoints = {case.endpoint for case in cases}
    with contextlib.ExitStack() as stack:
        # Rivals with few objects still get two batches per worker.
        families = [Family(110 * KIB, max(given.objects, 2 * BATCH * 4))]
        families += [photos(PHOTOS)] if any(case.kind.startswith("jpeg") for case in cases) else []
        chosen = {name: endpoint for name, endpoint in ENDPOINTS.items() if name in endpoints}
        found = stack.enter_context(nginx.running(families, chosen.values()))
        locations = {name: found[endpoint] for name, endpoint in chosen.items()}
        if "versitygw" in endpoints:
            locations["versitygw"] = stack.enter_context(versitygw.running(families[:1]))
        pool = stack.enter_context(Clients("harness.rivals.feeds", LIMIT_S))
        bench = Bench(program, pool, locations, given.objects)
        for case in cases:
            bench.run(case)
    program.finish(part=given.objects < 4000)


if __name__ == "__main__":
    main()
