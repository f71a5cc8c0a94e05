"""Finds and deletes the data of interrupted saves and deletes. Never deletes objects of other tools.

An attempt to save puts a random token into the names of all objects that it writes: the manager into the folder of the
attempt, `StorageWriter` into the names of files (`dcp.removal`). Objects of an attempt are leftovers if nothing that is
committed names the token. They expire by the time of the attempt's newest object, at the store's clock. An attempt
lists its objects before it commits them, so a running save whose objects were deleted fails.
"""

import contextlib
import datetime
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.commit_format import Attempt
from torchobj.checkpoint.commits import Commits, UnreadableCommitError
from torchobj.exceptions import ObjectNotFoundError
from torchobj.store import ObjectInfo, UnfinishedUpload

__all__ = [
    "EXPIRED_AFTER",
    "Leftover",
    "expired_owners",
    "idle_owners",
    "leftovers",
    "owners_of_age",
    "running",
    "sweep",
    "sweep_expired",
    "under_way",
]

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

#: Running attempts of this process. Threads need no lock: each of the operations below is atomic.
_attempts: set[Hashable] = set()


@contextlib.contextmanager
def under_way(attempt: Hashable) -> Iterator[None]:
    """Marks an attempt as running: during the block its data are not leftovers for this process."""
    _attempts.add(attempt)
    try:
        yield
    finally:
        _attempts.discard(attempt)


def running() -> set[Hashable]:
    """Returns the running attempts of this process."""
    return _attempts.copy()


def owners_of_age(
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


def idle_owners(
    folder: CheckpointDir,
    times: Collection[tuple[_Owner, datetime.datetime | None]],
    older_than_s: float,
    probe: tuple[str, Hashable],
) -> set[_Owner]:
    """Returns the owners that wrote nothing for this many seconds, by the store's clock.

    Args:
        folder: The folder of the objects.
        times: Owner and time of each object.
        older_than_s: Age of an object that expires.
        probe: Name of a temporary object, which is written to read the store's clock, and its attempt.

    Returns:
        The owners; none if listings of the store have no times.
    """
    name, attempt = probe
    with under_way(attempt):
        now = folder.time(name) if times else None
    return set() if now is None else owners_of_age(times, now, datetime.timedelta(seconds=older_than_s))


def expired_owners(
    listed: Iterable[ObjectInfo], own: Collection[str], owner_of: Callable[[str], _Owner | None]
) -> set[_Owner]:
    """Returns the owners of objects that are a day older than the newest object of a save, by the times of one listing.

    Args:
        listed: All objects.
        own: Keys of the objects of the save.
        owner_of: Returns the owner of a key; None for an object that no save wrote.
    """
    times = [(info.key, info.last_modified) for info in listed]
    newest = max((time for key, time in times if key in own and time is not None), default=None)
    others = ((owner_of(key), time) for key, time in times if key not in own)
    expired = set() if newest is None else owners_of_age(others, newest, EXPIRED_AFTER)
    return {owner for owner in expired if owner is not None}


def leftovers(commits: Commits) -> list[Leftover]:
    """Returns objects and uploads of attempts that are neither committed nor running in this process.

    A running save of another process looks the same, except for its age.

    Raises:
        StoreError: The store cannot be listed.
    """
    own = running()
    found = [Leftover(info.key, 0, info.size, info.last_modified, None) for info in commits.objects("steps/")]
    found += [Leftover(key, 0, None, upload.begun, upload) for key, upload in commits.unfinished_uploads("steps/")]
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
    left, probe = leftovers(commits), Attempt.new(0)
    times = [(_owner(item), item.modified) for item in left]
    owners = idle_owners(commits, times, older_than_s, (probe.folder + "time", probe))
    old = [item for item in left if _owner(item) in owners]
    for item in old:
        if item.upload is not None:
            commits.store.abort_upload(item.upload)
        elif Attempt.of_key(item.key) is None:
            # `find_commit` deletes the empty commit object of a step.
            commits.find_commit(item.step)
    commits.delete(item.key for item in old if item.upload is None)
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
    listed = commits.objects("steps/")
    own = {info.key for info in listed if Attempt.of_key(info.key) == attempt}
    # The data of a step that was replaced although its commit could not be read is left for `sweep`. A listing may be
    # old, as that of a gateway with a cache: each commit object is read.
    old = {
        owner
        for owner in expired_owners(listed, own, Attempt.of_key)
        if owner.step != attempt.step and not _may_be_committed(commits, owner)
    }
    left = leftovers(commits) if old else []
    # What is not in the first listing was written since, by a slow save.
    known = {(info.key, info.last_modified) for info in listed}
    old -= {
        Attempt.of_key(item.key) for item in left if item.upload is not None or (item.key, item.modified) not in known
    }
    left = [item for item in left if Attempt.of_key(item.key) in old]
    commits.delete(item.key for item in left)
    return left


def _may_be_committed(commits: Commits, attempt: Attempt) -> bool:
    try:
        return commits.read(attempt.step).attempt == attempt
    except ObjectNotFoundError:
        return False
    except UnreadableCommitError:
        return True
