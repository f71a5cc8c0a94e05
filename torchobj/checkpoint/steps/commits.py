"""Writes, reads and deletes commit objects, which are written last and commit a checkpoint. Never deletes by prefix.

Below the manager's URL, an attempt to save a step writes its data under `steps/{step:012}-{nonce}/`. The nonce is
unique, so that two writers, or two attempts, share no key. After all data, `commits/{step:012}.json` is written on the
condition that it does not exist. It names the attempt and each of its objects. A step exists if its commit object
exists and is not empty; `latest.json` names the latest step for other tools, and is not read here.

A delete first deletes the commit object on the condition that it still has the version that was read, and then the
data: of a concurrent delete and `overwrite=True`, one fails. On servers that ignore the condition of a DELETE, the
commit object is first replaced by an empty one, with a conditional PUT, and then deleted.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

from torchobj._torchobj import Buffer
from torchobj.checkpoint.leftovers import Attempt, AttemptsDir, Leftover
from torchobj.checkpoint.steps.commit import (
    DIGITS,
    Commit,
    StoredObject,
    WrittenObject,
    attempt_of,
    check_size,
    folder_of,
)
from torchobj.config import StoreConfig
from torchobj.exceptions import (
    BucketNotFoundError,
    CheckpointError,
    ObjectChangedError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UnsupportedError,
)
from torchobj.files.links import remove_empty_folders, without_links
from torchobj.store import ObjectInfo
from torchobj.store.concurrency import concurrently
from torchobj.urls import CLOUD_SCHEMES
from torchobj.warn_once import Once, warn_once

__all__ = ["Commits", "CommittedByAnotherError", "UnreadableCommitError"]

logger = logging.getLogger("torchobj")

_COMMIT_KEY = re.compile(rf"commits/([0-9]{{{DIGITS}}})\.json")
_POINTER = "latest.json"
#: Not a version in any store.
_NO_VERSION = '"torchobj-no-version"'
#: A generation that no object has. Other texts are refused without a request, which would not test the server.
_NO_GENERATION = "1"
#: Attempts to update the pointer while other processes update it.
_POINTER_ATTEMPTS = 3


def _commit(step: int) -> str:
    """Returns the name of a commit object."""
    return f"commits/{step:0{DIGITS}}.json"


class CommittedByAnotherError(CheckpointError):
    """Another writer committed or deleted the step: this attempt cannot be committed any more."""


class UnreadableCommitError(CheckpointError):
    """A commit object is not valid."""


class Commits(AttemptsDir[int]):
    """The folder of a manager: the commit objects, and the objects that they name.

    Args:
        url: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder` or `memory://name/folder`.
        config: How the store is reached.
    """

    _below = "steps/"

    def __init__(self, url: str, config: StoreConfig | None) -> None:
        super().__init__(url, config)
        self._no_version = _NO_GENERATION if self.scheme == "gs" else _NO_VERSION
        self._is_delete_conditional: bool | None = None if self.scheme in CLOUD_SCHEMES else True
        #: What is logged once, and not at every save.
        self.once = Once()
        #: Whether a save has deleted what killed saves left.
        self.is_swept = False
        #: Commits that were read or written, by step. Commit objects never change, but may be replaced.
        self._known: dict[int, Commit] = {}

    def versions(self) -> dict[int, str | None]:
        """Returns the committed steps, ascending, with the versions of their commit objects. One listing."""
        return {step: info.version for step, info in self.committed().items()}

    def committed(self) -> dict[int, ObjectInfo]:
        """Returns the commit objects of the committed steps, ascending. One listing."""
        return {step: info for step, info in self._commit_objects() if info.size != 0}

    def _commit_objects(self) -> list[tuple[int, ObjectInfo]]:
        objects = sorted(self.objects("commits/"), key=lambda info: info.key)
        found = ((_COMMIT_KEY.fullmatch(info.key), info) for info in objects)
        return [(int(match[1]), info) for match, info in found if match is not None]

    def find_commit(self, step: int) -> ObjectInfo | None:
        """Returns size and version of a step's commit object; None if the step is not committed.

        Deletes an empty commit object of an interrupted delete.
        """
        info = self.head(_commit(step))
        if info is None or info.size != 0:
            return info
        self._remove(_commit(step), info.version)
        return None

    def read(self, step: int, found: ObjectInfo | None = None) -> Commit:
        """Returns the commit of a step.

        Args:
            step: Number of the step.
            found: The result of `find_commit`, if it was called before.

        Raises:
            ObjectNotFoundError: The step is not committed.
            ObjectChangedError: The commit object was replaced after `find_commit`.
            UnreadableCommitError: The object is not a valid commit of this step.
        """
        key, version = self.key(_commit(step)), None if found is None else found.version
        with self._checked(step):
            check_size((found or self.store.head(key)).size)
        return self._parsed(step, self.store.get(key, version=version), version)

    def readable(self, found: Mapping[int, ObjectInfo] | None = None) -> list[Commit]:
        """Returns all valid commits, ascending. Others are logged, and never deleted.

        Args:
            found: The result of `committed`, if it was called before.
        """
        found = self.committed() if found is None else found
        # Listings may have no versions.
        current = {(step, info.version) for step, info in found.items() if info.version is not None}
        self._known = {step: commit for step, commit in self._known.items() if (step, commit.version) in current}
        unread = []
        for step in sorted(found.keys() - self._known.keys()):
            with self._unreadable_logged(), self._checked(step):
                check_size(found[step].size)
                unread.append(step)
        bodies = self.store.get_many([self.key(_commit(step)) for step in unread], return_errors=True)
        for step, body in zip(unread, bodies, strict=True):
            # It may have been deleted after the listing.
            with self._unreadable_logged(), suppress(ObjectNotFoundError):
                if isinstance(body, Exception):
                    raise body
                self._known[step] = self._parsed(step, cast("Buffer", body), found[step].version)
        return [self._known[step] for step in found if step in self._known]

    @contextmanager
    def _unreadable_logged(self) -> Iterator[None]:
        try:
            yield
        except UnreadableCommitError as error:
            warn_once(self.once, "%s", error)

    def stored(self, attempt: Attempt[int], expected: Mapping[str, WrittenObject]) -> tuple[StoredObject, ...]:
        """Returns the objects of an attempt, to be committed. All of them belong to it, because its nonce is unique.

        Args:
            attempt: The attempt, which has written everything.
            expected: What it has written, by the names in its folder.

        Raises:
            CheckpointError: An object is missing, or has another size.
        """
        folder, unknown = folder_of(attempt), WrittenObject()
        # Without markers of folders, and other keys that a commit cannot name.
        found = [info for info in self.objects(folder) if attempt_of(info.key) == attempt]
        names = [info.key.removeprefix(folder) for info in found]
        # Listings may have no sizes.
        sizes = [self.store.head(self.key(info.key)).size if info.size is None else info.size for info in found]
        known = [expected.get(name, unknown) for name in names]
        other = {name for name, size, own in zip(names, sizes, known, strict=True) if own.size not in (None, size)}
        if missing := sorted(expected.keys() - set(names) | other):
            message = (
                f"step {attempt.checkpoint}: {', '.join(missing)} is gone, or has another size; did another process "
                "call sweep? Its older_than_s must be longer than a save takes"
            )
            raise CheckpointError(f"{self.url}: {message}")
        return tuple(
            StoredObject(info.key, size or 0, info.version, own.crc32, own.sha256)
            for info, size, own in zip(found, sizes, known, strict=True)
        )

    def publish(self, commit: Commit, replaces: str | None = None) -> None:
        """Commits a checkpoint.

        Args:
            commit: The commit; all its objects exist.
            replaces: The version of the commit object that is replaced; None if the step must not be committed.

        Raises:
            CommittedByAnotherError: Another writer committed or deleted the step.
            StoreError: The commit object could not be written. If the response was lost, the step may be committed, and
                the error has a note about it.
        """
        try:
            version = self._put_if(commit.step, commit.to_json(), replaces)
        except StoreError as error:
            self._settle(commit, replaces, error)
        else:
            self._known[commit.step] = dataclasses.replace(commit, version=version)

    def _put_if(self, step: int, body: bytes, replaces: str | None) -> str:
        """Writes a commit object, if the existing one has this version."""
        key = self.key(_commit(step))
        try:
            return self.store.put(key, body, overwrite=replaces is not None, if_version=replaces)
        except UnsupportedError:
            # Compares versions just before the write.
            info = self.head(_commit(step))
            if (None if info is None else info.version) != replaces:
                raise PreconditionFailedError(f"put {self.store.url}/{key}: the object was replaced") from None
            warn_once(
                self.once,
                "%s does not support conditional writes: two writers of the same step may overwrite each other",
                self.url,
            )
            return self.store.put(key, body)

    def _settle(self, commit: Commit, replaces: str | None, error: StoreError) -> None:
        """Returns if the step was committed in spite of `error`; raises otherwise."""
        try:
            committed = self.read(commit.step).attempt
        except ObjectNotFoundError:
            committed = None
        except (StoreError, CheckpointError):
            error.add_note(f"it is not known whether step {commit.step} was committed: call steps() later")
            raise error from None
        if committed == commit.attempt:
            return
        if committed is not None and isinstance(error, PreconditionFailedError):
            message = f"{self.url}: step {commit.step} was committed by another writer; this attempt is discarded"
            raise CommittedByAnotherError(message) from error
        refused = isinstance(error, PreconditionFailedError | ObjectNotFoundError)
        if committed is None and replaces is not None and refused and not isinstance(error, BucketNotFoundError):
            message = f"{self.url}: step {commit.step} was deleted while it was being replaced; save it once more"
            raise CommittedByAnotherError(message) from error
        if error.status is None or error.status >= 500:
            error.add_note(
                f"step {commit.step} is not committed yet, but the request may still take effect: call steps() later"
            )
        raise error

    def delete_step(self, step: int) -> None:
        """Deletes a step. If its commit object cannot be read, the data becomes a leftover.

        Raises:
            ObjectNotFoundError: The step is not committed.
            CommittedByAnotherError: The step was saved again in the meantime; nothing was deleted.
        """
        found = self.find_commit(step)
        if found is None:
            raise ObjectNotFoundError(f"head {self.url_of(_commit(step))}: the step is not committed")
        try:
            commit = self.read(step, found)
        except UnreadableCommitError:
            self.delete_unread(step, found.version)
        except ObjectChangedError:
            raise self._saved_again(step) from None
        else:
            self.delete_commit(commit)
        self.point()

    def _saved_again(self, step: int) -> CommittedByAnotherError:
        return CommittedByAnotherError(f"{self.url}: step {step} was saved again, and was not deleted")

    def delete_commit(self, commit: Commit) -> None:
        """Deletes a step: first its commit object, if it has the version that was read, then the objects that it names.

        Raises:
            CommittedByAnotherError: The step was saved again since the commit was read; nothing was deleted.
        """
        self.delete_unread(commit.step, commit.version)
        self.delete(item.key for item in commit.objects)

    def delete_unread(self, step: int, version: str | None) -> None:
        """Deletes the commit object of a step. The objects that it names become leftovers.

        Raises:
            CommittedByAnotherError: The commit object has another version by now; nothing was deleted.
        """
        self._known.pop(step, None)
        try:
            if version is not None and self._deletes_by_version():
                return self.store.delete(self.key(_commit(step)), if_version=version)
        except PreconditionFailedError:
            raise self._saved_again(step) from None
        except UnsupportedError:
            logger.debug("%s: no conditional deletes", self.url)
        empty = self._empty(step, version)
        return None if empty is None else self._remove(_commit(step), empty)

    def _deletes_by_version(self) -> bool:
        """Returns whether the server honours the condition of a DELETE. Some servers ignore it.

        Tested once, with an object in the folder of an attempt of its own.
        """
        if self._is_delete_conditional is None:
            _, name = self.probe()
            self.store.put(self.key(name), b"probe")
            try:
                self.store.delete(self.key(name), if_version=self._no_version)
                self._is_delete_conditional = False
            except UnsupportedError:
                self._is_delete_conditional = False
            except PreconditionFailedError:
                self._is_delete_conditional = True
            finally:
                self.delete([name])
        return self._is_delete_conditional

    def _empty(self, step: int, version: str | None) -> str | None:
        """Replaces a commit object with an empty one and returns its version, or None if it does not exist."""
        with suppress(PreconditionFailedError, ObjectNotFoundError):
            if version is not None:
                return self._put_if(step, b"", version)
        # Another process is deleting it too, or the response to the first attempt was lost.
        info = self.head(_commit(step))
        if info is not None and info.size != 0:
            raise self._saved_again(step)
        return None if info is None else info.version

    def _remove(self, name: str, version: str | None) -> None:
        """Deletes an object if it has this version. Another version is newer, and is kept."""
        if not self._is_delete_conditional:
            info = self.head(name)
            if info is None or info.version != version:
                return
        try:
            self.store.delete(self.key(name), if_version=version)
        except PreconditionFailedError:
            logger.info("%s was written again, and is kept", self.url_of(name))
        except UnsupportedError:
            self.store.delete(self.key(name))

    def delete(self, names: Iterable[str]) -> list[str]:
        """Deletes objects of attempts, and their empty folders. Ignores other objects."""
        deleted = super().delete(names)
        remove_empty_folders(self.root, deleted)
        return deleted

    def owned(self, names: Iterable[str]) -> list[str]:
        """Returns the names that belong to attempts, without files that are reached through a symbolic link."""
        below = (name.removeprefix("steps/") for name in names if attempt_of(name) is not None)
        return [f"steps/{name}" for name in without_links(self.root and self.root / "steps", below)]

    def attempt_of(self, name: str) -> Attempt[int] | None:
        """Returns the attempt that owns an object of data."""
        return attempt_of(name)

    def probe(self) -> tuple[Attempt[int], str]:
        """Returns a new attempt of step 0, and the name of an object of it."""
        attempt = Attempt.new(0)
        return attempt, f"{folder_of(attempt)}probe"

    def uncommitted(self, attempts: set[Attempt[int]]) -> set[Attempt[int]]:
        """Returns the attempts that no commit object names. The data of one that cannot be read is kept."""
        found = self.committed()
        known = {commit.step: commit.attempt for commit in self.readable(found)}
        unread = found.keys() - known.keys()
        left = {each for each in attempts if each.checkpoint not in unread and known.get(each.checkpoint) != each}
        # A listing may be old, as that of a gateway with a cache: each commit object is read.
        for step, commit in concurrently(self.read, {each.checkpoint for each in left}):
            if isinstance(commit, Commit):
                left.discard(commit.attempt)
            elif isinstance(commit, UnreadableCommitError):
                left = {each for each in left if each.checkpoint != step}
            elif not isinstance(commit, ObjectNotFoundError):
                raise commit
        return left

    def written(self, delimiter: str | None = None) -> list[Leftover]:
        """Lists the data of all attempts, and the empty commit objects of interrupted deletes, without a nonce."""
        empty = [(step, info) for step, info in self._commit_objects() if info.size == 0]
        deleted = [Leftover(info.key, step, 0, info.last_modified, None, Attempt(step, "")) for step, info in empty]
        return super().written(delimiter) + deleted

    def left(self, written: Collection[Leftover]) -> list[Leftover]:
        """Returns what is left of attempts, and the empty commit objects."""
        data = [each for each in written if each.attempt.nonce]
        return super().left(data) + [each for each in written if not each.attempt.nonce]

    def remove(self, left: list[Leftover]) -> list[Leftover]:
        """Deletes objects, and aborts uploads. Returns them."""
        for each in left:
            if not each.attempt.nonce:
                # It deletes the empty commit object of a step.
                self.find_commit(each.attempt.checkpoint)
        super().remove([each for each in left if each.attempt.nonce])
        return left

    def sweep_after(self, attempt: Attempt[int]) -> list[Leftover]:
        """Deletes the leftovers of attempts that are a day older than `attempt`, which was committed. Returns them.

        Once for this object: later leftovers are of processes that run now.
        """
        if self.is_swept:
            return []
        self.is_swept = True
        listed = [(attempt_of(info.key), info) for info in self.objects("steps/")]
        # The data of a step that was replaced although its commit could not be read is left for `sweep`.
        step = attempt.checkpoint
        others = [info for own, info in listed if own == attempt or own is None or own.checkpoint != step]
        return self.sweep_expired(others, {info.key for own, info in listed if own == attempt})

    def pointer(self) -> str | None:
        """Returns the version of `latest.json`; None if it does not exist."""
        info = self.head(_POINTER)
        return None if info is None else info.version

    def point(self, found: tuple[str | None, int | None] | None = None) -> None:
        """Updates `latest.json`, which names the latest committed step, for other tools.

        Args:
            found: The result of `pointer`, and then the latest step of a listing after it, if they are known.
        """
        key = self.key(_POINTER)
        for _ in range(_POINTER_ATTEMPTS):
            # In this order: the pointer of a process that lists a newer step is not replaced.
            version, newest = found or (self.pointer(), max(self.versions(), default=None))
            found = None
            if newest is None:
                return None if version is None else self._remove(_POINTER, version)
            body = json.dumps({"step": newest, "commit": self.key(_commit(newest))}).encode()
            with suppress(PreconditionFailedError):
                try:
                    self.store.put(key, body, overwrite=version is not None, if_version=version)
                except UnsupportedError:
                    self.store.put(key, body)
                return None
        return None

    def _parsed(self, step: int, data: Buffer, version: str | None) -> Commit:
        body = bytes(cast("Any", data))
        if not body:
            raise ObjectNotFoundError(f"get {self.url_of(_commit(step))}: the step was deleted")
        with self._checked(step):
            return Commit.from_json(body, step, version)

    @contextmanager
    def _checked(self, step: int) -> Iterator[None]:
        """Converts a ValueError of the block to an error about the commit object of a step."""
        try:
            yield
        except ValueError as error:
            remedy = f"restore another step, or remove it with delete({step}) or save({step}, ..., overwrite=True)"
            raise UnreadableCommitError(
                f"{self.url_of(_commit(step))}: not a valid commit object: {error}; {remedy}"
            ) from error
