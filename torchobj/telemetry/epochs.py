"""What the loops of this process measured in their epochs, deleted loaders included. The loaders measure it."""

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Protocol

from torchobj.telemetry.table import CAUSES, of_source


class Measuring(Protocol):
    """Measures the epochs of one loader."""

    def measured(self) -> Mapping[str, float]:
        """What was measured since the previous call: the seconds by cause, and the metrics of epochs by key."""


class Epochs:
    """The sums over all loaders of this process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all of them."""
        # A method: a forked child also needs another lock, because the parent may hold this one. Reentrant, because a
        # signal handler may read the metrics while this thread holds it.
        self._lock = threading.RLock()
        self._loaders: weakref.WeakSet[Measuring] = weakref.WeakSet()
        self._sums = dict.fromkeys([*CAUSES, *(metric.key for metric in of_source("epochs"))], 0.0)

    def add(self, loader: Measuring) -> None:
        """Adds what a loader measured since the first call for it; from now on `sums` does so too."""
        with self._lock:
            if loader in self._loaders:
                self._collect(loader)
            else:
                # What a loop of the parent of a forked process measured is not of this process.
                loader.measured()
                self._loaders.add(loader)

    def _collect(self, loader: Measuring) -> None:
        for name, value in loader.measured().items():
            self._sums[name] += value

    def sums(self) -> dict[str, float]:
        """The sums so far."""
        with self._lock:
            for loader in list(self._loaders):
                self._collect(loader)
            return dict(self._sums)


#: The sums over the loaders of this process.
EPOCHS = Epochs()
os.register_at_fork(after_in_child=EPOCHS.reset)
