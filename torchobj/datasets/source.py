"""Objects as a source of the prefetcher: in the process that made it, and in its DataLoader workers."""

import logging
import multiprocessing.context
import multiprocessing.reduction
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, Union

from torchobj import _torchobj
from torchobj.datasets import unannounced, workers
from torchobj.exceptions import StoreError
from torchobj.memory import budget_bytes, times_set

logger = logging.getLogger("torchobj")

SUPPORTED = sys.platform == "linux"

#: How many times the budget had been set when the system refused a process the memory for objects that are read ahead.
#: A forked worker inherits its parent's entry.
_refused: dict[int, int] = {}

Native = TypeVar("Native", bound=Union["_torchobj.NativeSource", "_torchobj.RefSource"])


class Descriptors:
    """The arena of an owner on its way to one new process: all sources of that owner that go there share this.

    A process that is spawned inherits a descriptor under its number, which may be named once.
    """

    # By the new process, while it is being started, and the owner.
    _of_process: ClassVar["weakref.WeakKeyDictionary[Any, dict[int, Descriptors]]"] = weakref.WeakKeyDictionary()

    def __init__(self, source: "_torchobj.NativeSource | _torchobj.RefSource") -> None:
        self._sent = [multiprocessing.reduction.DupFd(number) for number in source.descriptors()]
        self._received: list[int] = []

    @classmethod
    def to_new_process(cls, source: "_torchobj.NativeSource | _torchobj.RefSource") -> "Descriptors":
        """Those that go with `source` to the process that is being started."""
        sent = cls._of_process.setdefault(multiprocessing.context.get_spawning_popen(), {})
        if source.owner not in sent:
            sent[source.owner] = cls(source)
        return sent[source.owner]

    def copies(self) -> list[int]:
        """Copies, the caller's, in the process that they went to."""
        if not self._received:
            self._received = [sent.detach() for sent in self._sent]
        return [os.dup(number) for number in self._received]

    def __del__(self) -> None:
        for number in self._received:
            os.close(number)


class Attachment:
    """A source on its way to a worker that is started by spawn or forkserver."""

    def __init__(self, source: "_torchobj.NativeSource | _torchobj.RefSource") -> None:
        self._of = (source.owner, source.number)
        self._descriptors = Descriptors.to_new_process(source)

    def attach(self, attach: Callable[[int, int, int, int], Native]) -> Native:
        """The source, in the worker."""
        file, bell = self._descriptors.copies()
        return attach(*self._of, file, bell)


def is_refused() -> bool:
    """Whether the system refused this process the memory for objects that are read ahead, under the budget of now."""
    return _refused.get(os.getpid()) == times_set()


def _refuse(error: OSError) -> None:
    if times_set() not in _refused.values():
        logger.warning(
            "%s; without it nothing is read ahead, and each DataLoader worker reads for itself; "
            "torchobj.set_budget(bytes) asks the system again",
            error,
        )
    _refused[os.getpid()] = times_set()


def _is_started() -> bool:
    """Whether this process has a prefetcher, made now if it had none."""
    if is_refused():
        return False
    try:
        _torchobj.start_prefetcher(budget_bytes())
    except StoreError:
        # What any read needs is refused too.
        raise
    except OSError as error:
        _refuse(error)
        return False
    return True


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
        """The source, made at its first use.

        None in a worker that was started before there was one, and where the system refuses the shared memory for it.

        Args:
            make: Makes it, of a budget in bytes.
            attach: Makes it in a spawned worker, of owner, number, and the descriptors of the arena and its bell.
        """
        here = os.getpid()
        if here in self._made:
            return self._made[here]
        if not workers.in_worker():
            return self._made.setdefault(here, make(budget_bytes())) if _is_started() else None
        if self._attachment is not None:
            workers.end_with_the_trainer()
            attachment, self._attachment = self._attachment, None
            try:
                self._made[here] = attachment.attach(attach)
            except OSError as error:
                # A limit of the address space, of which a spawned worker maps its own.
                _refuse(error)
                return None
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
