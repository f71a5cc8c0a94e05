"""A save through the local disk: the content is written there, and the bucket gets the files.

If a disk fails or is slow, the content goes from memory to the bucket. The ranks of all disks do the same.
"""

import dataclasses
import errno
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import UTC, datetime

from torchobj.checkpoint.leftovers import Attempt
from torchobj.checkpoint.steps.commit import Commit, LocalPart, WrittenObject, folder_of
from torchobj.checkpoint.steps.commits import Commits
from torchobj.checkpoint.steps.local import LocalSteps
from torchobj.checkpoint.steps.nearest import Copies
from torchobj.checkpoint.steps.state_content import StateContent
from torchobj.config import StoreConfig
from torchobj.exceptions import TorchobjError
from torchobj.files.transfers import upload
from torchobj.ranks.meeting import Ranks
from torchobj.store.transfers import ByteProgress, Progress
from torchobj.warn_once import warn_once

__all__ = ["LocalCopy"]

logger = logging.getLogger("torchobj")

#: A local write is given up when it takes longer than this, and than this many times the last upload; before the first
#: upload, than it takes at this rate.
_LEAST_S, _UPLOADS, _BYTES_PER_S = 30.0, 3, 50_000_000


class LocalCopy:
    """The copy that one save writes.

    Args:
        steps: The copies of the disk, which are open.
        content: The content of the save. Its `progress` receives that of the upload, on the first rank of each disk.
        config: How the bucket is reached.
    """

    def __init__(self, steps: LocalSteps, content: StateContent, config: StoreConfig | None) -> None:
        self._steps, self._content, self._config = steps, content, config
        #: Is done when all ranks have their copy.
        self.complete: Future[None] = Future()

    def write(
        self, attempt: Attempt[int], metrics: Mapping[str, float], folder: str, writers: Ranks
    ) -> Mapping[str, WrittenObject]:
        """Writes the copy and sends its files; or, without a copy, writes as the content does.

        Args:
            attempt: The attempt.
            metrics: Those of the save.
            folder, writers: As for `Content.write`.

        Returns:
            As `Content.write`.

        Raises:
            Exception: It could not be written to the bucket. Every error is raised on all ranks.
        """
        steps = self._steps
        objects, failed = ({}, steps.unusable) if steps.unusable else self._copied(attempt, metrics, writers)
        if failed is not None:
            if writers.is_first:
                warn_once(
                    steps.commits.once,
                    "%s: saved without a local copy, directly: %s",
                    folder.removesuffix(folder_of(attempt)),
                    failed,
                    key="no copy",
                )
            if steps.is_first and not steps.unusable:
                steps.discard(attempt)
            return self._content.write(folder, writers)
        self.complete.set_result(None)
        began = time.monotonic()
        with writers.meeting():
            path = steps.path_of(attempt)
            # A disk may have nothing of a step, such as where only the first rank writes.
            if steps.is_first and path.is_dir():
                upload(path, folder, config=self._config, progress=self._content.progress)
        steps.upload_s = time.monotonic() - began
        return objects

    def mark(self, attempt: Attempt[int]) -> None:
        """Marks the copy of an attempt that is in the bucket."""
        self._steps.committed(attempt)

    def prune(self, attempt: Attempt[int]) -> None:
        """Deletes the copies that are older than an attempt, which is in the bucket."""
        if self._steps.is_first:
            self._steps.prune(attempt)

    def _copied(
        self, attempt: Attempt[int], metrics: Mapping[str, float], writers: Ranks
    ) -> tuple[Mapping[str, WrittenObject], str | None]:
        """Writes the copy. Returns its objects, and why a rank could not write it."""
        steps, failed = self._steps, None  # type: LocalSteps, BaseException | None
        objects: Mapping[str, WrittenObject] = {}
        if steps.is_first:
            steps.sweep()
        try:
            limit = _Limit(steps.upload_s)
            objects = self._content.write(steps.url_of(attempt), writers, ByteProgress(limit.check))
        except BaseException as error:  # noqa: BLE001  the ranks meet
            failed = error
        objects, reason = _agreed(failed, OSError, objects, writers)
        if reason is None:
            failed = None
            try:
                if steps.is_first and steps.path_of(attempt).is_dir():
                    part = LocalPart(steps.continues, len(objects))
                    commit = Commit(attempt, self._content.kind, (), metrics, datetime.now(tz=UTC), part)
                    steps.publish(commit, objects)
            except BaseException as error:  # noqa: BLE001  the ranks meet
                failed = error
            objects, reason = _agreed(failed, (OSError, TorchobjError), objects, writers)
        return objects, reason


def _agreed(
    failed: BaseException | None,
    of_disk: type[Exception] | tuple[type[Exception], ...],
    objects: Mapping[str, WrittenObject],
    writers: Ranks,
) -> tuple[Mapping[str, WrittenObject], str | None]:
    """Returns the objects of the first rank, and the first failure of a disk. Raises failures of other types."""
    with writers.meeting() as meeting:
        if failed is not None and not isinstance(failed, of_disk):
            raise failed
        of_all = meeting.gather(None if failed is None else f"{type(failed).__name__}: {failed}")
        if of_all is not None:
            meeting.result = objects, next((reason for reason in of_all if reason is not None), None)
    found: tuple[Mapping[str, WrittenObject], str | None] = meeting.result
    return found


def finish_upload(
    copies: Copies, steps: LocalSteps, commits: Commits, ranks: Ranks, config: StoreConfig | None
) -> Commit | None:
    """Sends what the bucket does not have yet of a step that the disks have together, and commits it. Collective.

    Args:
        copies: The copies, on the first rank.
        steps: The copies of this disk.
        commits: The commits of the bucket.
        ranks: The ranks.
        config: How the bucket is reached.

    Returns:
        The commit; None if a copy is damaged: then it is deleted, and what was sent of it.

    Raises:
        Exception: The step could not be sent or committed. Every error is raised on all ranks.
    """
    attempt, damage = copies.attempt, None
    folder = folder_of(attempt)
    with ranks.meeting() as meeting:
        if steps.is_first and steps.copy_of(attempt) is not None:
            damage = steps.damage(attempt)
            if damage is None:
                upload(steps.path_of(attempt), commits.url_of(folder), config=config, skip_unchanged=True)
        of_all = meeting.gather(damage)
        if of_all is not None:
            found = next((each for each in of_all if each is not None), None)
            if found is None:
                meeting.result = _commit_sent(copies, commits)
            else:
                logger.warning("%s: the local copy of step %d is damaged: %s", commits.url, attempt.checkpoint, found)
                commits.delete(info.key for info in commits.objects(folder))
    if damage is not None:
        steps.discard(attempt)
    sent: Commit | None = meeting.result
    return sent


def _commit_sent(copies: Copies, commits: Commits) -> Commit:
    attempt, folder = copies.attempt, folder_of(copies.attempt)
    # Of the save that was interrupted.
    for _, unfinished in commits.unfinished_uploads(folder):
        commits.store.abort_upload(unfinished)
    named = (item for commit in copies.of_disks.values() for item in commit.objects)
    expected = {item.key.removeprefix(folder): WrittenObject(item.size, item.crc32) for item in named}
    objects = commits.stored(attempt, expected)
    commit = dataclasses.replace(copies.commit, objects=objects, time=datetime.now(tz=UTC), local=None, version=None)
    commits.publish(commit)
    commits.point()
    logger.info("%s: finished the upload of step %d from the local disks", commits.url, attempt.checkpoint)
    return commit


class _Limit:
    """The time that a local write may take.

    Args:
        upload_s: Seconds that the last upload took; None if there was none.
    """

    def __init__(self, upload_s: float | None) -> None:
        self._began, self._upload_s = time.monotonic(), upload_s

    def check(self, progress: Progress) -> None:
        """Is called as the write goes on.

        Raises:
            TimeoutError: It takes too long.
        """
        took_s, total = time.monotonic() - self._began, progress.bytes_total or 0
        limit_s = total / _BYTES_PER_S if self._upload_s is None else _UPLOADS * self._upload_s
        if took_s > max(_LEAST_S, limit_s):
            message = f"wrote {progress.bytes_done} of {total} bytes in {took_s:.0f} s, which is slower than the bucket"
            raise TimeoutError(errno.ETIMEDOUT, message)
