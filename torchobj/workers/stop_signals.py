"""Signals that ask a rank to stop, such as SIGTERM of a preemption: noted in the rank, and survived by its workers.

The handlers of a `StopSignals` only note the time of the first signal, and call the handler that was there. What
follows is decided by others. A handler whose `StopSignals` has ended stays transparent, because a handler that a
framework installed later may still call it.

A launcher signals the DataLoader workers too, if it signals a process group or a container. torch's worker would end,
and the rank would fail with "DataLoader worker is killed by signal". So workers that start while signals are handled
block them, and a thread ends the worker if the signal is from its trainer. The rank blocks them only while it forks or
spawns: other children get its mask and its earlier handlers.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing import forkserver, resource_tracker
from types import FrameType
from typing import Any, TypeAlias

from torch.utils.data._utils.worker import _worker_loop

from torchobj.exceptions import ConfigError

__all__ = ["StopSignals", "blocked", "outlive_others", "prepare_workers"]

logger = logging.getLogger("torchobj")

_Previous: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"

#: What the process does with a signal if the program installed no handler: not called while signals are handled.
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)

#: Signals that cannot be handled, or are of a thread that fails, or of a child that ended.
_OTHERS = {getattr(signal, f"SIG{name}") for name in ("KILL", "STOP", "CHLD", "SEGV", "BUS", "FPE", "ILL")}


class _Handler:
    """A handler that calls the one that was there."""

    def __init__(self, owner: "StopSignals", previous: _Previous) -> None:
        self.owner, self.previous = owner, previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.owner.receive(number)
        if callable(self.previous) and self.previous not in _DEFAULTS:
            self.previous(number, frame)
        elif number not in _handled() and self.previous is not signal.SIG_IGN:
            # Called by the handler of another program, after all have ended.
            signal.signal(number, self.previous)
            os.kill(os.getpid(), number)


class StopSignals:
    """Handles signals, from its creation until `end`. Several may handle the same signal.

    A signal that comes later than `deadline_s` after the first one ends this: the program has not stopped in time, or
    no longer asks, and the signal has the effect that it has without this.

    Args:
        signals: Their numbers.
        deadline_s: Time from the first signal until the program must have ended, in seconds.

    Raises:
        ConfigError: A signal cannot be handled, or this is not the main thread.
    """

    def __init__(self, signals: Collection[int], deadline_s: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("on_signal: only the main thread of a process can handle signals; call it there")
        for number in signals:
            _check(number)
        self.numbers = frozenset(signals)
        if not self.numbers:
            raise ConfigError("on_signal: name at least one signal")
        #: The first signal, and its time by `time.monotonic`; None if there was none.
        self.received: int | None = None
        self.received_s: float | None = None
        self._deadline_s = deadline_s
        self._handlers: dict[int, _Handler] = {}
        _register_at_fork()
        _active.append(self)
        self.keep()

    @property
    def is_active(self) -> bool:
        """Whether signals are handled: `end` was not called, and this is not a forked child."""
        return self in _active

    def receive(self, number: int) -> None:
        """Notes a signal, unless this has ended."""
        if self.received_s is None and self.is_active:
            self.received, self.received_s = number, time.monotonic()
        elif self.received_s is not None and time.monotonic() > self.received_s + self._deadline_s:
            self.end()

    def keep(self) -> None:
        """Handles the signals again for which another handler was installed, which is then called too."""
        for number in self.numbers:
            current = signal.getsignal(number)
            if current is not self._handlers.get(number) and not _is_called_by(self, current):
                if threading.current_thread() is not threading.main_thread():
                    return
                if number in self._handlers:
                    logger.debug("the handler of %s was replaced by %r: both are called", _name(number), current)
                self._handlers[number] = handler = _Handler(self, current)
                signal.signal(number, handler)

    def end(self) -> None:
        """Restores the handlers, except where another program has installed one in the meantime."""
        if self.is_active:
            _active.remove(self)
        if threading.current_thread() is threading.main_thread():
            for number in self.numbers:
                _restore(number)


#: Those that have not ended.
_active: list[StopSignals] = []


def _handled() -> frozenset[int]:
    """Returns the signals that are handled."""
    return frozenset().union(*(each.numbers for each in _active))


def _outlived() -> frozenset[int]:
    """Returns the signals that workers outlive: none on macOS, where a process cannot know who sent a signal."""
    return _handled() if hasattr(signal, "sigwaitinfo") else frozenset()


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


def _check(number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number not in signal.valid_signals() - _OTHERS:
        raise ConfigError(f"on_signal: {number!r} is not a signal that asks to stop, such as signal.SIGTERM")
    if signal.getsignal(number) is None:
        raise ConfigError(f"on_signal: {_name(number)} has a handler that is not of Python, which cannot be called")


def _is_called_by(owner: StopSignals, current: _Previous) -> bool:
    """Whether a handler is one of others here, after which one of the owner is called."""
    while isinstance(current, _Handler):
        if current.owner is owner:
            return True
        current = current.previous
    return False


def _restore(number: int) -> None:
    """Removes the handlers that have ended, as far as they are on top."""
    current = first = signal.getsignal(number)
    while isinstance(current, _Handler) and current.owner not in _active:
        current = current.previous
    if current is not first:
        signal.signal(number, current)


_masks = threading.local()


@functools.cache
def _register_at_fork() -> None:
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_start_child)


def _block() -> None:
    # Until the child has its handlers: none of the signals is lost for the parent, or ends a worker.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _handled())


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _start_child() -> None:
    numbers, outlived = _handled(), _outlived()
    _active.clear()
    for number in numbers:
        _restore(number)
    # Of `multiprocessing.popen_fork.Popen._launch`.
    child = sys._getframe(1).f_locals.get("process_obj")
    if outlived and getattr(child, "_target", None) is _worker_loop:
        outlive_others(outlived, os.getppid())
    else:
        _unblock()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Blocks the signals within the block, in which processes are spawned: these inherit it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _outlived())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def prepare_workers(start_method: str) -> Callable[[], None] | None:
    """Prepares the start of workers that are not forked from this process.

    Returns:
        What each worker has to call at its start; None if no signals are handled, or the workers are forked.
    """
    numbers = _outlived()
    if not numbers or start_method == "fork":
        return None
    if start_method == "forkserver":
        name = "torchobj.workers.forkserver_signals"
        before = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
        multiprocessing.set_forkserver_preload([*before, *({name} - set(before))])
        # Before the signals are blocked: all children of the server would inherit that.
        forkserver.ensure_running()
    # Its start would unblock them.
    resource_tracker.ensure_running()
    return functools.partial(outlive_others, numbers, os.getpid())


def outlive_others(numbers: Collection[int], trainer: int) -> None:
    """In a worker: only its trainer can end it by these signals, or the worker itself. Before it has other threads.

    Args:
        numbers: The signals.
        trainer: The pid of its trainer, which is its parent, or has started a forkserver.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    parent = os.getppid()

    fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_exec_unblocked(*arguments: Any) -> Any:
        # A program inherits the mask of the thread, and could not be terminated.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        try:
            return fork_exec(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    # It inherits the mask too.
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]
    subprocess._fork_exec = fork_exec_unblocked  # type: ignore[attr-defined]

    def wait() -> None:
        while signal.sigwaitinfo(numbers).si_pid not in (trainer, os.getpid()) and os.getppid() == parent:
            pass
        # As torch's own handler: the trainer waits for the exit only.
        os._exit(0)

    threading.Thread(target=wait, name="torchobj-signals", daemon=True).start()
