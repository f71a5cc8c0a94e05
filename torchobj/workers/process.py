"""DataLoader workers: whether this process is one, whether a pickle is for a process that is being spawned, the rank
that the worker belongs to, and its exit when the trainer dies. The datasets decide what is pickled. Also what each
worker repeats, and one of them logs.
"""

import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.context
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.utils.data

from torchobj import _torchobj
from torchobj.warn_once import FORKED

logger = logging.getLogger("torchobj")


class Rank(NamedTuple):
    """A rank of a job, and the number of ranks."""

    number: int
    world_size: int


def in_worker() -> bool:
    """Whether this process is a DataLoader worker."""
    return torch.utils.data.get_worker_info() is not None


def is_first_to_repeat(what: str) -> bool:
    """Whether this is the first worker of a loader, and that of no other loader has called this before. To be called
    where each worker repeats what its parent should have done for all of them.
    """
    info = torch.utils.data.get_worker_info()
    return info is not None and info.id == 0 and FORKED.is_first(what)


class ProcessLock:
    """A reentrant lock within a process: a signal handler may enter it again.

    A copy has a lock of its own, and so has a forked child: another thread may hold the lock at the time of the fork.
    """

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}

    def __enter__(self) -> None:
        self._locks.setdefault(_torchobj.process_number(), threading.RLock()).acquire()

    def __exit__(self, *raised: object) -> None:
        if (lock := self._locks.get(_torchobj.process_number())) is not None:
            lock.release()

    def __reduce__(self) -> Any:
        return ProcessLock, ()


class _NotOfThisThread(logging.Filter):
    """Drops the messages of the thread that created it."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextlib.contextmanager
def logged_once(what: str) -> Iterator[None]:
    """Within the block, of the workers that repeat `what` only the first one logs, as `is_first_to_repeat` says."""
    if not in_worker() or is_first_to_repeat(what):
        yield
        return
    others = _NotOfThisThread()
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def is_pickling_for_spawn() -> bool:
    """Whether the current pickling is for a process that is being spawned, such as a DataLoader worker."""
    return multiprocessing.context.get_spawning_popen() is not None


def rank(recorded: Rank | None) -> Rank:
    """The rank of this process, or of the trainer that it works for.

    A forked worker inherits the state of torch.distributed. A spawned worker uses the rank that its parent recorded.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Rank(distributed.get_rank(), distributed.get_world_size())
    return recorded if recorded is not None and in_worker() else Rank(0, 1)


@functools.cache
def exit_with_trainer() -> None:
    """Ends this worker when its trainer dies, in the cases that torch does not handle.

    torch's workers watch their parent process. With forkserver the parent is the server, which lives as long as its
    children, so that they would hold the arena forever. To be called in DataLoader workers only; idempotent.
    """
    trainer = multiprocessing.parent_process()
    if trainer is None or trainer.pid == os.getppid():
        return

    def wait() -> None:
        trainer.join()
        # The signal with which the trainer itself ends unresponsive workers.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="torchobj-trainer", daemon=True).start()
