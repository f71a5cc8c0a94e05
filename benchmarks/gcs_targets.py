"""The targets of `gcs.py`, and whether they are met, by medians of ratios. Measures nothing."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.checkpoint_measure import Run as Stated
from benchmarks.gcs_report import S3, Moved
from benchmarks.lab.objects import MIB, size_text
from benchmarks.loop import Run as Looped
from benchmarks.report import OURS, Outcome, Rounds, Verdict

# Rival, the maximum of our CPU time as a multiple of theirs.
_SMALL_CPU = {"obstore": 0.15, "obstore by hand": 0.4, S3: 1.15}
_SMALL_RATE = 5.0
_LARGE_RATE = 4.0
# Memory that a GET may need in addition to the object.
_EXTRA_MIB = 16
_UPLOAD_CPU, _UPLOAD_RATE = 0.2, 3.0
_LIKE_S3 = 0.85


def _ratio(
    case: Rounds, what: str, figure: Callable[[Any], float], rival: str, *, least: bool, limit: float
) -> Verdict:
    target = f"{case.label}: {what} {'>=' if least else '<='} {limit:g}x {rival}"
    if not {OURS, rival} <= case.runs.keys():
        return Verdict(target, "not measured", met=False)
    ratio = case.ratio(figure, rival)
    met = ratio.median >= limit if least else ratio.median <= limit
    return Verdict(target, f"{ratio.text(2)}x", met)


def _small(case: Outcome) -> Iterator[Verdict]:
    for rival, most in _SMALL_CPU.items():
        yield _ratio(case, "CPU", case.cpu_us, rival, least=False, limit=most)
    yield _ratio(case, "objects/s", case.rate, "gcsfs", least=True, limit=_SMALL_RATE)


def _large(case: Outcome) -> Iterator[Verdict]:
    yield _ratio(case, "MB/s", case.rate, "gcsfs", least=True, limit=_LARGE_RATE)
    target = f"{case.label}: RSS grows by <= {size_text(case.size)} + {_EXTRA_MIB} MiB"
    grown = case.grown_mib(OURS) if OURS in case.runs else None
    if grown is None:
        yield Verdict(target, "not measured", met=False)
    else:
        extra = grown - case.size / MIB
        yield Verdict(target, f"{extra:+.1f} MiB besides the object", extra <= _EXTRA_MIB)


def _upload(case: Rounds) -> Iterator[Verdict]:
    rival = "transfer_manager"
    yield _ratio(case, "CPU-s per GB", Moved.cpu_s_per_gb, rival, least=False, limit=_UPLOAD_CPU)
    yield _ratio(case, "MB/s", Moved.rate, rival, least=True, limit=_UPLOAD_RATE)


def _state(case: Rounds) -> Iterator[Verdict]:
    yield _ratio(case, "MB/s", Stated.rate, S3, least=True, limit=_LIKE_S3)


def _loop(case: Rounds) -> Iterator[Verdict]:
    yield _ratio(case, "samples/s", Looped.rate, S3, least=True, limit=_LIKE_S3)


# The beginning of a case's label.
_JUDGES: dict[str, Callable[[Any], Iterator[Verdict]]] = {
    "many 10 KiB": _small,
    "one 1 GiB": _large,
    "upload 1 GiB": _upload,
    "loader": _loop,
    "save": _state,
    "load ": _state,
}


def verdicts(cases: Sequence[Rounds]) -> list[Verdict]:
    """Returns the verdicts on all targets of the cases."""
    judged = ((case, judge) for case in cases for start, judge in _JUDGES.items() if case.label.startswith(start))
    return [verdict for case, judge in judged for verdict in judge(case)]
