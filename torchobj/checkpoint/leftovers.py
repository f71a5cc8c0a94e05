"""The attempts to save that have objects in a folder: which of them run, and the sweep of those that were interrupted.

An attempt puts a random nonce into the names of all objects that it writes: the manager into the folder of the attempt
(`steps.commit`), `StorageWriter` into the names of files (`dcp.object_names`). Objects of an attempt are leftovers if
nothing that is committed names the nonce. They expire by the time of the attempt's newest object, at the store's clock.

Names are untrusted: anyone with access to the folder may have created them. Nothing is deleted by prefix, and nothing
behind a symbolic link. An attempt lists its objects before it commits them, so a running save whose objects were
deleted fails.
"""

import contextlib
import datetime
import secrets
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.store import ObjectInfo, UnfinishedUpload

__all__ = ["Attempt", "AttemptsDir", "Leftover", "of_age", "running", "under_way"]

#: Age at which a save deletes what a killed save left.
EXPIRED_AFTER = datetime.timedelta(days=1)

_Checkpoint = TypeVar("_Checkpoint")


class Attempt(NamedTuple, Generic[_Checkpoint]):
    """One try to save a checkpoint."""

    checkpoint: _Checkpoint
    """The step of a manager; or the folder of a distributed checkpoint, with a slash at the end, or empty."""
    nonce: str

    @classmethod
    def new(cls, checkpoint: _Checkpoint) -> Self:
        """Returns an attempt with a new nonce."""
        return cls(checkpoint, secrets.token_hex(16))


class Leftover(NamedTuple):
    """An object or an unfinished upload of an attempt that was never committed, or whose step was deleted.

    Or the empty commit object of an interrupted delete.
    """

    key: str
    """Below the URL of the folder."""
    step: Any
    """The step of the attempt."""
    size: int | None
    """Size in bytes; None for an upload."""
    modified: datetime.datetime | None
    """Time when it was written, or the upload began, by the store's clock."""
    upload: UnfinishedUpload | None
    """The upload; None for an object."""
    attempt: Attempt[Any]
    """The attempt that wrote it."""


#: Running attempts of this process. Threads need no lock: each of the operations below is atomic.
_attempts: set[Attempt[Any]] = set()


@contextlib.contextmanager
def under_way(attempt: Attempt[Any]) -> Iterator[None]:
    """Marks an attempt as running: during the block its data are not leftovers for this process."""
    _attempts.add(attempt)
    try:
        yield
    finally:
        _attempts.discard(attempt)


def running() -> set[Attempt[Any]]:
    """Returns the running attempts of this process."""
    return _attempts.copy()


def of_age(written: Iterable[Leftover], now: datetime.datetime, age: datetime.timedelta) -> set[Attempt[Any]]:
    """Returns the attempts whose objects are all of this age or older. An object without a time does not expire."""
    written = list(written)
    young = {each.attempt for each in written if each.modified is None or now - each.modified < age}
    return {each.attempt for each in written} - young


class AttemptsDir(CheckpointDir, Generic[_Checkpoint]):
    """A folder with objects of attempts. Subclasses say how these are named, and what is committed."""

    #: Start of the names of all objects of attempts.
    _below: ClassVar[str] = ""

    def attempt_of(self, name: str) -> Attempt[_Checkpoint] | None:
        """Returns the attempt that owns an object; None for a name that no attempt gives."""
        raise NotImplementedError

    def uncommitted(self, attempts: set[Attempt[_Checkpoint]]) -> set[Attempt[_Checkpoint]]:
        """Returns the attempts that are certainly not committed, by what the store has now."""
        raise NotImplementedError

    def probe(self) -> tuple[Attempt[_Checkpoint], str]:
        """Returns a new attempt, and the name of an object of it."""
        raise NotImplementedError

    def written(self, delimiter: str | None = None) -> list[Leftover]:
        """Lists the objects and the unfinished uploads of all attempts; without those below a delimiter."""
        # Before the objects: an upload that ends in between is listed as an object.
        uploads = [(self.attempt_of(name), name, upload) for name, upload in self.unfinished_uploads(self._below)]
        found = self.of_attempts(self.objects(self._below, delimiter))
        owned = [(own, name, each) for own, name, each in uploads if own is not None]
        return found + [Leftover(name, own.checkpoint, None, each.begun, each, own) for own, name, each in owned]

    def of_attempts(self, listed: Iterable[ObjectInfo]) -> list[Leftover]:
        """Returns those of the listed objects that attempts own."""
        found = ((self.attempt_of(info.key), info) for info in listed)
        return [
            Leftover(info.key, own.checkpoint, info.size, info.last_modified, None, own)
            for own, info in found
            if own is not None
        ]

    def left(self, written: Collection[Leftover]) -> list[Leftover]:
        """Returns what is left of attempts that are neither committed nor running in this process.

        A running save of another process looks the same, except for its age.

        Args:
            written: What was listed before, so that later commits are seen.
        """
        own = {attempt.nonce for attempt in running()}
        free = self.uncommitted({each.attempt for each in written if each.attempt.nonce not in own})
        owned = set(self.owned(each.key for each in written))
        return [each for each in written if each.attempt in free and each.key in owned]

    def leftovers(self) -> list[Leftover]:
        """Returns what is left of attempts, as `left` finds it in all that is listed."""
        return self.left(self.written())

    def remove(self, left: list[Leftover]) -> list[Leftover]:
        """Deletes objects and aborts uploads. Returns them."""
        for each in left:
            if each.upload is not None:
                self.store.abort_upload(each.upload)
        self.delete(sorted(each.key for each in left if each.upload is None))
        return left

    def sweep_idle(self, older_than_s: float) -> list[Leftover]:
        """Deletes what is left of attempts that wrote nothing for this many seconds, by the store's clock.

        Raises:
            StoreError: The store cannot be listed, or an object cannot be deleted.
        """
        # The clock is read by a write, which is made only if there is something to delete.
        left = self.leftovers()
        attempt, name = self.probe()
        with under_way(attempt):
            now = self.time(name) if left else None
        # Listings of a store may have no times.
        old = set() if now is None else of_age(left, now, datetime.timedelta(seconds=older_than_s))
        # Once more: what was committed until that time is kept.
        return self.remove(self.left([each for each in left if each.attempt in old]))

    def sweep_expired(
        self, listed: Collection[ObjectInfo], own: Collection[str], delimiter: str | None = None
    ) -> list[Leftover]:
        """Deletes what is left of attempts that are a day older than the newest object of a save.

        Attempts that have an unfinished upload, or have written since, are kept: the times of an upload's parts are not
        known, and it may be of a slow save.

        Args:
            listed: The objects in the folder.
            own: Names of those of the save.
            delimiter: As for the listing.

        Raises:
            StoreError: A request failed.
        """
        newest = max((info.last_modified for info in listed if info.key in own and info.last_modified), default=None)
        others = self.of_attempts(info for info in listed if info.key not in own)
        old = set() if newest is None else of_age(others, newest, EXPIRED_AFTER)
        if not old:
            return []
        known, again = {(each.key, each.modified) for each in others}, self.written(delimiter)
        old -= {each.attempt for each in again if each.upload is not None or (each.key, each.modified) not in known}
        return self.remove(self.left([each for each in again if each.attempt in old]))
