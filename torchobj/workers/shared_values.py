"""The epoch, the counters and the sums that a dataset shares with its DataLoader workers."""

import contextlib
import fcntl
import functools
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.utils.data

from torchobj import _torchobj
from torchobj.warn_once import FORKED, warn_once
from torchobj.workers import process
from torchobj.workers.context import setting
from torchobj.workers.descriptors import Descriptor, Descriptors

#: What is warned of once; each has a flag of its own.
_KINDS = ("decode", "division", "uneven", "repeated", "no samples")

#: Positions of the values of an epoch: its number, whether a pass of it has begun, whether it was set, the flag of each
#: kind of warning, and the most recent passes of workers: tag, epoch, and number of workers that have not begun it.
_EPOCH, _BEGUN, _IS_SET, _WARNED = range(4)
_PASSES = _WARNED + len(_KINDS)
_RECENT = 64


class _Shared:
    """What the process that created it and its DataLoader workers share, in a file without a name.

    Any other process that receives a copy, such as a rank of `mp.spawn`, gets a file of its own.
    """

    def __init__(self, content: bytes) -> None:
        self._process, self._file = _torchobj.process_number(), SharedFile.create("torchobj-shared", content)

    def _own(self) -> "SharedFile":
        if self._process != _torchobj.process_number() and not process.in_worker():
            _Shared.__init__(self, self._file.content())
        return self._file

    def _values(self) -> npt.NDArray[np.int64]:
        """The content as integers."""
        return self._own().numbers

    def __getstate__(self) -> dict[str, Any]:
        if process.is_pickling_for_spawn():
            return {"process": self._process, "descriptors": Descriptors.to_new_process(self._own().descriptor)}
        return {"content": self._own().content()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "content" in state:
            _Shared.__init__(self, state["content"])
        else:
            self._process, self._file = state["process"], SharedFile(*state["descriptors"].copies())


class SharedNumber(_Shared):
    """A number that a process and its workers set and read; 0 at first."""

    def __init__(self) -> None:
        super().__init__(bytes(8))

    def get(self) -> int:
        """The number."""
        return int(self._values()[0])

    def set(self, number: int) -> None:
        """Sets it for this process and its workers."""
        self._values()[0] = number


class SharedEpoch(_Shared):
    """Numbers the passes over a dataset of a process and its workers, unless an epoch is set, which is that of all
    passes until another one is set. Also which warnings one of them has logged.

    All workers of a pass must have its number. Where no loader of torchobj tells them, each determines it: the first
    one takes the next number and records it with the identity of the pass.
    """

    def __init__(self) -> None:
        super().__init__(bytes(8 * (_PASSES + 3 * _RECENT)))

    def get(self) -> int:
        """The epoch that was set, or that of the pass that was counted last."""
        return int(self._values()[_EPOCH])

    def next(self) -> int:
        """The epoch of the pass that starts next."""
        numbers = self._values()
        return int(numbers[_EPOCH]) + int(numbers[_BEGUN] and not numbers[_IS_SET])

    def begin(self, epoch: int) -> None:
        """Counts a pass of this epoch, unless an epoch was set, or later passes were counted, meanwhile."""
        numbers = self._values()
        if not numbers[_IS_SET] and epoch >= numbers[_EPOCH]:
            numbers[_EPOCH], numbers[_BEGUN] = epoch, 1

    def of_pass(self, tag: int, workers: int) -> int:
        """The epoch of a pass of several workers, which the first of them counts.

        Args:
            tag: Identifies the pass, and is not 0. Loops that seed torch have the same one in each pass: it is another
                pass once all workers have begun the one before.
            workers: Number of workers.
        """
        with self._own().locked():
            numbers = self._values()
            begun = numbers[_PASSES:].reshape(_RECENT, 3)
            found = np.flatnonzero((begun[:, 0] == tag) & (begun[:, 2] > 0))
            if not len(found):
                epoch = self.next()
                begun[1:] = begun[:-1].copy()
                begun[0] = tag, epoch, workers
                self.begin(epoch)
                found = np.array([0])
            begun[found[0], 2] -= 1
            return int(begun[found[0], 1])

    @property
    def is_set(self) -> bool:
        """Whether it was set, so that passes are not counted."""
        return bool(self._values()[_IS_SET])

    def set(self, number: int, *, is_set: bool = True) -> None:
        """Sets the epoch of the next passes; without `is_set` of the next pass only."""
        numbers = self._values()
        numbers[_PASSES:] = 0
        numbers[_EPOCH], numbers[_BEGUN], numbers[_IS_SET] = number, 0, is_set

    def is_first(self, key: str) -> bool:
        """Whether this is the first call with this kind of warning in all these processes, in any epoch."""
        numbers, flag = self._values(), _WARNED + _KINDS.index(key)
        is_first = not numbers[flag]
        numbers[flag] = 1
        return bool(is_first)


class SharedCounter(_Shared):
    """A counter of a process and its workers: the length of a file, to which each appends a byte.

    The system appends one byte after the other, in any number of processes and threads, and without a lock.
    """

    def __init__(self) -> None:
        super().__init__(b"")

    def add(self) -> None:
        """Adds one, also to the counter of the loader that reads."""
        counters = of_loader()
        for counter in (self, None if counters is None else counters.failed):
            if counter is not None:
                try:
                    os.write(counter._own().descriptor, b"\0")
                except OSError as error:
                    warn_once(FORKED, "failed samples are not counted: %s", error, key="closed counter")

    def total(self) -> int:
        """The sum over all processes; 0 if this program has closed the file."""
        return len(self._own().content())


#: Number of workers of which each adds to sums of its own.
_ADDING = 128


class SharedSums(_Shared):
    """Sums that a process and its workers add to, without a lock: each worker has sums of its own.

    Args:
        count: Number of sums.
    """

    def __init__(self, count: int) -> None:
        super().__init__(bytes(8 * _ADDING * count))

    def add(self, *numbers: int) -> None:
        """Adds a number to each sum."""
        info = torch.utils.data.get_worker_info()
        self._values().reshape(_ADDING, -1)[0 if info is None else info.id % _ADDING] += numbers

    def totals(self) -> list[int]:
        """The sums over all processes."""
        return [int(total) for total in self.by_worker().sum(axis=0)]

    def by_worker(self) -> npt.NDArray[np.int64]:
        """A copy of the sums of each worker, one row for each."""
        return self._values().reshape(_ADDING, -1).copy()


class LoaderCounters(NamedTuple):
    """What the datasets of a loader count for it, in its process and its workers."""

    failed: SharedCounter
    """Failed samples."""
    limited: SharedSums
    """Objects after which an iterable dataset announced no more, because of the memory budget."""


#: The counters of the loader for which this thread reads.
_of_reading_loader: ContextVar[LoaderCounters | None] = ContextVar("torchobj_counters_of_loader", default=None)

#: The counters of the loader of this worker, by number of the process, because a fork copies it.
_of_loader: dict[int, LoaderCounters] = {}


def of_loader() -> LoaderCounters | None:
    """The counters of the loader for which this thread, or this worker, reads."""
    return _of_reading_loader.get() or _of_loader.get(_torchobj.process_number())


def also_counting(counters: LoaderCounters) -> contextlib.AbstractContextManager[None]:
    """Within the block, what this thread counts is also counted for a loader."""
    return setting(_of_reading_loader, counters)


def count_also(counters: LoaderCounters) -> None:
    """In a worker: what it counts is also counted for its loader."""
    _of_reading_loader.set(None)
    _of_loader.clear()
    _of_loader[_torchobj.process_number()] = counters


class SharedFile:
    """A file without a name, opened to append. Closed when it is deleted."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._length = Descriptor(descriptor), os.fstat(descriptor).st_size

    @property
    def descriptor(self) -> int:
        """The descriptor, to be used at once.

        Raises:
            OSError: This program has closed it, and may have opened another file under its number.
        """
        return self._descriptor.number()

    @classmethod
    def create(cls, name: str, content: bytes = b"") -> "SharedFile":
        """A new file.

        Args:
            name: Its name in the tables of the system.
            content: Its content, in bytes.
        """
        try:
            file = cls(os.memfd_create(name))
        except (AttributeError, OSError):  # Not Linux, or forbidden by a sandbox.
            with tempfile.TemporaryFile() as unnamed:
                file = cls(os.dup(unnamed.fileno()))
        os.write(file.descriptor, content)
        file._length = len(content)
        flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(file.descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        return file

    def length(self) -> int:
        """Number of bytes."""
        return os.fstat(self.descriptor).st_size

    def content(self) -> bytes:
        """All bytes. If this program has closed the file, those in memory, or zeros."""
        if self._descriptor.is_closed():
            return self.numbers.tobytes() if "numbers" in self.__dict__ else bytes(self._length)
        return os.pread(self.descriptor, self.length(), 0)

    @functools.cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The content as integers, in the memory of the file; if this program has closed it, zeros of this process."""
        if self._descriptor.is_closed():
            return np.frombuffer(bytearray(self._length), np.int64)
        return np.frombuffer(mmap.mmap(self.descriptor, self.length()), np.int64)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes other processes. The system unlocks the file of a process that is killed."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
