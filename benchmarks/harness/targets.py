"""Targets, and whether a case meets them, by medians of ratios. Measures nothing."""

from dataclasses import dataclass
from typing import Any

from benchmarks.harness.report import OURS, Rounds, Spread
from benchmarks.lab.objects import MIB, size_text


@dataclass(frozen=True)
class Verdict:
    """A target and the measured value."""

    target: str
    measured: str
    met: bool
    beyond: bool = False
    """Beyond the targets: a rival configured better than its documentation shows."""

    def text(self) -> str:
        word = "met" if self.met else "NOT MET"
        return f"{word:8}{self.target}: {self.measured}{' (beyond the targets)' if self.beyond else ''}"


Part = tuple[list[Any], list[Verdict]]
"""What a file measures that another one runs: its cases, which have `shown`, and the verdicts on them."""


def ratio(
    case: Rounds,
    what: str,
    figure: str,
    rival: str,
    *,
    least: float | None = None,
    most: float | None = None,
    ours: str = OURS,
    beyond: bool = False,
) -> Verdict:
    """The verdict on our figure as a multiple of a rival's, which is at least or at most a number.

    Args:
        case: What was measured.
        what: The text of the figure in the target; "" if the label of the case says what it is.
        figure: Its name.
        rival: Whose figure is the base.
        least: The minimum.
        most: The maximum.
        ours: Our client.
        beyond: Whether the target is beyond the targets.
    """
    words = [f"{case.label}:", *([f"{ours}:"] if ours not in (OURS, what) else []), *([what] if what else [])]
    limit = f">= {least:g}x" if least is not None else f"<= {most:g}x"
    target = f"{' '.join(words)} {limit} {rival}"
    if not case.has(ours, rival):
        return Verdict(target, "not measured", met=False, beyond=beyond)
    return bounded(target, case.ratio(figure, rival, ours), 2, "x", least=least, most=most, beyond=beyond)


def bounded(
    target: str,
    found: Spread | None,
    digits: int,
    unit: str,
    *,
    least: float | None = None,
    most: float | None = None,
    beyond: bool = False,
) -> Verdict:
    """The verdict on the median of a figure that is at least `least` and at most `most`."""
    if found is None:
        return Verdict(target, "not measured", met=False, beyond=beyond)
    met = (least is None or found.median >= least) and (most is None or found.median <= most)
    return Verdict(target, f"{found.text(digits)}{unit}", met, beyond)


def grows_at_most(case: Rounds, limit_mib: float, ours: str = OURS, name: str = "") -> Verdict:
    """The verdict on the growth of the resident memory of our process, in the round in which it grew most."""
    found = case.most("grown_mib", ours)
    measured = "not measured" if found is None else f"{found:.0f} MiB"
    target = f"{case.label}: {name}growth of RSS <= {limit_mib:g} MiB"
    return Verdict(target, measured, found is not None and found <= limit_mib)


def grows_by_object(case: Rounds, size: int, extra_mib: float) -> Verdict:
    """The verdict on the growth of the resident memory by a GET: by the object and not much more."""
    target = f"{case.label}: RSS grows by <= {size_text(size)} + {extra_mib:g} MiB"
    if not case.has(OURS) or not case.figures("grown_mib", OURS):
        return Verdict(target, "not measured", met=False)
    extra = case.spread("grown_mib", OURS).median - size / MIB
    return Verdict(target, f"{extra:+.1f} MiB besides the object", extra <= extra_mib)
