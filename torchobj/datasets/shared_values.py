"""The epoch and the counters that a dataset shares with its DataLoader workers."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.utils.data

from torchobj.datasets import worker_process
from torchobj.datasets.descriptors import Descriptors

#: What is warned of once; each has a flag of its own.
Warned = Literal["division", "uneven", "repeated", "no samples"]
_KINDS: tuple[Warned, ...] = ("division", "uneven", "repeated", "no samples")

#: Positions of the values of an epoch: its number, whether a pass of it has begun, whether it was set, the flag of each
#: kind of warning, and the identities of the most recent passes of workers, followed by their epochs.
_EPOCH, _BEGUN, _IS_SET, _WARNED = range(4)
_TAGS = _WARNED + len(_KINDS)
_RECENT = 8


class _SharedValues:
    """Integers in memory shared by the process that created them and its DataLoader workers.

    Any other process that receives a copy, such as a rank of `mp.spawn`, gets integers of its own.
    """

    def __init__(self, numbers: list[int]) -> None:
        self._process = os.getpid()
        self._numbers = _in_shared_memory(numbers)

    def _values(self) -> torch.Tensor:
        if self._process != os.getpid() and not worker_process.in_worker():
            self._numbers, self._process = _in_shared_memory(self._numbers.tolist()), os.getpid()
        return self._numbers

    def __getstate__(self) -> dict[str, Any]:
        if worker_process.is_pickling_for_spawn():
            return self.__dict__
        return {"numbers": self._values().tolist()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "numbers" in state:
            self._process, self._numbers = os.getpid(), _in_shared_memory(state["numbers"])
        else:
            self.__dict__.update(state)


class SharedNumber(_SharedValues):
    """A number that one process sets and its workers read."""

    def __init__(self, number: int) -> None:
        super().__init__([number])

    def get(self) -> int:
        """The number."""
        return int(self._values()[0])

    def set(self, number: int) -> None:
        """Sets it for this process and its workers."""
        self._values()[0] = number


class SharedEpoch(_SharedValues):
    """Numbers the passes over a dataset of a process and its workers, unless an epoch is set, which is that of all
    passes until another one is set. Also which warnings one of them has logged.

    All workers of a pass must have its number. Where no loader of torchobj tells them, each determines it: the first
    one takes the next number and records it with the identity of the pass. Nothing locks: workers that start a pass at
    the same time record the same.
    """

    def __init__(self) -> None:
        super().__init__([0] * (_TAGS + 2 * _RECENT))

    def get(self) -> int:
        """The epoch that was set, or that of the pass that was counted last."""
        return int(self._values()[_EPOCH])

    def next(self) -> int:
        """The epoch of the pass that starts next."""
        numbers = self._values()
        return int(numbers[_EPOCH]) + int(numbers[_BEGUN] and not numbers[_IS_SET])

    def begin(self, epoch: int) -> None:
        """Counts a pass of this epoch."""
        numbers = self._values()
        numbers[_EPOCH], numbers[_BEGUN] = epoch, 1

    def of_pass(self, tag: int) -> int:
        """The epoch of a pass of several workers, which the first of them counts. `tag` identifies it, and is not 0."""
        numbers = self._values()
        # Read before the tags: once it counts the pass, its tag is there.
        epoch = self.next()
        tags = numbers[_TAGS : _TAGS + _RECENT].tolist()
        if tag in tags:
            epoch = int(numbers[_TAGS + _RECENT + tags.index(tag)])
        else:
            # Passes that run at the same time have different places, unless an epoch is set, which is that of all.
            place = _TAGS + epoch % _RECENT
            numbers[place + _RECENT] = epoch
            numbers[place] = tag
        if epoch >= numbers[_EPOCH]:
            self.begin(epoch)
        return epoch

    @property
    def is_set(self) -> bool:
        """Whether it was set, so that passes are not counted."""
        return bool(self._values()[_IS_SET])

    def set(self, number: int, *, is_set: bool = True) -> None:
        """Sets the epoch of the next passes; without `is_set` of the next pass only."""
        numbers = self._values()
        numbers[_TAGS:] = 0
        numbers[_EPOCH], numbers[_BEGUN], numbers[_IS_SET] = number, 0, is_set

    def is_first_warning(self, of: Warned) -> bool:
        """True for the first call with this argument in all these processes, in any epoch."""
        numbers, flag = self._values(), _WARNED + _KINDS.index(of)
        is_first = not numbers[flag]
        numbers[flag] = 1
        return bool(is_first)


class SharedCounter:
    """A counter of a process and its workers: the length of a file without a name, to which each appends a byte.

    The system appends one byte after the other, in any number of processes and threads, and without a lock that a
    killed worker would leave locked. Any other process that receives a copy gets a counter of its own.
    """

    def __init__(self, count: int = 0) -> None:
        self._process, self._file = os.getpid(), _File.of_length(count)

    def add(self) -> None:
        """Adds one, also to the counter of the loader that reads."""
        of_loader = _of_reading_loader.get() or _of_loader.get(os.getpid())
        for counter in (self, of_loader):
            if counter is not None:
                os.write(counter._own().descriptor, b"\0")

    def total(self) -> int:
        """The sum over all processes."""
        return self._own().length()

    def _own(self) -> "_File":
        if self._process != os.getpid() and not worker_process.in_worker():
            self._file, self._process = _File.of_length(self._file.length()), os.getpid()
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        if worker_process.is_pickling_for_spawn():
            return {"descriptors": Descriptors.to_new_process(self._own().descriptor)}
        return {"count": self.total()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._process = os.getpid()
        sent = state.get("descriptors")
        self._file = _File.of_length(state["count"]) if sent is None else _File(*sent.copies())


#: The counter of the loader for which this thread reads.
_of_reading_loader: ContextVar[SharedCounter | None] = ContextVar("torchobj_failures_of_loader", default=None)

#: That of the loader of this worker, by process, because a fork copies it.
_of_loader: dict[int, SharedCounter] = {}


@contextlib.contextmanager
def also_counting(counter: SharedCounter) -> Iterator[None]:
    """Within the block, what this thread adds to any counter is also added to that of a loader."""
    token = _of_reading_loader.set(counter)
    try:
        yield
    finally:
        _of_reading_loader.reset(token)


def count_also(counter: SharedCounter) -> None:
    """In a worker: what is added to any counter is also added to that of its loader."""
    _of_reading_loader.set(None)
    _of_loader.clear()
    _of_loader[os.getpid()] = counter


class _File:
    """A file without a name, opened to append. Closed when it is deleted."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def of_length(cls, length: int) -> "_File":
        try:
            file = cls(os.memfd_create("torchobj-counter"))
        except (AttributeError, OSError):  # Not Linux, or forbidden by a sandbox.
            with tempfile.TemporaryFile() as unnamed:
                file = cls(os.dup(unnamed.fileno()))
        os.ftruncate(file.descriptor, length)
        flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(file.descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        return file

    def length(self) -> int:
        return os.fstat(self.descriptor).st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound, because modules are cleared before the last objects at the end of the interpreter.
        close(self.descriptor)


def _in_shared_memory(numbers: list[int]) -> torch.Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    tensor.share_memory_()
    return tensor
