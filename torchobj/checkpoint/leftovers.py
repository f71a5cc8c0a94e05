"""Finds and deletes the data of interrupted saves and deletes. Never deletes objects of other tools."""

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torchobj.checkpoint.commit_format import Attempt
from torchobj.checkpoint.commits import Commits, UnreadableCommitError
from torchobj.checkpoint.server import time_of_store
from torchobj.exceptions import ObjectNotFoundError
from torchobj.store import UnfinishedUpload

__all__ = ["Leftover", "leftovers", "sweep", "sweep_expired", "under_way"]

#: Age at which a save deletes what a killed save left, as for the files of `StorageWriter`.
_EXPIRED_AFTER = datetime.timedelta(days=1)


class Leftover(NamedTuple):
    """An object or an unfinished upload of an attempt that was never committed, or whose step was deleted.

    Or the empty commit object of an interrupted delete.
    """

    key: str
    """Below the manager's URL."""
    step: int
    """The step of the attempt."""
    size: int | None
    """Size in bytes; None for an upload."""
    modified: datetime.datetime | None
    """Time when it was written, or the upload began, by the store's clock."""
    upload: UnfinishedUpload | None
    """The upload; None for an object."""


#: Running attempts of this process.
_attempts: set[Attempt] = set()
_attempts_lock = threading.Lock()


@contextlib.contextmanager
def under_way(attempt: Attempt) -> Iterator[None]:
    """Marks an attempt as running: during the block its data are not leftovers for this process."""
    with _attempts_lock:
        _attempts.add(attempt)
    try:
        yield
    finally:
        with _attempts_lock:
            _attempts.discard(attempt)


def steps_under_way() -> set[int]:
    """Returns the steps that this process is saving."""
    with _attempts_lock:
        return {attempt.step for attempt in _attempts}


def leftovers(commits: Commits) -> list[Leftover]:
    """Returns objects and uploads of attempts that are neither committed nor running in this process.

    A running save of another process looks the same, except for its age.

    Raises:
        StoreError: The store cannot be listed.
    """
    with _attempts_lock:
        running = set(_attempts)
    found = [Leftover(info.key, 0, info.size, info.last_modified, None) for info in commits.objects("steps/")]
    found += [
        Leftover(upload.key.removeprefix(commits.key("")), 0, None, upload.begun, upload)
        for upload in commits.store.unfinished_uploads(commits.key("steps/"))
    ]
    # Read after the data was listed, to see later commits. The data of a commit that cannot be read is kept.
    versions = commits.versions()
    readable = {commit.step: commit.attempt for commit in commits.readable()}
    left = []
    owned = set(commits.owned(item.key for item in found))
    for item in found:
        attempt = Attempt.of_key(item.key)
        if attempt is None or attempt in running or item.key not in owned:
            continue
        step = attempt.step
        if readable.get(step) == attempt or (step in versions and step not in readable):
            continue
        left.append(item._replace(step=step))
    left += [Leftover(info.key, step, 0, info.last_modified, None) for step, info in commits.deleted()]
    return left


def sweep(commits: Commits, older_than_s: float) -> list[Leftover]:
    """Deletes the leftovers of attempts that wrote nothing for this many seconds, by the store's clock.

    Returns:
        The deleted leftovers.

    Raises:
        StoreError: The store cannot be listed, or an object cannot be deleted.
    """
    left = leftovers(commits)
    if not left:
        return []
    probe = Attempt.new(0)
    with under_way(probe):
        time = time_of_store(commits, probe.folder + "time", b"", commits.delete_objects)
    if time is None:
        return []
    limit = time - datetime.timedelta(seconds=older_than_s)
    old = _whole(left, lambda item: item.modified is not None and item.modified <= limit)
    for item in old:
        if item.upload is not None:
            commits.store.abort_upload(item.upload)
        elif Attempt.of_key(item.key) is None:
            # `find` deletes the empty commit object of a step.
            commits.find(item.step)
    commits.delete_objects(item.key for item in old if item.upload is None)
    return old


def sweep_expired(commits: Commits, attempt: Attempt) -> list[Leftover]:
    """Deletes the leftovers of attempts whose newest object is a day older than that of `attempt`, which was committed.

    Both times are those of the store's listing. Attempts with an unfinished upload are kept: the times of its parts are
    not known, and it may be of a slow save. Once for each `commits`: later leftovers are of processes that run now.

    Returns:
        The deleted leftovers.

    Raises:
        StoreError: The store cannot be listed, or an object cannot be deleted.
    """
    if commits.is_swept:
        return []
    commits.is_swept = True
    newest: dict[Attempt | None, datetime.datetime] = {}
    for info in commits.objects("steps/"):
        if info.last_modified is not None:
            owner = Attempt.of_key(info.key)
            newest[owner] = max(info.last_modified, newest.get(owner, info.last_modified))
    if attempt not in newest:
        return []
    expired = {owner for owner, time in newest.items() if owner and newest[attempt] - time >= _EXPIRED_AFTER}
    # The data of a step that was replaced although its commit could not be read is left for `sweep`.
    expired = {owner for owner in expired if owner.step != attempt.step}
    # A listing may be old, as that of a gateway with a cache: each commit object is read.
    expired = {owner for owner in expired if not _may_be_committed(commits, owner)}
    if not expired:
        return []
    left = [item for item in leftovers(commits) if Attempt.of_key(item.key) in expired]

    def is_expired(item: Leftover) -> bool:
        if item.upload is not None or item.modified is None:
            return False
        return newest[attempt] - item.modified >= _EXPIRED_AFTER

    old = _whole(left, is_expired)
    commits.delete_objects(item.key for item in old)
    return old


def _may_be_committed(commits: Commits, attempt: Attempt) -> bool:
    try:
        return commits.read(attempt.step).attempt == attempt
    except ObjectNotFoundError:
        return False
    except UnreadableCommitError:
        return True


def _whole(left: list[Leftover], is_old: Callable[[Leftover], bool]) -> list[Leftover]:
    """The leftovers of attempts that have old ones only."""
    kept = {_owner(item) for item in left if not is_old(item)}
    return [item for item in left if _owner(item) not in kept]


def _owner(item: Leftover) -> Attempt | str:
    return Attempt.of_key(item.key) or item.key
