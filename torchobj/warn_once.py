"""Logs each warning once: in one process, in it and those that it forks, or for one object. Does not import torch."""

import logging
import mmap
import zlib
from typing import Protocol

from torchobj import _torchobj

__all__ = ["FORKED", "PROCESS", "Once", "Scope", "warn_once"]

logger = logging.getLogger("torchobj")


class Scope(Protocol):
    """Where a warning is logged once."""

    def is_first(self, key: str) -> bool:
        """Whether this is the first call with this key."""
        ...


class Once:
    """For one object. A forked child inherits what was warned of."""

    def __init__(self) -> None:
        self._keys: dict[str, object] = {}

    def is_first(self, key: str) -> bool:
        """Whether this is the first call with this key."""
        # One operation, which is atomic.
        new = object()
        return self._keys.setdefault(key, new) is new


class _Process:
    """In each process: a forked child warns of it again."""

    def __init__(self) -> None:
        self._once: dict[int, Once] = {}

    def is_first(self, key: str) -> bool:
        """Whether this is the first call with this key in this process."""
        return self._once.setdefault(_torchobj.process_number(), Once()).is_first(key)


class _Forked:
    """In a process and all that it forks, such as DataLoader workers, of which there are new ones in each epoch."""

    def __init__(self) -> None:
        # By a checksum of the key; a shared mapping.
        self._flags = mmap.mmap(-1, 1 << 16)

    def has(self, key: str) -> bool:
        """Whether there was a call of `is_first` with this key."""
        return bool(self._flags[zlib.crc32(key.encode()) % len(self._flags)])

    def is_first(self, key: str) -> bool:
        """Whether this is the first call with this key in all these processes."""
        is_first = not self.has(key)
        self._flags[zlib.crc32(key.encode()) % len(self._flags)] = 1
        return is_first


PROCESS = _Process()
FORKED = _Forked()


def warn_once(scope: Scope, message: str, *arguments: object, key: str = "") -> None:
    """Logs a warning, unless it was logged in this scope.

    Args:
        scope: `PROCESS`, `FORKED`, or an object with `is_first`, such as `Once()`.
        message, arguments: Of the warning.
        key: Identifies the warning; "": the message with its arguments.
    """
    if scope.is_first(key or f"{message} {arguments}"):
        logger.warning(message, *arguments)
