"""Finds and deletes the data of interrupted saves and deletes. Never deletes objects of other tools.

An attempt to save puts a random token into the names of all objects that it writes: the manager into the folder of the
attempt, `StorageWriter` into the names of files. Objects of an attempt are leftovers if nothing that is committed names
the token. They expire by the time of the attempt's newest object, at the store's clock. An attempt lists its objects
before it commits them, so a running save whose objects were deleted fails.
"""

import contextlib
import datetime
import threading
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from torchobj.checkpoint.commit_format import Attempt
from torchobj.checkpoint.commits import Commits, UnreadableCommitError
from torchobj.checkpoint.server import time_of_store
from torchobj.exceptions import ObjectNotFoundError
from torchobj.store import UnfinishedUpload

__all__ = ["EXPIRED_AFTER", "Leftover", "expired", "leftovers", "sweep", "sweep_expired", "under_way"]

#: Age at which a save deletes what a killed save left.
EXPIRED_AFTER = datetime.timedelta(days=1)


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


_Owner = TypeVar("_Owner", bound=Hashable)

#: Running attempts of this process.
_attempts: set[Hashable] = set()
_attempts_lock = threading.Lock()


@contextlib.contextmanager
def under_way(attempt: Hashable) -> Iterator[None]:
    """Marks an attempt as running: during the block its data are not leftovers for this process."""
    with _attempts_lock:
        _attempts.add(attempt)
    try:
        yield
    finally:
        with _attempts_lock:
            _attempts.discard(attempt)


def running() -> set[Hashable]:
    """Returns the running attempts of this process."""
    with _attempts_lock:
        return set(_attempts)


def steps_under_way() -> set[int]:
    """Returns the steps that this process is saving."""
    return {attempt.step for attempt in running() if isinstance(attempt, Attempt)}


def expired(
    times: Iterable[tuple[_Owner, datetime.datetime | None]], now: datetime.datetime, age: datetime.timedelta
) -> set[_Owner]:
    """Returns the owners of objects that are all of this age or older.

    Args:
        times: Owner and time of each object. An owner of an object without a time does not expire.
        now: Time by the same clock.
        age: Age of an object that expires.
    """
    times = list(times)
    return {owner for owner, _ in times} - {owner for owner, time in times if time is None or now - time < age}


def leftovers(commits: Commits) -> list[Leftover]:
    """Returns objects and uploads of attempts that are neither committed nor running in this process.

    A running save of another process looks the same, except for its age.

    Raises:
        StoreError: The store cannot be listed.
    """
    own = running()
    found = [Leftover(info.key, 0, info.size, info.last_modified, None) for info in commits.objects("steps/")]
    found += [Leftover(key, 0, None, upload.begun, upload) for key, upload in commits.dir.unfinished_uploads("steps/")]
    # Read after the data was listed, to see later commits. The data of a commit that cannot be read is kept.
    versions = commits.versions()
    readable = {commit.step: commit.attempt for commit in commits.readable()}
    left = []
    owned = set(commits.owned(item.key for item in found))
    for item in found:
        attempt = Attempt.of_key(item.key)
        if attempt is None or attempt in own or item.key not in owned:
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
        time = time_of_store(commits.dir, probe.folder + "time", commits.delete_objects)
    if time is None:
        return []
    owners = expired(((_owner(item), item.modified) for item in left), time, datetime.timedelta(seconds=older_than_s))
    old = [item for item in left if _owner(item) in owners]
    for item in old:
        if item.upload is not None:
            commits.store.abort_upload(item.upload)
        elif Attempt.of_key(item.key) is None:
            # `find` deletes the empty commit object of a step.
            commits.find(item.step)
    commits.delete_objects(item.key for item in old if item.upload is None)
    return old


def _owner(item: Leftover) -> Attempt | str:
    return Attempt.of_key(item.key) or item.key


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
    times = [(Attempt.of_key(info.key), info.last_modified) for info in commits.objects("steps/")]
    newest = max((time for owner, time in times if owner == attempt and time is not None), default=None)
    if newest is None:
        return []
    # The data of a step that was replaced although its commit could not be read is left for `sweep`.
    old = {owner for owner in expired(times, newest, EXPIRED_AFTER) if owner and owner.step != attempt.step}
    # A listing may be old, as that of a gateway with a cache: each commit object is read.
    old = {owner for owner in old if not _may_be_committed(commits, owner)}
    if not old:
        return []
    left = [item for item in leftovers(commits) if Attempt.of_key(item.key) in old]
    owners = expired(((_owner(item), None if item.upload else item.modified) for item in left), newest, EXPIRED_AFTER)
    left = [item for item in left if _owner(item) in owners]
    commits.delete_objects(item.key for item in left)
    return left


def _may_be_committed(commits: Commits, attempt: Attempt) -> bool:
    try:
        return commits.read(attempt.step).attempt == attempt
    except ObjectNotFoundError:
        return False
    except UnreadableCommitError:
        return True
