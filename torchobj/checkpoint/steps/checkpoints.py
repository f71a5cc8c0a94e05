"""Checkpoints by step in a folder: which exist, their metrics, their deletion, and the one save that may run.

The base of the classes that save and restore them. A save is one object (`pending_save`) with a content (`content`);
`commits` stores the commit objects and finds what interrupted saves left, `ranks` gives all ranks one outcome, and
`retention` selects the steps to delete.
"""

import contextlib
import functools
import logging
import operator
import signal
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch

from torchobj.checkpoint.leftovers import Leftover
from torchobj.checkpoint.steps.commit import Commit, checked_step
from torchobj.checkpoint.steps.commits import Commits
from torchobj.checkpoint.steps.content import Content
from torchobj.checkpoint.steps.deadline import Deadline, DeadlineError, check_seconds
from torchobj.checkpoint.steps.local_copy import LocalCopy
from torchobj.checkpoint.steps.pending_save import PendingSave, SaveHandle
from torchobj.checkpoint.steps.retention import KeepBest, Retention
from torchobj.checkpoint.steps.stop_requests import StopRequests
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError
from torchobj.ranks.meeting import Ranks

__all__ = ["Checkpoints", "NoStepError"]

logger = logging.getLogger("torchobj")


class NoStepError(CheckpointError):
    """No step is committed."""


class Checkpoints:
    """Checkpoints by step. With `torch.distributed`, all ranks save and restore in the same order.

    Arguments and errors are those of `CheckpointManager`.
    """

    def __init__(
        self,
        url: str,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: KeepBest | tuple[Any, ...] | None = None,
        *,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        config: StoreConfig | None = None,
    ) -> None:
        best = KeepBest(*keep_best) if isinstance(keep_best, tuple) and 2 <= len(keep_best) <= 3 else keep_best
        self._rules = Retention(keep_last, keep_every, best)  # type: ignore[arg-type]  # checked there
        self._config = config
        self._commits = Commits(url, self._config)
        # A background save communicates with the other ranks while the next one starts, and `stop_requested` meets in
        # between.
        self._ranks, self._background, self._stopping = (Ranks(process_group) for _ in range(3))
        self._handle: SaveHandle | None = None
        self._stop: StopRequests | None = None
        self._closed = False

    @property
    def url(self) -> str:
        """The URL of the checkpoints, without a slash at the end."""
        return self._commits.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _save(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        content: Content,
        *,
        overwrite: bool,
        deadline_s: float | None = None,
    ) -> None:
        """Saves a step on this thread, or by a deadline in another one."""
        deadline = self._deadline(deadline_s)
        begin = functools.partial(
            self._begun,
            "save",
            self._ranks,
            "wait",
            step,
            metrics,
            content=content,
            overwrite=overwrite,
            deadline=deadline,
            deadline_s=deadline_s,
        )
        if deadline is None:
            pending = begin()
            pending.stage()
            pending.run()
            return
        pending = deadline.call(
            begin, self._ranks, lambda: f"{self.url}: the save of step {step} did not begin by its deadline"
        )
        pending.stage()
        if torch.cuda.is_initialized():
            # The thread that reads the tensors has another stream.
            torch.cuda.synchronize()
        try:
            deadline.call(pending.run, self._ranks, lambda: f"{self.url}: {pending.outcome()}")
        except DeadlineError as late:
            if not pending.is_committed:
                raise
            logger.warning("%s: step %d is committed, but another rank does not respond: %s", self.url, step, late)

    def _deadline(self, deadline_s: float | None) -> Deadline | None:
        """Returns the deadline of a save: after a request to stop, that of `on_signal` is the default."""
        if deadline_s is not None:
            check_seconds("deadline_s", deadline_s)
            return Deadline(time.monotonic() + deadline_s)
        stop = self._stop
        if stop is None or stop.end_s is None or (not stop.is_active and stop.end_s < time.monotonic()):
            # Also after the signals are not handled any more, and the process lives.
            return None
        return Deadline(stop.end_s)

    def _save_async(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        content: Content,
        *,
        when_busy: Literal["wait", "fail"],
        overwrite: bool,
    ) -> SaveHandle:
        """Saves a step in the background, once its content is staged."""
        if when_busy not in ("wait", "fail"):
            raise ConfigError(f"when_busy={when_busy!r}: must be wait or fail")
        pending = self._begun(
            "save_async",
            self._background,
            when_busy,
            step,
            metrics,
            content=content,
            overwrite=overwrite,
        )
        pending.stage()
        self._handle = SaveHandle(pending)
        self._handle.start()
        return self._handle

    def _begun(
        self,
        method: str,
        writers: Ranks,
        when_busy: Literal["wait", "fail"],
        step: int,
        metrics: Mapping[str, float] | None,
        *,
        content: Content,
        overwrite: bool,
        deadline: Deadline | None = None,
        **settings: Any,
    ) -> PendingSave:
        """Begins a save when no other is running, or raises, on all ranks alike: also if they save something else."""
        return PendingSave(
            self._commits,
            self._ranks,
            step,
            metrics,
            content,
            error=self._previous_error(when_busy, deadline),
            settings=self._settings(method, step=step, overwrite=bool(overwrite), **settings),
            writers=writers,
            overwrite=overwrite,
            rules=self._rules,
            deadline=deadline,
            local=self._local_copy(content),
        )

    def _local_copy(self, content: Any) -> LocalCopy | None:  # noqa: ARG002
        """Returns what writes the content of this class through the local disk. None: it is written to the store."""
        return None

    def _settings(self, method: str, *, step: Any, **arguments: Any) -> dict[str, str]:
        """Returns what must be the same on all ranks: ranks with different settings would wait for each other."""
        settings = {"url": self.url, "class": type(self).__name__, **vars(self._rules), "method": method}
        with contextlib.suppress(TypeError):
            # Numbers of numpy and torch have another repr.
            step = operator.index(step)
        return {name: repr(value) for name, value in (settings | {"step": step} | arguments).items()}

    def _previous_error(
        self, when_busy: Literal["wait", "fail"], deadline: Deadline | None = None
    ) -> BaseException | None:
        """Waits for a running save. Returns why another one cannot start, or an error that was not retrieved yet.

        A save with a deadline starts after one that failed, which was logged: it may be the last one.
        """
        if self._closed:
            return CheckpointError(f"{self.url}: the manager is closed")
        if self._handle is not None and when_busy == "fail" and not self._handle.done():
            return CheckpointError(f"{self.url}: step {self._handle.step} is still being saved")
        error = self._unretrieved(deadline)
        return error if deadline is None or isinstance(error, DeadlineError) else None

    def _unretrieved(self, deadline: Deadline | None) -> BaseException | None:
        """Waits for a running save, and ends it by a deadline. Returns an error that was not retrieved yet."""
        handle, error = self._handle, None  # type: SaveHandle | None, BaseException | None
        if handle is not None and deadline is not None and not handle.end_by(deadline):
            error = DeadlineError(
                f"{self.url}: step {handle.step} was still being saved at the deadline, and was aborted"
            )
        elif handle is not None:
            error = handle.unretrieved()
        # Not before: if the wait is interrupted, the save still reads the staged copy.
        self._handle = None
        return error

    def on_signal(
        self, *signals: int, deadline_s: float = 25.0, check_every_s: float = 1.0, timeout_s: float = 600.0
    ) -> StopRequests:
        """Handles signals that ask to stop, for `stop_requested`. All ranks call it, on their main threads.

        A signal only sets a flag, and then calls the handler that was there, unless that is the default action. A
        handler that another library installs later is called too. A signal that comes after the deadline of the first
        one has its usual effect, so that a program that does not call `stop_requested` can be ended. The handlers are
        restored by `close`, at the end of the block if this is used in a `with` statement, or by `end()` of the
        returned object.

        DataLoader workers that are started afterwards ignore these signals, unless their own rank sends them: forked
        ones, and those of torchobj's `DataLoader`; of a `forkserver`, which must be started afterwards too, SIGTERM.

        Args:
            signals: Their numbers; `signal.SIGTERM` if there are none.
            deadline_s: Time from a signal until the ranks must have saved, in seconds: the default `deadline_s` of
                `save` once `stop_requested` has returned True. The time starts when Python runs the handler: after a
                long call into C++, as late as that ends. torchrun sends SIGKILL 30 s after SIGTERM. If it is over
                before `stop_requested` returns True, as after a long step, it starts again then.
            check_every_s: Time between two meetings of the ranks in `stop_requested`, in seconds.
            timeout_s: Maximum time that a rank waits in `stop_requested` for another one, in seconds.

        Raises:
            ConfigError: A signal cannot be handled, this is not the main thread, a time is not a positive number or is
                more than a day, or signals are handled already.

        Example:
            >>> from torchobj.checkpoint import CheckpointManager
            >>> with CheckpointManager("memory://example/run-2") as checkpoints:
            ...     with checkpoints.on_signal(signal.SIGTERM):
            ...         signal.raise_signal(signal.SIGTERM)
            ...         checkpoints.stop_requested()
            True
        """
        if self._stop is not None and self._stop.is_active:
            raise ConfigError("on_signal: signals are handled already; end() of what it returned ends that")
        self._stop = StopRequests(
            signals or (signal.SIGTERM,),
            self._stopping,
            deadline_s=deadline_s,
            check_every_s=check_every_s,
            timeout_s=timeout_s,
        )
        return self._stop

    def stop_requested(self) -> bool:
        """Returns whether a signal to any rank has asked to stop. Call it equally often on all ranks, as after a step.

        All ranks get the same answer in the same call, and once it is True it remains True. The ranks meet about every
        `check_every_s` seconds, and at least in each 16th call; a call in between takes about a microsecond.

        Raises:
            ConfigError: `on_signal` was not called.
            CheckpointError: Another rank does not respond, or called this another number of times.
        """
        if self._stop is None:
            raise ConfigError("stop_requested: call on_signal first, on all ranks")
        return self._stop.requested()

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending. One listing, as for `latest`."""
        return sorted(self._commits.versions())

    def latest(self) -> int | None:
        """Returns the latest committed step: the one with the largest number, or None if no step is committed."""
        return max(self._commits.versions(), default=None)

    def best(self) -> int | None:
        """Returns the committed step that is best by `keep_best`; None if no step has the metric.

        Raises:
            ConfigError: The manager has no `keep_best`.
        """
        if self._rules.keep_best is None:
            raise ConfigError(f"keep_best=None: pass it to {type(self).__name__} to define the best step")
        return next(iter(self._rules.keep_best.ranked(self._commits.readable())), None)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics of a committed step.

        Raises:
            CheckpointError: The step is not committed.
        """
        return dict(self._committed(checked_step(step)).metrics)

    def _wanted(self, step: int | Literal["latest"]) -> int | None:
        """Returns the number of a step to restore; None for the latest."""
        if not isinstance(step, str) and not hasattr(step, "__index__"):
            raise ConfigError(f"step is a {type(step).__name__}: must be an int or 'latest'; pass a state as into=")
        if isinstance(step, str) and step != "latest":
            raise ConfigError(f"step={step!r}: must be an int or 'latest'")
        return None if step == "latest" else checked_step(step)

    def _found(self, step: int | Literal["latest"]) -> Commit:
        wanted = self._wanted(step)
        number = self.latest() if wanted is None else wanted
        if number is None:
            raise NoStepError(f"{self.url}: no step is committed")
        return self._committed(number)

    def _committed(self, step: int) -> Commit:
        try:
            return self._commits.read(step)
        except ObjectNotFoundError:
            raise self._not_committed(step) from None

    def _not_committed(self, step: int) -> CheckpointError:
        return CheckpointError(f"{self.url}: step {step} is not committed; there are {self.steps()}")

    def delete(self, step: int) -> None:
        """Deletes a committed step, which may be the latest. Call it on one rank.

        If the commit object cannot be read, only this object is deleted, and the data becomes a leftover.

        Raises:
            CheckpointError: The step is not committed, or was saved again in the meantime.
        """
        try:
            self._commits.delete_step(checked_step(step))
        except ObjectNotFoundError:
            raise self._not_committed(step) from None

    def leftovers(self) -> list[Leftover]:
        """Returns the objects and unfinished uploads of attempts that were never committed. Call it on one rank.

        A running save of another process looks the same: compare `modified`.
        """
        return self._commits.leftovers()

    def sweep(self, older_than_s: float = 3600.0) -> list[Leftover]:
        """Deletes leftovers. Call it on one rank.

        Args:
            older_than_s: Delete only those of attempts that wrote nothing for this many seconds, by the store's clock.
                Must be longer than a running save of another process takes to start or finish its next object.

        Returns:
            The deleted leftovers.
        """
        if older_than_s < 0:
            raise ConfigError(f"older_than_s={older_than_s!r}: must be 0 or more seconds")
        return self._commits.sweep_idle(older_than_s)

    def wait(self) -> None:
        """Waits for a background save; once `stop_requested` has returned True, until the deadline of `on_signal`.

        Raises:
            CheckpointError: The deadline has passed. The save was ended, and earlier steps are unchanged.
            Exception: The save failed, and its error was not retrieved.
        """
        if (error := self._unretrieved(self._deadline(None))) is not None:
            raise error

    def close(self) -> None:
        """Waits as `wait` does. Later saves are refused."""
        self._closed = True
        try:
            self.wait()
        finally:
            if self._stop is not None:
                self._stop.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            # It was logged; the error of the block takes precedence.
            if exc is None:
                raise
