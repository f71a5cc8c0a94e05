"""The targets of `gcs.py`, and whether they are met, by medians of ratios. Measures nothing."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.checkpoint_measure import Run as Stated
from benchmarks.gcs_report import FILE, S3, Moved
from benchmarks.lab.objects import MIB, size_text
from benchmarks.loop import Run as Looped
from benchmarks.ratio_target import Target
from benchmarks.report import OURS, Outcome, Rounds, Verdict

# Rival, the maximum of our CPU time as a multiple of theirs.
_SMALL_CPU = {"obstore": 0.15, "obstore by hand": 0.4, S3: 1.15}
_SMALL_RATE = 5.0
_LARGE_RATE = 4.0
# Memory that a GET may need in addition to the object.
_EXTRA_MIB = 16
_UPLOAD_CPU, _UPLOAD_RATE = 0.2, 3.0
_LIKE_S3 = 0.85


def _small(case: Outcome) -> Iterator[Verdict]:
    for rival, most in _SMALL_CPU.items():
        yield Target("CPU", rival, most).verdict(case, case.cpu_us)
    yield Target("objects/s", "gcsfs", _SMALL_RATE, least=True).verdict(case, case.rate)


def _large(case: Outcome) -> Iterator[Verdict]:
    for rival in ("gcsfs", "gcsfs by hand"):
        yield Target("MB/s", rival, _LARGE_RATE, least=True, beyond=rival != "gcsfs").verdict(case, case.rate)
    target = f"{case.label}: RSS grows by <= {size_text(case.size)} + {_EXTRA_MIB} MiB"
    grown = case.grown_mib(OURS) if OURS in case.runs else None
    if grown is None:
        yield Verdict(target, "not measured", met=False)
    else:
        extra = grown - case.size / MIB
        yield Verdict(target, f"{extra:+.1f} MiB besides the object", extra <= _EXTRA_MIB)


def _upload(case: Rounds) -> Iterator[Verdict]:
    rival = "transfer_manager"
    for ours in (OURS, FILE):
        yield Target("CPU-s per GB", rival, _UPLOAD_CPU, ours=ours).verdict(case, Moved.cpu_s_per_gb)
        yield Target("MB/s", rival, _UPLOAD_RATE, least=True, ours=ours).verdict(case, Moved.rate)


def _state(case: Rounds) -> Iterator[Verdict]:
    yield Target("MB/s", S3, _LIKE_S3, least=True).verdict(case, Stated.rate)


def _loop(case: Rounds) -> Iterator[Verdict]:
    yield Target("samples/s", S3, _LIKE_S3, least=True).verdict(case, Looped.rate)


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
