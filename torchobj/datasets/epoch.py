"""The number of an epoch: set by one process, read there and by its DataLoader workers, also by those that stay."""

import os
from typing import Any

import torch

from torchobj.datasets import workers


class Epoch:
    """A number in shared memory, of the process that made it and of its DataLoader workers.

    Any other process that gets a copy, as a rank of `mp.spawn` does, has a number of its own from then on.
    """

    def __init__(self, number: int = 0) -> None:
        self._process = os.getpid()
        self._word = _shared(number)

    def get(self) -> int:
        """The number, as of now."""
        return int(self._own())

    def set(self, number: int) -> None:
        """Sets it, for this process and its workers."""
        self._own().fill_(number)

    def _own(self) -> torch.Tensor:
        if self._process != os.getpid() and not workers.in_worker():
            self._word, self._process = _shared(int(self._word)), os.getpid()
        return self._word

    def __getstate__(self) -> dict[str, Any]:
        if workers.is_for_a_new_process():
            return self.__dict__
        return {"number": self.get()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "number" in state:
            self._process, self._word = os.getpid(), _shared(state["number"])
        else:
            self.__dict__.update(state)


def _shared(number: int) -> torch.Tensor:
    word = torch.tensor(number, dtype=torch.int64)
    word.share_memory_()  # type: ignore[no-untyped-call]
    return word
