"""Numbers that a dataset has in common with its DataLoader workers, also with those that stay: its epoch and counts."""

import os
from typing import Any

import torch
import torch.utils.data

from torchobj.datasets import workers

#: Places of a tally: one for the dataset's own process, and one for each worker by its number; more of them share.
_PLACES = 256


class _Shared:
    """Numbers in shared memory, of the process that made them and of its DataLoader workers.

    Any other process that gets a copy, as a rank of `mp.spawn` does, has numbers of its own from then on.
    """

    def __init__(self, numbers: list[int]) -> None:
        self._process = os.getpid()
        self._numbers = _in_shared_memory(numbers)

    def _own(self) -> torch.Tensor:
        if self._process != os.getpid() and not workers.in_worker():
            self._numbers, self._process = _in_shared_memory(self._numbers.tolist()), os.getpid()
        return self._numbers

    def __getstate__(self) -> dict[str, Any]:
        if workers.is_for_a_new_process():
            return self.__dict__
        return {"numbers": self._own().tolist()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "numbers" in state:
            self._process, self._numbers = os.getpid(), _in_shared_memory(state["numbers"])
        else:
            self.__dict__.update(state)


class Epoch(_Shared):
    """The number of an epoch: set by one process, read there and by its workers. And whether one of them has warned."""

    def __init__(self) -> None:
        super().__init__([0, 0])

    def get(self) -> int:
        """The number, as of now."""
        return int(self._own()[0])

    def set(self, number: int) -> None:
        """Sets it, for this process and its workers."""
        self._own()[0] = number

    def is_first_warning(self) -> bool:
        """Whether no process has asked this before, in any epoch."""
        numbers = self._own()
        is_first = not numbers[1]
        numbers[1] = 1
        return bool(is_first)


class Tally(_Shared):
    """A count of what happened in a process and its workers. Each adds in a place of its own, so none waits."""

    def __init__(self) -> None:
        super().__init__([0] * _PLACES)

    def add(self) -> None:
        """One more."""
        info = torch.utils.data.get_worker_info()
        self._own()[0 if info is None else 1 + info.id % (_PLACES - 1)] += 1

    def total(self) -> int:
        """How many, in all of them."""
        return int(self._own().sum())


def _in_shared_memory(numbers: list[int]) -> torch.Tensor:
    tensor = torch.tensor(numbers, dtype=torch.int64)
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
