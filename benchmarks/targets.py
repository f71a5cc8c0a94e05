"""The targets of `get.py`, and whether they are met, by medians of ratios. Measures nothing."""

from collections.abc import Iterator, Sequence

from benchmarks.lab.objects import KIB, MIB, size_text
from benchmarks.report import LIMIT, OURS, Outcome, Spread, Verdict

# Memory that a GET may need in addition to the object.
_EXTRA_MIB = 64
_FASTER_FROM = 128 * MIB


# Client, size, the maximum of our CPU time as a multiple of theirs.
_CPU = {
    "many 4 KiB plain": {"obstore": 0.25, "s3torchconnector": 0.15, LIMIT: 2.5},
    "many 110 KiB plain": {"obstore": 0.3, "s3torchconnector": 0.2, LIMIT: 1.6},
    "many 110 KiB TLS": {"obstore": 0.5},
}
_FASTER = 3.0


def _times(spread: Spread) -> str:
    return f"{spread.text(2)}x"


def _many(outcome: Outcome) -> Iterator[Verdict]:
    limits = _CPU.get(outcome.label, {})
    for rival, most in limits.items():
        for name in (rival, f"{rival} by hand"):
            if name in outcome.runs:
                ratio = outcome.ratio(outcome.cpu_us, name)
                target = f"{outcome.label}: CPU <= {most}x {name}"
                yield Verdict(target, _times(ratio), ratio.median <= most, beyond=name != rival)
    if outcome.label.endswith("plain") and outcome.size in (4 * KIB, 110 * KIB):
        for name in ("obstore", "obstore by hand"):
            if name in outcome.runs:
                ratio = outcome.ratio(outcome.rate, name)
                target = f"{outcome.label}: objects/s >= {_FASTER:.0f}x {name}"
                yield Verdict(target, _times(ratio), ratio.median >= _FASTER, beyond=name != "obstore")


def _one(outcome: Outcome) -> Iterator[Verdict]:
    if outcome.label.endswith("limited") and "boto3" in outcome.runs:
        ratio = outcome.ratio(outcome.rate, "boto3")
        least = 2.0 if outcome.size >= _FASTER_FROM else 1.0
        yield Verdict(f"{outcome.label}: MB/s >= {least:.0f}x boto3", _times(ratio), ratio.median >= least)
    if outcome.label.endswith("plain") and len(outcome.runs) > 1:
        rival = outcome.best_rival()
        ratio = outcome.ratio(outcome.rate, rival)
        measured = f"{_times(ratio)} of {rival}"
        yield Verdict(f"{outcome.label}: MB/s >= the best rival", measured, ratio.median >= 1.0)
    grown = outcome.grown_mib(OURS)
    if grown is not None:
        extra = grown - outcome.size / MIB
        target = f"{outcome.label}: RSS grows by <= {size_text(outcome.size)} + {_EXTRA_MIB} MiB"
        yield Verdict(target, f"{extra:+.1f} MiB besides the object", extra <= _EXTRA_MIB)


def verdicts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Returns the verdicts on all targets that the outcomes cover."""
    ours = [outcome for outcome in outcomes if OURS in outcome.runs]
    return [verdict for outcome in ours for verdict in (_many if outcome.batch else _one)(outcome)]
