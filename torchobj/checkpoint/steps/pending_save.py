"""One save of a step, and its handle if it runs in the background. The manager decides when to start.

A save takes its content (`content`), writes it, commits it, and deletes old steps.

A save that fails deletes what it wrote, unless its commit may have succeeded: then the data stays, and is either the
step's or a leftover.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

import torch

from torchobj import _torchobj
from torchobj.checkpoint.checkpoint_dir import was_refused
from torchobj.checkpoint.leftovers import Attempt, running, under_way
from torchobj.checkpoint.steps.commit import Commit, WrittenObject, checked_step, folder_of
from torchobj.checkpoint.steps.commits import Commits, CommittedByAnotherError, UnreadableCommitError
from torchobj.checkpoint.steps.content import Content
from torchobj.checkpoint.steps.deadline import Deadline, DeadlineError
from torchobj.checkpoint.steps.local_copy import LocalCopy
from torchobj.checkpoint.steps.retention import Retention, expired
from torchobj.exceptions import (
    AccessDeniedError,
    CheckpointError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    TorchobjError,
)
from torchobj.ranks.meeting import RankGoneError, Ranks, check_same
from torchobj.store import ObjectInfo
from torchobj.store.conditions import check_condition
from torchobj.warn_once import warn_once

__all__ = ["PendingSave", "SaveHandle"]

logger = logging.getLogger("torchobj")


class PendingSave:
    """One save of a step. All ranks create it and call `stage`, on the thread of the caller, and then `run`.

    `run` may be called on another thread. On the first rank its steps are `write`, `commit` and `prune`; the other
    ranks only `write`. The ranks meet in the constructor, in the content's `stage` and `write`, and at the end of
    `run`.

    Args:
        commits: The commit objects, whose URL is that of the checkpoints.
        ranks: The ranks that save, for the thread of the caller.
        step: Number of the step.
        metrics: Numbers by name, or None.
        content: What is saved.
        writers: The ranks that save, for the thread of `run`.
        settings: The `repr` of values by name, which must be the same on all ranks.
        error: The reason why this rank cannot save; None if it can.
        overwrite: Replace the step if it is committed.
        rules: The rules that keep steps.
        deadline: By which `run` must have ended; None if it has time. It may be set later.
        local: Writes the content through the local disk; None: it is written to the store directly.

    Raises:
        BaseException: `error`, of this rank or of another one.
        CheckpointError: The step is committed, and `overwrite` is false.
        ConfigError: The step, a metric or `overwrite` is not valid, or the settings differ.
        StoreError: The commit object of the step cannot be read. Every error is raised on all ranks.
    """

    def __init__(
        self,
        commits: Commits,
        ranks: Ranks,
        step: int,
        metrics: Mapping[str, float] | None,
        content: Content,
        *,
        writers: Ranks,
        settings: Mapping[str, str],
        error: BaseException | None,
        overwrite: bool,
        rules: Retention,
        deadline: Deadline | None = None,
        local: LocalCopy | None = None,
    ) -> None:
        self._commits, self._content, self._rules = commits, content, rules
        self.deadline, self.local = deadline, local
        #: Whether the commit object was written, or may have been.
        self.is_committed = self._may_be_committed = False
        self._ranks, self._writers = ranks, writers
        #: The existing commit of the step, which will be replaced, and the version of its commit object.
        self._replaced: Commit | None = None
        self._replaced_version: str | None = None
        with ranks.meeting() as meeting:
            if error is not None:
                raise error
            writers.check_connected()
            self.step, self._metrics = checked_step(step), _checked_metrics(metrics)
            check_condition(overwrite, None)
            of_all = meeting.gather(settings)
            if of_all is not None:
                check_same(of_all)
                with self._in_time():
                    meeting.result = self._begin(overwrite=overwrite)
        self._attempt: Attempt[int] = meeting.result
        # Created on the thread of the caller, together.
        _ = writers.group
        #: What the first rank must find before the commit, by its name in the folder of the attempt.
        self._objects: Mapping[str, WrittenObject] = {}

    def _begin(self, *, overwrite: bool) -> Attempt[int]:
        """Returns a new attempt, and keeps what it replaces."""
        commits, step = self._commits, self.step
        found = commits.find_commit(step)
        if found is None:
            return Attempt.new(step)
        if not overwrite:
            raise CheckpointError(f"{commits.url}: step {step} is committed already; overwrite=True replaces it")
        try:
            self._replaced = commits.read(step, found)
        except (ObjectChangedError, ObjectNotFoundError) as error:
            message = (
                f"step {step} was deleted while it was being replaced, or was saved by another process; "
                "save it once more"
            )
            raise CheckpointError(f"{commits.url}: {message}") from error
        except UnreadableCommitError as error:
            logger.warning("replaced; the data of the old step is left for sweep(): %s", error)
        self._replaced_version = found.version
        return Attempt.new(step)

    def stage(self) -> None:
        """Takes the content. Collective. Raises as `Content.stage`."""
        self._content.stage(self._ranks)

    def run(self) -> None:
        """Writes and commits the step, and deletes old ones; with one outcome on all ranks.

        Raises:
            Exception: The step was not committed.
            RankGoneError: Another rank does not respond; not raised on the first rank if the step is committed.
        """
        failed: BaseException | None = None
        is_first = self._writers.is_first
        try:
            with under_way(self._attempt):
                try:
                    with self._in_time():
                        self.write()
                        if is_first:
                            self.commit()
                            if self.local is not None:
                                # Before old steps are deleted, which takes its time.
                                self.local.mark(self._attempt)
                    # By the first rank.
                    self._may_be_committed = True
                except Exception as error:
                    if is_first and not self._may_be_committed and not isinstance(error, DeadlineError):
                        self._discard(error)
                    raise
            if is_first and self.deadline is None:
                # A deadline may be set meanwhile.
                with contextlib.suppress(DeadlineError), self._in_time():
                    self.prune()
        except BaseException as error:  # noqa: BLE001  all ranks raise it
            failed = error
        self._agree(failed)
        if self.local is not None:
            if not is_first:
                self.local.mark(self._attempt)
            self.local.prune(self._attempt)

    def _agree(self, failed: BaseException | None) -> None:
        """Gives all ranks one outcome. Raises as `run`."""
        is_first = self._writers.is_first
        try:
            self._writers.agree(failed)
        except RankGoneError as gone:
            if not self.is_committed:
                unknown = f"it is not known whether step {self.step} was committed: call steps()"
                gone.add_note(f"step {self.step} was not committed" if is_first else unknown)
                raise
            logger.warning("%s: step %d is committed, but %s", self._commits.url, self.step, gone)
        except BaseException as error:
            if self.is_committed:
                error.add_note(f"step {self.step} is committed nevertheless")
            raise

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """Converts the end of calls of stores that were cancelled.

        Raises:
            DeadlineError: They were, on this rank or on another one.
        """
        try:
            yield
        except SystemExit as end:
            if self.deadline is None:
                raise
            raise DeadlineError(f"{self._commits.url}: {self.outcome()}") from end

    def outcome(self) -> str:
        """Describes a save that has not ended by its deadline."""
        late = f"step {self.step} was not saved by the deadline"
        if self._may_be_committed:
            return f"{late}, and it is not known whether it was committed: call steps()"
        if self.local is not None and self.local.complete.done():
            return f"{late}; the local disks have it: the next restore finds it there, and earlier steps are unchanged"
        return f"{late}; earlier steps are unchanged, and sweep() deletes what was written"

    def write(self) -> None:
        """Writes what this rank has to write of the content."""
        folder = f"{self._commits.url}/{folder_of(self._attempt)}"
        if self.local is None:
            self._objects = self._content.write(folder, self._writers)
        else:
            self._objects = self.local.write(self._attempt, self._metrics, folder, self._writers)

    def commit(self) -> None:
        """Writes the commit object, which names what was written.

        Raises:
            CheckpointError: An object is missing, or the commit could not be read again.
            CommittedByAnotherError: Another writer committed or deleted the step.
            StoreError: The commit object could not be written.
        """
        objects = self._commits.stored(self._attempt, self._objects)
        commit = Commit(self._attempt, self._content.kind, objects, self._metrics, datetime.now(tz=UTC))
        try:
            # A commit object that cannot be read again would be a step that can never be restored.
            Commit.from_json(commit.to_json(), self.step)
        except ValueError as error:
            raise CheckpointError(f"{self._commits.url}: step {self.step} cannot be committed: {error}") from error
        self._may_be_committed = True
        try:
            self._commits.publish(commit, self._replaced_version)
        except (StoreError, CommittedByAnotherError) as error:
            self._may_be_committed = not (isinstance(error, CommittedByAnotherError) or was_refused(error))
            raise
        self.is_committed = True

    def _discard(self, error: Exception) -> None:
        """Deletes the data of an attempt that failed with this error."""
        if getattr(error, "code", None) == "NoSuchUpload":
            error.add_note("another process aborted the upload: did it call sweep with too small an age?")
        try:
            self._commits.delete(info.key for info in self._commits.objects(folder_of(self._attempt)))
        except TorchobjError as left:
            logger.warning("the data of step %d is left for sweep(): %s", self.step, left)

    def prune(self) -> None:
        """Deletes the replaced step, the expired steps, and what killed saves left.

        Failures are only logged: the step is saved.
        """
        commits = self._commits
        try:
            if self._replaced is not None:
                commits.delete(item.key for item in self._replaced.objects)
            pointer, committed = commits.pointer(), commits.committed()
            old = self._expired(committed)
            # Before the steps are deleted: the pointer never names one that is not committed.
            commits.point((pointer, max(committed.keys() - {commit.step for commit in old}, default=None)))
            self._delete(old)
        except TorchobjError as error:
            logger.warning("%s: step %d is saved, but old steps were not deleted: %s", commits.url, self.step, error)
            if isinstance(error, AccessDeniedError) and error.operation == "delete":
                permission = "storage.objects.delete" if commits.url.startswith("gs://") else "s3:DeleteObject"
                warn_once(
                    commits.once,
                    "%s: to delete old steps, grant %s; keep_last=None keeps all steps",
                    commits.url,
                    permission,
                )
        try:
            for item in commits.sweep_after(self._attempt):
                logger.info("%s: deleted %s, which a save of step %d left", commits.url, item.key, item.step)
        except TorchobjError as error:
            warn_once(commits.once, "%s: what killed saves left was not deleted: %s", commits.url, error)

    def _expired(self, found: Mapping[int, ObjectInfo]) -> list[Commit]:
        """Returns the steps that no rule keeps. `found` has the commit objects of all steps."""
        commits, best = self._commits, self._rules.keep_best
        committed = commits.readable(found)
        if above := [commit.step for commit in committed if commit.step > self.step]:
            message = (
                "%s: step %d is saved, but the latest step is still %d; to give up later steps, delete(step) each of %s"
            )
            logger.warning(message, commits.url, self.step, above[-1], above)
        if best and any(commit.step == self.step and best.metric not in commit.metrics for commit in committed):
            warn_once(commits.once, "%s: a step was saved without the metric %r of keep_best", commits.url, best.metric)
        saving = {attempt.checkpoint for attempt in running()}
        old = set(expired(committed, self._rules, {self.step, *saving}))
        return [commit for commit in committed if commit.step in old]

    def _delete(self, old: Sequence[Commit]) -> None:
        for commit in old:
            try:
                self._commits.delete_commit(commit)
            except CommittedByAnotherError as error:
                # Saved again or deleted by another process.
                logger.warning("%s", error)
            else:
                logger.info("%s: deleted step %d: no rule keeps it", self._commits.url, commit.step)


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Returns the metrics as numbers by name.

    Raises:
        ConfigError: A metric is not a number.
    """
    try:
        # float() of a tensor that requires grad, such as a loss, would warn.
        return {
            str(name): float(value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in (metrics or {}).items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"metrics={metrics!r}: must be numbers by name: {error}") from error


#: Running saves in the background.
_running: set["SaveHandle"] = set()


def _wait_at_exit() -> None:
    for handle in list(_running):
        logger.warning("the process waits at exit until step %d is saved", handle.step)
    for handle in list(_running):
        handle.join()


# Callbacks of the public `atexit` run after the threads of executors have ended, which a save uses.
threading._register_atexit(_wait_at_exit)  # type: ignore[attr-defined]


def _leave_to_parent() -> None:
    for handle in _running:
        handle.leave_to_parent()
    _running.clear()


# A forked child has none of the threads.
os.register_at_fork(after_in_child=_leave_to_parent)


class SaveHandle:
    """A save in the background, as returned by `CheckpointManager.save_async`.

    If the caller does not retrieve an error, the manager raises it at its next `save`, `wait` or `close`. It is also
    logged. In a forked child a save that was running has failed with a CheckpointError: its parent continues it.

    Args:
        pending: The save, whose state was taken.
    """

    def __init__(self, pending: PendingSave) -> None:
        self._step, self._pending = pending.step, pending
        self._cancellation = _torchobj.Cancellation()
        self._future: Future[None] = Future()
        self._copied = None if pending.local is None else pending.local.complete
        self._is_retrieved = False
        # A daemon: a process waits at exit for its checkpoint, unless the save was ended by a deadline.
        self._thread = threading.Thread(target=self._run, name=f"torchobj-save-{self._step}", daemon=True)

    def start(self) -> None:
        """Starts the thread. The manager has stored the handle before: an interrupt of this call does not end the save.

        Raises:
            RuntimeError: The system cannot start a thread; the save has failed.
        """
        _running.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            _running.discard(self)
            self._future.set_exception(error)
            self._copied = None if self._copied is None else self._future
            raise

    def _run(self) -> None:
        failed: BaseException | None = None
        self._cancellation.enter()
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
        for future in (self._future, self._copied):
            if future is None or future.done():
                continue
            if failed is None:
                future.set_result(None)
            else:
                future.set_exception(failed)
        # Not before: a child that is forked in between would wait for the result.
        _running.discard(self)

    def end_by(self, deadline: Deadline) -> bool:
        """Waits for the save, and ends it by the deadline. Returns whether it had the time, committed or failed."""
        pending = getattr(self, "_pending", None)
        if deadline.wait(self._future) or pending is None:
            return True
        pending.deadline = deadline
        self._cancellation.cancel()
        # The exit of the process does not wait until it is saved.
        _running.discard(self)
        return False

    def join(self) -> None:
        """Waits until the thread has ended, if it was started."""
        if self._thread.ident is not None:
            self._thread.join()

    def leave_to_parent(self) -> None:
        """Fails, in a forked child: the thread exists in its parent only. The save itself goes on there."""
        # Not the same future, whose lock another thread may have held during the fork.
        self._future = Future()
        self._copied = None if self._copied is None else self._future
        self._future.set_exception(
            CheckpointError(
                f"step {self._step} is being saved by process {os.getppid()}, of which this one is a forked child: "
                "wait for it there; steps() returns it once it is committed"
            )
        )

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

    def wait_local(self, timeout: float | None = None) -> None:
        """Waits until all ranks have the step on their local disks; if a disk fails, until it is committed.

        Args:
            timeout: Maximum number of seconds.

        Raises:
            ConfigError: The manager has no `local`.
            TimeoutError: It is not there yet.
            Exception: The save failed with this error before.
        """
        if self._copied is None:
            raise ConfigError("wait_local(): pass local= to CheckpointManager to copy steps to the local disk")
        error = self._copied.exception(timeout)
        if error is not None:
            self._is_retrieved = True
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
