"""Requests to stop, by signals to any rank. All ranks learn of one in the same call; what they do then is theirs.

The ranks meet in one small all-reduce about every `check_every_s` seconds. Its result has the number of calls until the
next one, which the first rank computes from its clock, so that all ranks join it in the same call.
"""

import datetime
import logging
import signal
import time
from collections.abc import Collection
from types import TracebackType
from typing import Self

import torch

from torchobj.checkpoint.steps.deadline import check_seconds
from torchobj.ranks.meeting import RankGoneError, Ranks
from torchobj.workers.stop_signals import StopSignals

__all__ = ["StopRequests"]

logger = logging.getLogger("torchobj")

#: Maximum number of calls from one meeting to the next, which is near enough if steps suddenly take a second each.
#: A meeting takes less than a millisecond.
_MAX_CALLS = 16

#: What a rank sends for the time that is left if it got no signal: more than any.
_NO_SIGNAL_US = 1 << 62


class StopRequests:
    """Handles signals from its creation until `end`. As a context manager, until the end of the block.

    Args:
        signals: Their numbers.
        ranks: The ranks that meet, which have not met before.
        deadline_s: Time from the first signal until all must have ended, in seconds.
        check_every_s: Time between two meetings, in seconds.
        timeout_s: Maximum time that a rank waits for another one, in seconds.

    Raises:
        ConfigError: A signal cannot be handled, a time is not a positive number or is more than a day, or this is not
            the main thread.
    """

    def __init__(
        self,
        signals: Collection[int],
        ranks: Ranks,
        *,
        deadline_s: float,
        check_every_s: float,
        timeout_s: float,
    ) -> None:
        check_seconds("deadline_s", deadline_s)
        check_seconds("check_every_s", check_every_s)
        check_seconds("timeout_s", timeout_s)
        self._deadline_s, self._check_every_s = deadline_s, check_every_s
        self._ranks, ranks.timeout = ranks, datetime.timedelta(seconds=timeout_s)
        #: The time by which all ranks must have ended, by `time.monotonic`; None until they know of a request.
        self.end_s: float | None = None
        #: Number of calls from the last meeting to the next, of those that are left, and the time of the last one.
        self._calls = self._left = 1
        self._met_s: float | None = None
        #: Whether there is one rank: known from the first meeting on.
        self._is_alone = False
        self._signals = StopSignals(signals, deadline_s)

    def requested(self) -> bool:
        """Returns whether a rank was asked to stop: the same on all ranks, which call this equally often.

        Raises:
            RankGoneError: Another rank does not respond, or called this another number of times.
        """
        if self.end_s is None:
            self._left -= 1
            # One rank need not wait for the others.
            if self._left == 0 or (self._is_alone and self._signals.received_s is not None):
                self._meet()
        return self.end_s is not None

    def _meet(self) -> None:
        self._signals.keep()
        now_s, received_s = time.monotonic(), self._signals.received_s
        left_us = _NO_SIGNAL_US
        if received_s is not None:
            left_s = received_s + self._deadline_s - now_s
            if left_s <= 0:
                # The process lives, so that a save is worth trying.
                message = "the signal to stop came %.0f s ago, before a long step: a save has deadline_s=%s from now"
                logger.warning(message, now_s - received_s, self._deadline_s)
                left_s = self._deadline_s
            left_us = int(left_s * 1e6)
        calls, self._is_alone = self._next(now_s), not self._ranks.several
        if not self._is_alone:
            calls, left_us = self._agreed(calls if self._ranks.is_first else 0, left_us)
        self._calls = self._left = calls
        self._met_s = now_s
        if left_us != _NO_SIGNAL_US:
            self.end_s = time.monotonic() + left_us / 1e6

    def _next(self, now_s: float) -> int:
        """Returns the number of calls until the next meeting, by the time since the last."""
        if self._met_s is None:
            return 1
        per_call_s = max(now_s - self._met_s, 1e-9) / self._calls
        return max(1, min(int(self._check_every_s / per_call_s), 2 * self._calls, _MAX_CALLS))

    def _agreed(self, calls: int, left_us: int) -> tuple[int, int]:
        """Returns the number of calls of the first rank, and the shortest time of all."""
        values = torch.tensor([calls, -left_us], dtype=torch.int64)
        try:
            with self._ranks.collective():
                torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self._ranks.group)
        except RankGoneError as gone:
            advice = "call stop_requested equally often on all ranks"
            raise RankGoneError(f"stop_requested on rank {self._ranks.number}: {gone}; {advice}") from gone
        return int(values[0]), -int(values[1])

    @property
    def is_active(self) -> bool:
        """Whether signals are handled: `end` was not called."""
        return self._signals.is_active

    def end(self) -> None:
        """Restores the handlers, except where another program has installed one in the meantime.

        A signal that came after the last call of `requested` then has its default action, if that is what it has now:
        it would be lost.
        """
        was_active = self.is_active
        self._signals.end()
        number = self._signals.received
        if was_active and number is not None and self.end_s is None and signal.getsignal(number) is signal.SIG_DFL:
            logger.warning("%s came after the last call of stop_requested", signal.Signals(number).name)
            signal.raise_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()
