"""The metrics of this process as observable instruments of OpenTelemetry. Needs opentelemetry-api installed.

Only the API is used. Without an SDK its instruments are never read, so that they cost nothing.
"""

import time
from collections.abc import Callable, Iterable

from torchobj._torchobj import __version__
from torchobj.telemetry import metrics
from torchobj.telemetry.table import OF_PROCESS, Metric

try:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter
except ImportError as error:
    raise ImportError(f"torchobj.otel needs opentelemetry ({error}): pip install 'torchobj[otel]'") from error

__all__ = ["install"]

#: Time for which a reading is valid: the instruments of one collection are read one after the other.
_VALID_S = 0.2


def install(meter_provider: MeterProvider | None = None) -> None:
    """Registers an observable instrument for each metric of this process.

    The instruments have the names and units in `docs/metrics.md`. `torchobj.requests` is one instrument with the
    attributes `operation` and `outcome`, and `torchobj.exposed_seconds` one with the attribute `cause`. A process that
    is forked reports its own metrics, from zero. Call it once for each provider.

    Args:
        meter_provider: A provider of the SDK; None: the global one, also if it is set later.

    Raises:
        ImportError: opentelemetry-api is not installed.

    Example:
        >>> install()
    """
    meter = get_meter("torchobj", __version__, meter_provider)
    reading = _Reading()
    create = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}

    for metric in OF_PROCESS:
        create[metric.kind](metric.name, [reading.callback(metric)], metric.unit, metric.description)


class _Reading:
    """The metrics of one collection."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._read_at = float("-inf")

    def values(self) -> dict[str, float]:
        """The current metrics."""
        now = time.monotonic()
        if now - self._read_at > _VALID_S:
            self._values, self._read_at = metrics(), now
        return self._values

    def callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """Observes a metric, and its values by attributes; a percentile is absent before the first request."""
        prefix = f"{metric.name}."

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            value = self.values().get(metric.name)
            return [] if value is None else [Observation(value)]

        def observe_each(_: CallbackOptions) -> Iterable[Observation]:
            for name, value in self.values().items():
                if name.startswith(prefix):
                    parts = name.removeprefix(prefix).split(".")
                    yield Observation(value, dict(zip(metric.attributes, parts, strict=True)))

        return observe_each if metric.attributes else observe
