"""Objects as a source of the prefetcher: in the process that made it, and in its DataLoader workers."""

import multiprocessing.reduction
import os
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union

from torchobj import _torchobj
from torchobj.datasets import unannounced, workers
from torchobj.memory import budget_bytes

SUPPORTED = sys.platform == "linux"

Native = TypeVar("Native", bound=Union["_torchobj.NativeSource", "_torchobj.RefSource"])


class Attachment:
    """A source on its way to a worker that is started by spawn or forkserver."""

    def __init__(self, source: "_torchobj.NativeSource | _torchobj.RefSource") -> None:
        file, bell = source.descriptors()
        self._of = (source.owner, source.number)
        self._descriptors = [multiprocessing.reduction.DupFd(number) for number in (file, bell)]

    def attach(self, attach: Callable[[int, int, int, int], Native]) -> Native:
        """The source, in the worker."""
        file, bell = (descriptor.detach() for descriptor in self._descriptors)
        return attach(*self._of, file, bell)


class Source(Generic[Native]):
    """Where a dataset's objects are read from: the prefetcher of the process that the dataset was made in.

    Workers of torch's DataLoader ask that process, however they were started. Any other process that gets a copy of the
    dataset reads by a prefetcher of its own.
    """

    def __init__(self) -> None:
        # By process: a fork copies it. Only setdefault writes, which is atomic: threads agree without a lock, which a
        # fork could catch held.
        self._made: dict[int, Native] = {}
        self._attachment: Attachment | None = None

    def native(self, make: Callable[[int], Native], attach: Callable[[int, int, int, int], Native]) -> Native | None:
        """The source, made at its first use. None in a worker that was started before there was one.

        Args:
            make: Makes it, of a budget in bytes.
            attach: Makes it in a spawned worker, of owner, number, and the descriptors of the arena and its bell.
        """
        here = os.getpid()
        if here in self._made:
            return self._made[here]
        if not workers.in_worker():
            return self._made.setdefault(here, make(budget_bytes()))
        if self._attachment is not None:
            self._made[here], self._attachment = self._attachment.attach(attach), None
            return self._made[here]
        return next(iter(self._made.values()), None)

    @property
    def number(self) -> int | None:
        """The name of the source for who announces; None while there is none, and in a worker, where nobody does."""
        made = self._made.get(os.getpid())
        return None if made is None or made.owner != os.getpid() else made.number

    def __getstate__(self) -> dict[str, Any]:
        made = self._made.get(os.getpid())
        spawning = workers.is_for_a_new_process()
        return {
            "_made": {},
            "_attachment": Attachment(made) if spawning and made is not None else None,
            "_known": spawning and unannounced.is_known(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("_known"):
            unannounced.know()
        self.__dict__.update(state)
