"""The objects of a dataset as a source of the prefetcher, in its process and in its DataLoader workers."""

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union

from torchobj import _torchobj
from torchobj.datasets import lookahead_warning, worker_process
from torchobj.datasets.descriptors import Descriptors
from torchobj.datasets.memory_budget import budget_bytes, times_set
from torchobj.exceptions import StoreError

logger = logging.getLogger("torchobj")

SUPPORTED = sys.platform == "linux"

#: Number of times the budget had been set when the system refused the shared memory, by process. A forked worker
#: inherits the entry of its parent.
_refused: dict[int, int] = {}

Native = TypeVar("Native", bound=Union["_torchobj.NativeSource", "_torchobj.RefSource"])


class Attachment:
    """A source that is being sent to a worker started by spawn or forkserver."""

    def __init__(self, source: "_torchobj.NativeSource | _torchobj.RefSource") -> None:
        self._identity = (source.owner, source.number)
        self._descriptors = Descriptors.to_new_process(*source.descriptors())

    def attach(self, attach: Callable[[int, int, int, int], Native]) -> Native:
        """The source, in the worker."""
        file, eventfd = self._descriptors.copies()
        return attach(*self._identity, file, eventfd)


def is_refused() -> bool:
    """Whether the system refused the shared memory to this process, under the current budget."""
    return _refused.get(os.getpid()) == times_set()


def _record_refusal(error: OSError) -> None:
    if times_set() not in _refused.values():
        logger.warning(
            "%s; without it nothing is read ahead, and each DataLoader worker reads its own objects. Call "
            "torchobj.set_memory_budget(budget_bytes) to try again with a smaller budget",
            error,
        )
    _refused[os.getpid()] = times_set()


def start_prefetcher() -> bool:
    """Starts the prefetcher of this process if necessary. Returns whether there is one."""
    if is_refused():
        return False
    try:
        _torchobj.start_prefetcher(budget_bytes())
    except StoreError:
        # The system also refused the resources of ordinary reads.
        raise
    except OSError as error:
        _record_refusal(error)
        return False
    return True


class Source(Generic[Native]):
    """Reads the objects of a dataset through the prefetcher of the process in which the dataset was created.

    Workers of a DataLoader use that process, however they were started. Any other process that receives a copy of the
    dataset uses a prefetcher of its own.
    """

    def __init__(self) -> None:
        # By process, because a fork copies it. Only setdefault writes, which is atomic, so that no lock is needed that
        # could be held during a fork.
        self._sources: dict[int, Native] = {}
        self._attachment: Attachment | None = None

    def native(self, make: Callable[[int], Native], attach: Callable[[int, int, int, int], Native]) -> Native | None:
        """The source, created at the first use.

        None in a worker that was started before the source existed, and if the system refuses the shared memory.

        Args:
            make: Creates the source, given a budget in bytes.
            attach: Creates it in a spawned worker, given owner, number, and the descriptors of the arena and its
                eventfd.
        """
        pid = os.getpid()
        if pid in self._sources:
            return self._sources[pid]
        if not worker_process.in_worker():
            return self._sources.setdefault(pid, make(budget_bytes())) if start_prefetcher() else None
        if self._attachment is not None:
            worker_process.exit_with_trainer()
            attachment, self._attachment = self._attachment, None
            try:
                self._sources[pid] = attachment.attach(attach)
            except OSError as error:
                # The address space of a spawned worker may be limited separately.
                _record_refusal(error)
                return None
            return self._sources[pid]
        # A forked worker inherits the sources of its ancestors too.
        parent = multiprocessing.parent_process()
        return None if parent is None or parent.pid is None else self._sources.get(parent.pid)

    @property
    def number(self) -> int | None:
        """The number of the source for announcements; None if there is no source, and in workers, which do not
        announce.
        """
        source = self._sources.get(os.getpid())
        return None if source is None or source.owner != os.getpid() else source.number

    def __getstate__(self) -> dict[str, Any]:
        source = self._sources.get(os.getpid())
        spawning = worker_process.is_pickling_for_spawn()
        return {
            "_sources": {},
            "_attachment": Attachment(source) if spawning and source is not None else None,
            "_warning_disabled": spawning and lookahead_warning.is_disabled(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("_warning_disabled"):
            lookahead_warning.disable()
        self.__dict__.update(state)
