"""The targets of `loader.py`, and whether they are met, by medians of ratios. Measures nothing."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.loop import Run
from benchmarks.report import OURS, Rounds, Verdict

WITHOUT = f"{OURS}, lookahead=0"
FLAT = f"{OURS}, one tensor"
_GETITEMS = "getitems"
RAM = "torch, RAM"

# Label, rival, minimum rate as a multiple of the rival's.
_RATES = (
    ("rate, 20 ms, 1 workers", _GETITEMS, 3.0),
    ("rate, 20 ms, 4 workers", _GETITEMS, 1.5),
    ("rate, tail, 1 workers", _GETITEMS, 10.0),
    ("rate, tail, 4 workers", _GETITEMS, 6.0),
    ("rate, no latency, 1 workers", _GETITEMS, 1.5),
    ("rate, no latency, 4 workers", _GETITEMS, 1.5),
    ("rate, 20 ms, 1 workers", "s3torchconnector", 60.0),
    ("rate, 20 ms, 4 workers", "s3torchconnector", 20.0),
)
# Cases whose samples are tensors, with the same meaning.
_TENSOR_RATES = (
    ("tensor, no latency, 1 workers", RAM, 0.9),
    ("tensor, no latency, 4 workers", RAM, 0.9),
    ("tensor, 20 ms, 1 workers", _GETITEMS, 6.0),
    ("tensor, 20 ms, 4 workers", _GETITEMS, 3.0),
    ("tensor, tail, 1 workers", _GETITEMS, 15.0),
    ("tensor, tail, 4 workers", _GETITEMS, 8.0),
)
_JPEG_RATE = 0.95
_FIRST_EPOCH = 0.8
_ROUND_TRIP_S = 0.02
_FIRST_BATCH_ROUND_TRIPS = 1.5
_TENSOR_CPU = 1.1
_TENSOR_FAULTS = 1.0
_CPU = 0.5
_WAITING = 0.05
_GAP_BATCHES = 2.0


def _rate(loop: Rounds, rival: str, least: float) -> Verdict:
    ratio = loop.ratio(Run.rate, rival)
    return Verdict(f"{loop.label}: >= {least:g}x {rival}", f"{ratio.text(2)}x", ratio.median >= least)


def _rates(loops: dict[str, Rounds]) -> Iterator[Verdict]:
    for label, rival, least in _RATES:
        for client in (OURS, FLAT):
            if label not in loops:
                continue
            runs, beyond = loops[label].runs, client != OURS
            target = f"{label}: {client} >= {least:g}x {rival}"
            if client not in runs or rival not in runs:
                yield Verdict(target, "not measured", met=False, beyond=beyond)
                continue
            ratio = loops[label].ratio(Run.rate, rival, client)
            yield Verdict(target, f"{ratio.text(2)}x", ratio.median >= least, beyond=beyond)


def _cpu(loops: dict[str, Rounds]) -> Iterator[Verdict]:
    for label in dict.fromkeys(label for label, rival, _ in _RATES if rival == _GETITEMS):
        if label in loops and {OURS, _GETITEMS} <= loops[label].runs.keys():
            ratio = loops[label].ratio(Run.cpu_s_per_1000, _GETITEMS)
            target = f"{label}: CPU-s per 1000 samples <= {_CPU}x {_GETITEMS}"
            yield Verdict(target, f"{ratio.text(2)}x", ratio.median <= _CPU)


def _tensors(loops: dict[str, Rounds]) -> Iterator[Verdict]:
    for label, rival, least in _TENSOR_RATES:
        if label not in loops or not {OURS, rival} <= loops[label].runs.keys():
            continue
        yield _rate(loops[label], rival, least)
        if rival != RAM:
            continue
        cpu = loops[label].ratio(Run.cpu_s_per_1000, rival)
        target = f"{label}: CPU-s per 1000 samples <= {_TENSOR_CPU}x {rival}"
        yield Verdict(target, f"{cpu.text(2)}x", cpu.median <= _TENSOR_CPU)
        faults = loops[label].spread(Run.faults, OURS)
        target = f"{label}: page faults of workers per sample <= {_TENSOR_FAULTS:g}"
        yield Verdict(target, faults.text(2), faults.median <= _TENSOR_FAULTS)


def _photos(loops: dict[str, Rounds]) -> Iterator[Verdict]:
    for label, loop in loops.items():
        if label.startswith("jpeg") and {OURS, RAM} <= loop.runs.keys():
            yield _rate(loop, RAM, _JPEG_RATE)


def _first_epochs(loops: dict[str, Rounds]) -> Iterator[Verdict]:
    for label in (label for label, _, _ in _TENSOR_RATES):
        if label in loops and OURS in loops[label].runs:
            share = loops[label].spread(Run.first_epoch, OURS)
            target = f"{label}: the first epoch >= {_FIRST_EPOCH:g}x the rate of later ones"
            yield Verdict(target, f"{share.text(2)}x", share.median >= _FIRST_EPOCH)


def _first_batches(loops: dict[str, Rounds]) -> Iterator[Verdict]:
    # An epoch begins with running workers, open connections and nothing read ahead. The time between batches is an
    # upper limit for that of decoding one.
    for label in ("tensor, 20 ms, 1 workers", "tensor, 20 ms, 4 workers"):
        if label in loops and OURS in loops[label].runs:
            trips = loops[label].spread(_first_batch_round_trips, OURS)
            target = f"{label}: first batch of an epoch <= {_FIRST_BATCH_ROUND_TRIPS:g} round trips and a batch time"
            yield Verdict(target, trips.text(2), trips.median <= _FIRST_BATCH_ROUND_TRIPS)


def _first_batch_round_trips(run: Run) -> float:
    """The median wait for the first batch of an epoch without the time of a batch, in round trips."""
    return (statistics.median(run.gap_s) - run.batch / run.rate()) / _ROUND_TRIP_S


def _waits(loops: dict[str, Rounds]) -> Iterator[Verdict]:
    tail = loops.get("half-speed trainer, tail, 4 workers")
    if tail is not None:
        target = f"{tail.label}: waits <= {_WAITING:.0%} of the time"
        measured = [
            f"{tail.spread(lambda run: 100 * run.waiting(), name).text(1)} % {name}"
            for name in (OURS, WITHOUT)
            if name in tail.runs
        ]
        met = OURS in tail.runs and tail.spread(Run.waiting, OURS).median <= _WAITING
        yield Verdict(target, ", ".join(measured) or "not measured", met)
    for label in ("half-speed trainer, 20 ms, 4 workers", "epoch gap at full speed, 20 ms, 4 workers"):
        if label in loops:
            target = f"{label}: epoch gap <= {_GAP_BATCHES:g} batch times"
            if OURS not in loops[label].runs:
                yield Verdict(target, "not measured", met=False)
                continue
            gap = loops[label].spread(Run.gap_batches, OURS)
            yield Verdict(target, gap.text(2), gap.median <= _GAP_BATCHES, beyond="full speed" in label)


def verdicts(loops: Sequence[Rounds]) -> list[Verdict]:
    """Returns the verdicts on all targets that the loops cover."""
    by_label = {loop.label: loop for loop in loops}
    judges = (_rates, _tensors, _photos, _first_epochs, _first_batches, _cpu, _waits)
    return [verdict for judge in judges for verdict in judge(by_label)]
