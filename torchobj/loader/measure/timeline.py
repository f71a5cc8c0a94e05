"""Samples of a loader over time, and the charts that they give. Draws nothing."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

#: Maximum number of samples: the samples of a longer run are further apart.
MAX_SAMPLES = 500
#: Time within epochs between the first samples, in seconds. Doubles whenever there are `MAX_SAMPLES`.
_FIRST_INTERVAL_S = 0.1
#: Time between the begin and the first sample, in seconds: a short run has charts too.
_SOON_S = 1e-6


class Sample(NamedTuple):
    """The state of a loader after a batch: counts since its first batch, and current values."""

    elapsed_s: float
    waited_s: float
    startup_s: float
    samples: int
    found: dict[str, Any]
    """Statistics of the prefetcher."""


class Timeline:
    """Samples at growing intervals, so that a run of any length has a few hundred and no batch costs more."""

    def __init__(self) -> None:
        self.samples = [Sample(elapsed_s=0.0, waited_s=0.0, startup_s=0.0, samples=0, found={})]
        #: The time within epochs from which the next sample is due, in seconds. No two samples are of the same time.
        self.due_s = _SOON_S
        self._interval_s = _FIRST_INTERVAL_S

    def begin(self, sample: Sample) -> None:
        """Begins at the first batch: what came before are imports and the start of workers."""
        self.samples, self.due_s = [sample], sample.elapsed_s + _SOON_S

    def add(self, sample: Sample) -> None:
        """Adds a sample that is due."""
        if len(self.samples) >= MAX_SAMPLES:
            self.samples, self._interval_s = self.samples[::2], 2 * self._interval_s
        self.samples.append(sample)
        self.due_s = sample.elapsed_s + self._interval_s


class Chart(NamedTuple):
    """Lines over the time within epochs, from the first batch on."""

    title: str
    unit: str
    seconds: list[float]
    lines: dict[str, list[float | None]]
    """Values by the name of the line, one for each time; None where nothing was measured."""


def charts(samples: list[Sample]) -> list[Chart]:
    """The charts of a run: waiting, throughput, requests, memory and latency."""
    pairs = list(itertools.pairwise(samples))

    def rate(count: Callable[[Sample], float], factor: float = 1.0) -> list[float | None]:
        return [factor * (count(now) - count(before)) / (now.elapsed_s - before.elapsed_s) for before, now in pairs]

    def current(name: str, factor: float = 1.0) -> list[float | None]:
        values = [now.found.get(name) for _, now in pairs]
        return [None if value is None else factor * value for value in values]

    seconds, mib = [now.elapsed_s - samples[0].elapsed_s for _, now in pairs], 1 / (1 << 20)
    return [
        Chart(
            "Exposed data time",
            "% of the time",
            seconds,
            {
                "waiting for data": rate(lambda sample: sample.waited_s, 100),
                "startup": rate(lambda sample: sample.startup_s, 100),
            },
        ),
        Chart("Samples", "per second", seconds, {"samples": rate(lambda sample: sample.samples)}),
        Chart("Read from the store", "MB/s", seconds, {"bytes": rate(lambda each: each.found.get("bytes", 0), 1e-6)}),
        Chart("Requests", "", seconds, {"in flight": current("in_flight"), "limit": current("in_flight_limit")}),
        Chart("Memory", "MiB", seconds, {"used": current("used_bytes", mib), "budget": current("budget_bytes", mib)}),
        Chart(
            "Time to first byte, since the start",
            "ms",
            seconds,
            {"median": current("first_byte_p50_s", 1e3), "99th percentile": current("first_byte_p99_s", 1e3)},
        ),
    ]
