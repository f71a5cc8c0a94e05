"""Integers in shared memory: the epoch and the counters that a dataset shares with its DataLoader workers."""

import os
from typing import Any

import torch
import torch.utils.data

from torchobj.datasets import worker_process

#: Number of integers of a counter: one for the process of the dataset, the others by worker number.
_COUNTERS = 256


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


class SharedEpoch(_SharedValues):
    """The epoch, set by one process and read by its workers; and whether one of them has logged a warning."""

    def __init__(self) -> None:
        super().__init__([0, 0])

    def get(self) -> int:
        """The current epoch."""
        return int(self._values()[0])

    def set(self, number: int) -> None:
        """Sets the epoch for this process and its workers."""
        self._values()[0] = number

    def is_first_warning(self) -> bool:
        """True for the first call in all these processes, in any epoch."""
        numbers = self._values()
        is_first = not numbers[1]
        numbers[1] = 1
        return bool(is_first)


class SharedCounter(_SharedValues):
    """A counter of a process and its workers. Each process writes an integer of its own, without a lock."""

    def __init__(self) -> None:
        super().__init__([0] * _COUNTERS)

    def add(self) -> None:
        """Adds one."""
        info = torch.utils.data.get_worker_info()
        self._values()[0 if info is None else 1 + info.id % (_COUNTERS - 1)] += 1

    def total(self) -> int:
        """The sum over all processes."""
        return int(self._values().sum())


def _in_shared_memory(numbers: list[int]) -> torch.Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    tensor.share_memory_()
    return tensor
