"""A target that is a multiple of a rival's figure, and whether the median of the ratios meets it. Measures nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.report import OURS, Rounds, Verdict


@dataclass(frozen=True)
class Target:
    """Our figure as a multiple of a rival's."""

    what: str
    rival: str
    limit: float
    least: bool = False
    """The minimum instead of the maximum."""
    ours: str = OURS
    beyond: bool = False

    def verdict(self, case: Rounds, figure: Callable[[Any], float]) -> Verdict:
        ours = "" if self.ours == OURS else f"{self.ours}: "
        name = f"{case.label}: {ours}{self.what} {'>=' if self.least else '<='} {self.limit:g}x {self.rival}"
        if not {self.ours, self.rival} <= case.runs.keys():
            return Verdict(name, "not measured", met=False, beyond=self.beyond)
        ratio = case.ratio(figure, self.rival, self.ours)
        met = ratio.median >= self.limit if self.least else ratio.median <= self.limit
        return Verdict(name, f"{ratio.text(2)}x", met, beyond=self.beyond)


def at_most(target: str, found: float | None, limit: float, unit: str) -> Verdict:
    """The verdict on a figure of ours alone."""
    measured = "not measured" if found is None else f"{found:.0f} {unit}"
    return Verdict(f"{target} <= {limit:g} {unit}", measured, found is not None and found <= limit)
