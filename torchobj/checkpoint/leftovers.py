"""Tells running attempts to save, whose data is kept, from those whose data has expired.

An attempt to save puts a random token into the names of all objects that it writes: the manager into the folder of the
attempt (`steps.leftovers`), `StorageWriter` into the names of files (`dcp.removal`). Objects of an attempt are
leftovers if nothing that is committed names the token. They expire by the time of the attempt's newest object, at the
store's clock. An attempt lists its objects before it commits them, so a running save whose objects were deleted fails.
"""

import contextlib
import datetime
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import TypeVar

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.store import ObjectInfo

__all__ = [
    "EXPIRED_AFTER",
    "expired_owners",
    "idle_owners",
    "owners_of_age",
    "running",
    "under_way",
]

#: Age at which a save deletes what a killed save left.
EXPIRED_AFTER = datetime.timedelta(days=1)


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
