"""A save that goes on in the background."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from logging import getLogger

__all__ = ["SaveHandle"]

logger = getLogger("torchobj")

_under_way: set["SaveHandle"] = set()


def _say_at_exit() -> None:
    for handle in list(_under_way):
        logger.warning("the process ends when step %d is saved, which is under way", handle.step)


# The public `atexit` comes when threads were waited for, which is too late to say why.
threading._register_atexit(_say_at_exit)  # type: ignore[attr-defined]
# The threads are the parent's.
os.register_at_fork(after_in_child=_under_way.clear)


class SaveHandle:
    """A save that goes on in the background; what `CheckpointManager.save_async` returns.

    An error that nobody asks for is not lost: the manager raises it at its next save, `wait` or `close`, and it is in
    the log.

    Args:
        step: The step that is saved.
        work: What saves it.
    """

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self._step, self._work = step, work
        self._future: Future[None] = Future()
        self._told = False

    def start(self) -> None:
        """Begins; the manager does, which holds the handle by then. An interruption of this call does not end the save.

        Raises:
            RuntimeError: The system gives no thread; the save has ended with it.
        """
        _under_way.add(self)
        try:
            # No daemon: a process that ends waits for its checkpoint.
            threading.Thread(target=self._run, name=f"torchobj-save-{self._step}").start()
        except RuntimeError as error:
            _under_way.discard(self)
            self._future.set_exception(error)
            raise

    def _run(self) -> None:
        failed: BaseException | None = None
        try:
            self._work()
        except BaseException as error:
            logger.error("step %d was not saved: %s: %s", self._step, type(error).__name__, error)  # noqa: TRY400  it is raised too
            logger.debug("step %d was not saved", self._step, exc_info=True)
            failed = error
        # What it holds of the state is free before anybody who waits goes on.
        del self._work
        _under_way.discard(self)
        if failed is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(failed)

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self._step

    def done(self) -> bool:
        """Whether it has ended, committed or failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Waits until the step is committed.

        Args:
            timeout: At most so many seconds.

        Raises:
            TimeoutError: It has not ended.
            Exception: What it failed with.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until it has ended, and returns what it failed with, or None.

        Raises:
            TimeoutError: It has not ended in so many seconds.
        """
        error = self._future.exception(timeout)
        self._told = True
        return error

    def untold(self) -> BaseException | None:
        """Waits, and returns an error that nobody was told of yet."""
        return None if self._told else self.exception()
