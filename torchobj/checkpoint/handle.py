"""The handle of a save in the background."""

import logging
import os
import threading
from concurrent.futures import Future

from torchobj.checkpoint.pending_save import PendingSave

__all__ = ["SaveHandle"]

logger = logging.getLogger("torchobj")

_running: set["SaveHandle"] = set()


def _log_at_exit() -> None:
    for handle in list(_running):
        logger.warning("the process waits at exit until step %d is saved", handle.step)


# Callbacks of the public `atexit` run after threads were joined, which is too late for this message.
threading._register_atexit(_log_at_exit)  # type: ignore[attr-defined]
# The threads belong to the parent process.
os.register_at_fork(after_in_child=_running.clear)


class SaveHandle:
    """A save in the background, as returned by `CheckpointManager.save_async`.

    If the caller does not retrieve an error, the manager raises it at its next `save`, `wait` or `close`. It is also
    logged.

    Args:
        pending: The save, whose state was taken.
    """

    def __init__(self, pending: PendingSave) -> None:
        self._step, self._pending = pending.step, pending
        self._future: Future[None] = Future()
        self._is_retrieved = False

    def start(self) -> None:
        """Starts the thread. The manager has stored the handle before: an interrupt of this call does not end the save.

        Raises:
            RuntimeError: The system cannot start a thread; the save has failed.
        """
        _running.add(self)
        try:
            # Not a daemon: a process waits at exit for its checkpoint.
            threading.Thread(target=self._run, name=f"torchobj-save-{self._step}").start()
        except RuntimeError as error:
            _running.discard(self)
            self._future.set_exception(error)
            raise

    def _run(self) -> None:
        failed: BaseException | None = None
        try:
            self._pending.run()
        except BaseException as error:
            # A note may say that it is not known whether the step was committed.
            text = "; ".join([str(error), *getattr(error, "__notes__", [])])
            logger.error("step %d was not saved: %s: %s", self._step, type(error).__name__, text)  # noqa: TRY400  it is raised too
            logger.debug("step %d was not saved", self._step, exc_info=True)
            failed = error
        # Releases the state before a waiting thread continues.
        del self._pending
        _running.discard(self)
        if failed is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(failed)

    @property
    def step(self) -> int:
        """The step that is saved."""
        return self._step

    def done(self) -> bool:
        """Returns whether the save has finished, committed or failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Waits until the step is committed.

        Args:
            timeout: Maximum number of seconds.

        Raises:
            TimeoutError: The save has not finished.
            Exception: The save failed with this error.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the save has finished, and returns its error, or None.

        Args:
            timeout: Maximum number of seconds.

        Raises:
            TimeoutError: The save has not finished.
        """
        error = self._future.exception(timeout)
        self._is_retrieved = True
        return error

    def unretrieved(self) -> BaseException | None:
        """Waits, and returns an error that no caller has retrieved yet."""
        return None if self._is_retrieved else self.exception()
