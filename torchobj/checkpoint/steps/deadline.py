"""Ends the calls of a save by a deadline. Does not decide what a save that ended early leaves."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from torchobj import _torchobj
from torchobj.config.checks import check
from torchobj.exceptions import CheckpointError
from torchobj.ranks.meeting import Ranks

__all__ = ["Deadline", "DeadlineError", "check_seconds"]

_Result = TypeVar("_Result")

#: Share of the time, and maximum number of seconds, in which calls that were cancelled end, and the ranks agree.
_MARGIN, _MAX_MARGIN_S = 0.25, 2.0


class DeadlineError(CheckpointError):
    """A save did not end by its deadline."""


class Deadline:
    """The time by which a save must have ended.

    Args:
        end_s: The time, by `time.monotonic`.
    """

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        #: When calls of stores are cancelled.
        self._cancel_s = end_s - min(_MAX_MARGIN_S, _MARGIN * max(end_s - time.monotonic(), 0))

    def wait(self, future: "Future[Any]") -> bool:
        """Waits for work in another thread until its calls must be cancelled. Returns whether it has ended."""
        wait([future], max(self._cancel_s - time.monotonic(), 0))
        return future.done()

    def call(self, function: Callable[[], _Result], ranks: Ranks, unended: Callable[[], str]) -> _Result:
        """Calls a function in another thread, whose calls of stores end in time, and returns or raises its outcome.

        Args:
            function: The function.
            ranks: The ranks that it meets. They cannot meet again if it has not ended.
            unended: Returns the message of an error.

        Raises:
            DeadlineError: The function has not ended. The process does not wait for it at exit.
            SystemExit: Its calls of stores were cancelled.
        """
        cancellation, future = _torchobj.Cancellation(), Future[_Result]()

        def run() -> None:
            cancellation.enter()
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  raised by the caller
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="torchobj-deadline", daemon=True).start()
        try:
            self.wait(future)
        finally:
            # Also if the wait is interrupted.
            cancellation.cancel()
        wait([future], max(self._end_s - time.monotonic(), 0))
        if not future.done():
            ranks.leave(message := unended())
            raise DeadlineError(message)
        return future.result()


def check_seconds(name: str, value: object) -> None:
    """Checks a time in seconds.

    Raises:
        ConfigError: It is not a number above 0, or is more than a day.
    """
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 86_400
    check(name, value, "a number of seconds, more than 0 and at most 86400", ok=is_time)
