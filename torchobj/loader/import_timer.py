"""Measures the imports that transforms and collate functions make while samples are built: they are not decoding.

`builtins.__import__` is replaced while samples are built, unless it is not Python's. `torchobj.decode` measures its own
imports.
"""

import builtins
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchobj.decode import libraries


class Imported(NamedTuple):
    """Seconds that a thread has spent on imports."""

    decoders: float = 0.0
    """Of the libraries of `torchobj.decode`."""
    transforms: float = 0.0
    """Of others, while samples were built."""

    def since(self, before: "Imported") -> "Imported":
        """The difference to an earlier moment."""
        return Imported(self.decoders - before.decoders, self.transforms - before.transforms)


NOTHING = Imported()


class _OfTransforms(threading.local):
    """The time of this thread, without that of imports within others."""

    seconds = 0.0
    is_measuring = False


_of_transforms = _OfTransforms()
_original: Any = builtins.__import__


def imported() -> Imported:
    """The time that this thread has spent so far."""
    return Imported(libraries.imports.seconds, _of_transforms.seconds)


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002  Python's
    if _of_transforms.is_measuring or libraries.imports.is_measuring or (not fromlist and name in sys.modules):
        return _original(name, globals, locals, fromlist, level)
    began, _of_transforms.is_measuring = time.perf_counter(), True
    try:
        return _original(name, globals, locals, fromlist, level)
    finally:
        _of_transforms.is_measuring = False
        _of_transforms.seconds += time.perf_counter() - began


def _install() -> None:
    # Another function there may call this one: that it calls it in turn would never end. Its imports are not measured.
    if builtins.__import__ is _original:
        builtins.__import__ = _import


def begin_worker() -> None:
    """Measures from now on, from zero: a forked worker has the times of its parent."""
    libraries.imports.seconds = _of_transforms.seconds = 0.0
    _install()


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Measures within the block. Other threads that are in such a block at the same time may be measured in part."""
    _install()
    try:
        yield
    finally:
        if builtins.__import__ is _import:
            builtins.__import__ = _original
