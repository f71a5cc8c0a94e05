"""Selects the checkpoints to delete, given the committed ones. Reads and deletes nothing."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Literal

from torchobj.checkpoint.steps.commit import Commit
from torchobj.exceptions import ConfigError

__all__ = ["KeepBest", "Retention", "check_count", "expired"]


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keeps the steps with the best values of a metric.

    Example:
        >>> KeepBest("loss", "min", 2)
        KeepBest(metric='loss', mode='min', count=2)
        >>> KeepBest("loss", "least")
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: keep_best mode='least': must be min or max
    """

    metric: str
    """Its name in the `metrics` of `save`. Steps without it, or where it is NaN, are never among the best."""
    mode: Literal["min", "max"]
    """Whether the smallest or the largest value is best."""
    count: int = 1
    """Number of steps. Of equal values the later step is better."""

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"keep_best mode={self.mode!r}: must be min or max")
        check_count("keep_best count", self.count)

    def ranked(self, committed: Sequence[Commit]) -> list[int]:
        """Returns the steps with the metric, the best first."""
        values = [(commit.metrics.get(self.metric, math.nan), commit.step) for commit in committed]
        sign = -1 if self.mode == "min" else 1
        ranked = sorted(((sign * value, step) for value, step in values if not math.isnan(value)), reverse=True)
        return [step for _, step in ranked]


@dataclasses.dataclass(frozen=True)
class Retention:
    """The rules of a manager. A step is kept if any rule keeps it."""

    keep_last: int | None = 3
    """Number of newest steps to keep, by number and by time; None keeps all."""
    keep_every: int | None = None
    """Keep steps that are multiples of it."""
    keep_best: KeepBest | None = None
    """Keep the best steps by a metric."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.keep_last is None and (self.keep_every, self.keep_best) != (None, None):
            raise ConfigError(
                "keep_last=None keeps all steps: with keep_every or keep_best it must be a number, 1 or more"
            )
        if self.keep_best is not None and not isinstance(self.keep_best, KeepBest):
            raise ConfigError(f"keep_best={self.keep_best!r}: must be a KeepBest, or (metric, 'min' or 'max', count)")


def expired(committed: Sequence[Commit], rules: Retention, protected: Collection[int] = ()) -> list[int]:
    """Returns the steps that no rule keeps.

    Args:
        committed: All committed steps, in any order.
        rules: The rules.
        protected: Steps to keep in any case: those just saved, and being saved.

    Returns:
        Steps to delete, ascending; never the latest one.

    Example:
        >>> from collections import namedtuple
        >>> step = namedtuple("step", "step metrics time")
        >>> committed = [step(100, {"loss": 2.0}, 1), step(200, {"loss": 1.0}, 2), step(300, {"loss": 3.0}, 3)]
        >>> expired(committed, Retention(keep_last=1, keep_best=KeepBest("loss", "min")))
        [100]
    """
    steps = sorted(commit.step for commit in committed)
    if rules.keep_last is None:
        return []
    # After going back to an older step, the newest steps have numbers below the largest.
    by_time = [commit.step for commit in sorted(committed, key=lambda commit: (commit.time, commit.step))]
    kept = {*steps[-rules.keep_last :], *by_time[-rules.keep_last :], *protected}
    if rules.keep_every is not None:
        kept |= {step for step in steps if step % rules.keep_every == 0}
    if rules.keep_best is not None:
        kept.update(rules.keep_best.ranked(committed)[: rules.keep_best.count])
    return [step for step in steps if step not in kept]


def check_count(name: str, value: object) -> None:
    """Checks a number of steps.

    Raises:
        ConfigError: It is not a whole number of 1 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: must be a whole number, 1 or more")
