"""The targets of `checkpoint.py`, and whether they are met, by medians of ratios. Measures nothing."""

from collections.abc import Iterator, Sequence

from benchmarks.beside import Phases
from benchmarks.blocking import MEMCPY, SHARDED, Stop, Stops
from benchmarks.checkpoint_measure import Case, Run
from benchmarks.dcp import ASKING, NOTHING, Call, Calls, Share
from benchmarks.report import OURS, Spread, Verdict

RIVAL = "s3torchconnector"
_CPU = 0.4
# Minimum MB/s as a multiple of the rival's, per action and location.
_RATES = {
    ("save", "origin"): 1.5,
    ("save", "versitygw"): 1.0,
    ("load", "origin"): 4.0,
    ("load", "versitygw"): 2.5,
}
_GROWN_MIB = 64
_GROWN_SHARE = 1.05
_SHARE = 0.015
_TENSOR_US = 30
_LOST = 0.1
_MEMCPY = 1.2


def _case(case: Case) -> Iterator[Verdict]:
    location = case.label.rsplit(", ", 1)[1]
    least = _RATES[case.action, location]
    names = [f"{case.label}: MB/s >= {least:g}x {RIVAL}"]
    if case.action == "save" and location == "origin":
        names.append(f"{case.label}: CPU-s per GB <= {_CPU}x {RIVAL}")
    if not {OURS, RIVAL} <= case.runs.keys():
        yield from (Verdict(name, "not measured", met=False) for name in names)
    else:
        rate = case.ratio(Run.rate, RIVAL)
        yield Verdict(names[0], f"{rate.text(2)}x", rate.median >= least)
        if len(names) > 1:
            cpu = case.ratio(Run.cpu_s_per_gb, RIVAL)
            yield Verdict(names[1], f"{cpu.text(2)}x", cpu.median <= _CPU)
    if OURS in case.runs and case.action == "save":
        grown = case.spread(Run.grown_mib, OURS)
        yield Verdict(
            f"{case.label}: RSS grows by <= {_GROWN_MIB} MiB", f"{grown.text(1)} MiB", grown.most <= _GROWN_MIB
        )
    elif OURS in case.runs:
        share = case.spread(Run.grown_share, OURS)
        target = f"{case.label}: RSS grows by <= {_GROWN_SHARE}x of the payload"
        yield Verdict(target, f"{share.text(3)}x", share.most <= _GROWN_SHARE)


def _calls(calls: Calls) -> Iterator[Verdict]:
    # torch's contract requires a writer and a reader to ask the planner for each tensor, so that cost is the base.
    for base in (ASKING, NOTHING):
        us = Spread.of(calls.beside(Call.tensor_us, OURS, base))
        target = f"{calls.label}: <= {_TENSOR_US} us for each on top of {base}"
        yield Verdict(target, f"{us.text(1)} us", us.median <= _TENSOR_US, beyond=base == NOTHING)


def _share(share: Share) -> Iterator[Verdict]:
    measured = f"{share.share():.2%} ({share.read_bytes} of {share.all_bytes} bytes)"
    target = f"dcp.load of {share.wanted} of {share.tensors} tensors of 1 MiB: <= {_SHARE:.1%} of the bytes"
    yield Verdict(target, measured, share.share() <= _SHARE)


def _phases(phases: Phases) -> Iterator[Verdict]:
    lost = Spread.of([100 * share for share in phases.lost()])
    target = f"{phases.label}: loses <= {_LOST:.0%} of samples/s beside an upload"
    yield Verdict(target, f"{lost.text(1)} %", lost.median <= 100 * _LOST)


def _stops(stops: Stops) -> Iterator[Verdict]:
    for name in (OURS, SHARDED):
        times = stops.ratio(Stop.milliseconds, MEMCPY, name)
        yield Verdict(f"{stops.label}, {name}: <= {_MEMCPY}x one memcpy", f"{times.text(2)}x", times.median <= _MEMCPY)


def verdicts(
    cases: Sequence[Case],
    calls: Sequence[Calls],
    share: Share | None,
    phases: Sequence[Phases],
    stops: Sequence[Stops],
) -> list[Verdict]:
    """Returns the verdicts on all targets that the measurements cover."""
    return [
        *(verdict for case in cases if "small" not in case.label for verdict in _case(case)),
        *(verdict for each in calls for verdict in _calls(each)),
        *(_share(share) if share is not None else ()),
        *(verdict for each in phases for verdict in _phases(each)),
        *(verdict for each in stops for verdict in _stops(each)),
    ]
