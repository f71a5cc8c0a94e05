"""Finds and deletes the data of interrupted saves and deletes of steps. Never deletes objects of other tools.

`checkpoint.leftovers` says which attempts have expired.
"""

import datetime
from typing import NamedTuple

from torchobj.checkpoint.leftovers import expired_owners, idle_owners, running
from torchobj.checkpoint.steps.commit import Attempt
from torchobj.checkpoint.steps.commits import Commits, UnreadableCommitError
from torchobj.exceptions import ObjectNotFoundError
from torchobj.store import UnfinishedUpload

__all__ = ["Leftover", "leftovers", "sweep", "sweep_expired"]


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
