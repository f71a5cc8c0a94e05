"""Passes file descriptors to processes that are being spawned."""

import multiprocessing.context
import multiprocessing.reduction
import os
import weakref
from typing import Any, ClassVar

__all__ = ["Descriptors"]


class Descriptors:
    """Descriptors of one owner for a process that is being spawned, shared by all objects that need them.

    A spawned process inherits a descriptor under its number, which can be passed only once.
    """

    # By the process that is being spawned, and the numbers.
    _of_process: ClassVar["weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Descriptors]]"] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._sent = [multiprocessing.reduction.DupFd(number) for number in numbers]
        self._received: list[int] = []

    @classmethod
    def to_new_process(cls, *numbers: int) -> "Descriptors":
        """The descriptors for the process that is being spawned."""
        sent = cls._of_process.setdefault(multiprocessing.context.get_spawning_popen(), {})
        if numbers not in sent:
            sent[numbers] = cls(numbers)
        return sent[numbers]

    def copies(self) -> list[int]:
        """Duplicates of the descriptors, owned by the caller, in the spawned process."""
        if not self._received:
            self._received = [sent.detach() for sent in self._sent]
        return [os.dup(number) for number in self._received]

    def __del__(self) -> None:
        for number in self._received:
            os.close(number)
