"""Metrics of this process: their names and units, and their values."""

from torchobj.telemetry.process import metrics

__all__ = ["metrics"]
