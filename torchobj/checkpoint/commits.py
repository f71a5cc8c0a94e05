"""Commit objects: what is written last, and makes a checkpoint real. Knows no tensors, and removes nothing by a prefix.

Below the manager's URL an attempt to save a step writes its data under `steps/{step:012}-{nonce}/`, where the nonce is
the attempt's own: two writers, or a second attempt, share no key. When all data is there, `commits/{step:012}.json` is
put on the condition that there is none. It names the attempt and each of its objects. A step exists when its commit
object exists and is not empty; `latest.json` names the newest for other tools, and is not read here.

A delete removes the commit object on the condition that it is of the version that was read, and then the data: of a
delete and an `overwrite=True` one fails. Where a server ignores the condition of a DELETE, the commit object is first
replaced by an empty one, which is a conditional PUT, and then deleted.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from torchobj._torchobj import Buffer
from torchobj.checkpoint.commit_format import DIGITS, Attempt, Commit, Kind, StoredObject, check_size
from torchobj.checkpoint.keys import remove_empty_folders, without_links
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
from torchobj.store import ObjectInfo, Store
from torchobj.urls import parse_url

__all__ = ["Attempt", "Commit", "Commits", "CommittedByAnotherError", "Kind", "StoredObject", "UnreadableCommitError"]

logger = logging.getLogger("torchobj")

_COMMIT_KEY = re.compile(rf"commits/([0-9]{{{DIGITS}}})\.json")
_POINTER = "latest.json"
#: What no store calls a version.
_NO_VERSION = '"torchobj-no-version"'
#: A pointer that others keep moving is theirs.
_POINTER_ATTEMPTS = 3


class CommittedByAnotherError(CheckpointError):
    """Another writer was first: this attempt can no longer become the step."""


class UnreadableCommitError(CheckpointError):
    """A commit object does not say what belongs to its step."""


class Commits:
    """The commit objects below a URL, and the deletion of what they name.

    Args:
        url: `s3://bucket/folder`, `file:///folder` or `memory://name/folder`.
        config: How the store is reached.
    """

    def __init__(self, url: str, config: StoreConfig) -> None:
        parsed = parse_url(url)
        inside = parsed.scheme != "file"
        self.store = Store(parsed.base if inside else url, config=config)
        folder = parsed.key.rstrip("/") if inside else ""
        self._prefix = f"{folder}/" if folder else ""
        self.url = f"{self.store.url}/{self._prefix}".rstrip("/")
        #: Where a store of files has its folders, which it does not remove.
        self._root = None if inside else Path("/", parsed.key)
        self._has_buckets = parsed.scheme == "s3"
        self._is_delete_conditional: bool | None = None if self._has_buckets else True
        self._said: set[str] = set()
        #: Commit objects that were read, by step, with their version: they are never changed, only replaced.
        self._known: dict[int, tuple[str | None, Commit]] = {}

    def key(self, below: str) -> str:
        """The whole key of what is kept at `below`."""
        return self._prefix + below

    def objects(self, below: str) -> list[ObjectInfo]:
        """What is kept under `below`, with keys below the URL. A folder that does not exist holds nothing.

        Raises:
            BucketNotFoundError: There is no such bucket.
        """
        try:
            return [
                dataclasses.replace(info, key=info.key.removeprefix(self._prefix))
                for info in self.store.list(self.key(below))
                if info.key.startswith(self.key(below))
            ]
        except ObjectNotFoundError as error:
            if self._has_buckets and isinstance(error, BucketNotFoundError):
                raise
            return []

    def versions(self) -> dict[int, str | None]:
        """The committed steps, ascending, each with the version of its commit object. One listing."""
        return {step: info.version for step, info in self._commit_objects() if info.size != 0}

    def deleted(self) -> list[tuple[int, ObjectInfo]]:
        """The empty commit objects of deletes that were interrupted, by step. One listing."""
        return [(step, info) for step, info in self._commit_objects() if info.size == 0]

    def _commit_objects(self) -> list[tuple[int, ObjectInfo]]:
        objects = sorted(self.objects("commits/"), key=lambda info: info.key)
        found = ((_COMMIT_KEY.fullmatch(info.key), info) for info in objects)
        return [(int(match[1]), info) for match, info in found if match is not None]

    def version(self, step: int) -> str | None:
        """The version of the step's commit object; None where the step is not committed.

        An empty commit object, which an interrupted delete left, is removed.
        """
        key = self._commit_key(step)
        info = self._info(key)
        if info is None or info.size != 0:
            return None if info is None else info.version
        self._remove(key, info.version)
        return None

    def read(self, step: int, version: str | None = None) -> Commit:
        """The commit of a step.

        Raises:
            ObjectNotFoundError: The step is not committed.
            ObjectChangedError: Its commit object is not of this version.
            UnreadableCommitError: The object is no commit of this step.
        """
        key = self._commit_key(step)
        size = self.store.head(key).size
        with self._checked(step):
            check_size(size)
        return self._parsed(step, self.store.get(key, version=version))

    def readable(self) -> list[Commit]:
        """All commits that can be read, ascending. The others are logged, and never deleted."""
        found = {step: info for step, info in self._commit_objects() if info.size != 0}
        self._known = {step: known for step, known in self._known.items() if step in found}
        unread = []
        for step, info in found.items():
            if info.version is not None and info.version == self.known_version(step):
                continue
            self._known.pop(step, None)
            with self._unreadable_logged(), self._checked(step):
                check_size(info.size)
                unread.append(step)
        bodies = self.store.get_many(map(self._commit_key, unread), return_errors=True)
        for step, body in zip(unread, bodies, strict=True):
            # It may be deleted meanwhile.
            with self._unreadable_logged(), suppress(ObjectNotFoundError):
                if isinstance(body, Exception):
                    raise body
                self._known[step] = (found[step].version, self._parsed(step, cast("Buffer", body)))
        return [self._known[step][1] for step in found if step in self._known]

    @contextmanager
    def _unreadable_logged(self) -> Iterator[None]:
        try:
            yield
        except UnreadableCommitError as error:
            self.warn_once(str(error))

    def known_version(self, step: int) -> str | None:
        """The version of a commit object that `readable` returned, or that this process wrote."""
        known = self._known.get(step)
        return None if known is None else known[0]

    def publish(self, commit: Commit, replaces: str | None = None) -> None:
        """Makes a checkpoint real.

        Args:
            commit: What is committed; all its objects are there.
            replaces: The version of the commit object of this step that is replaced; None where there must be none.

        Raises:
            CommittedByAnotherError: Another writer committed the step.
            StoreError: What else kept it from being written. Where its answer was lost the commit may still be there,
                and the error has a note that says so.
        """
        key, body = self._commit_key(commit.step), commit.to_json()
        try:
            version = self._put_if(key, body, replaces)
        except StoreError as error:
            self._settle(commit, replaces, error)
        else:
            self._known[commit.step] = (version, commit)

    def _put_if(self, key: str, body: bytes, replaces: str | None) -> str:
        try:
            return self.store.put(key, body, if_none_match=replaces is None, if_match=replaces)
        except UnsupportedError:
            self._compare(key, replaces)
            return self.store.put(key, body)

    def _compare(self, key: str, expected: str | None) -> None:
        """Compares versions just before a write: all that can be done on a server without conditional writes."""
        info = self._info(key)
        if (None if info is None else info.version) != expected:
            raise PreconditionFailedError(f"put {self.store.url}/{key}: there is another commit object") from None
        logger.warning("%s keeps no conditions on writes: two writers of one step may not see each other", self.url)

    def _info(self, key: str) -> ObjectInfo | None:
        try:
            return self.store.head(key)
        except ObjectNotFoundError:
            return None

    def _settle(self, commit: Commit, replaces: str | None, error: StoreError) -> None:
        """Returns where the commit was made although `error` was met; raises otherwise."""
        try:
            there = self.read(commit.step).attempt
        except ObjectNotFoundError:
            there = None
        except (StoreError, CheckpointError):
            error.add_note(f"whether step {commit.step} was committed is not known: steps() says so later")
            raise error from None
        if there == commit.attempt:
            return
        if there is not None and isinstance(error, PreconditionFailedError):
            message = f"{self.url}: step {commit.step} was committed by another writer; this attempt does not count"
            raise CommittedByAnotherError(message) from error
        refused = isinstance(error, PreconditionFailedError | ObjectNotFoundError)
        if there is None and replaces is not None and refused and not isinstance(error, BucketNotFoundError):
            message = f"{self.url}: step {commit.step} was deleted while it was saved again; save it once more"
            raise CommittedByAnotherError(message) from error
        if error.status is None or error.status >= 500:
            error.add_note(f"step {commit.step} was not committed when it was looked for, and may be yet: see steps()")
        raise error

    def delete_step(self, step: int) -> None:
        """Deletes a step. Of one whose commit object cannot be read, the data is a leftover then.

        Raises:
            ObjectNotFoundError: The step is not committed.
            CommittedByAnotherError: It was saved anew meanwhile; nothing was deleted.
        """
        version = self.version(step)
        try:
            commit = self.read(step, version)
        except UnreadableCommitError:
            self.delete_unread(step, version)
        except ObjectChangedError:
            raise self._saved_anew(step) from None
        else:
            self.delete(commit, version)
        self.point()

    def _saved_anew(self, step: int) -> CommittedByAnotherError:
        return CommittedByAnotherError(f"{self.url}: step {step} was saved anew, and was not deleted")

    def delete(self, commit: Commit, version: str | None) -> None:
        """Deletes a checkpoint: first its commit object, and with it the step; then what it names.

        Args:
            commit: What was read.
            version: The version of the commit object that it was read from.

        Raises:
            CommittedByAnotherError: The step was saved anew since this commit was read; nothing was deleted.
        """
        self.delete_unread(commit.step, version)
        self.delete_objects(item.key for item in commit.objects)

    def delete_unread(self, step: int, version: str | None) -> None:
        """Deletes the commit object of a step, and with it the step. What it named is a leftover then.

        Raises:
            CommittedByAnotherError: The commit object is no longer of this version; nothing was deleted.
        """
        self._known.pop(step, None)
        key = self._commit_key(step)
        try:
            if version is not None and self._deletes_by_version():
                return self.store.delete(key, if_match=version)
        except PreconditionFailedError:
            raise self._saved_anew(step) from None
        except UnsupportedError:
            logger.debug("%s: no conditional deletes", self.url)
        empty = self._empty(step, version)
        return None if empty is None else self._remove(key, empty)

    def _deletes_by_version(self) -> bool:
        """Whether a DELETE with another version deletes nothing. Some servers ignore the condition.

        Asked once, by such a DELETE of an object that is written for it, in the folder of an attempt of its own.
        """
        if self._is_delete_conditional is None:
            name = Attempt.new(0).folder + "probe"
            self.store.put(self.key(name), b"probe")
            try:
                self.store.delete(self.key(name), if_match=_NO_VERSION)
                self._is_delete_conditional = False
            except PreconditionFailedError:
                self._is_delete_conditional = True
            finally:
                self.delete_objects([name])
        return self._is_delete_conditional

    def _empty(self, step: int, version: str | None) -> str | None:
        """Replaces a commit object by an empty one, and returns the version of that; None where there is none."""
        key = self._commit_key(step)
        try:
            if version is not None:
                return self.store.put(key, b"", if_match=version)
        except UnsupportedError:
            try:
                self._compare(key, version)
                return self.store.put(key, b"")
            except PreconditionFailedError:
                pass
        except (PreconditionFailedError, ObjectNotFoundError):
            pass
        # Another process deletes it as well, or the answer to the first request was lost.
        info = self._info(key)
        if info is not None and info.size != 0:
            raise self._saved_anew(step)
        return None if info is None else info.version

    def _remove(self, key: str, version: str | None) -> None:
        """Deletes an object of this version; one of another version is a newer one, and stays."""
        if not self._is_delete_conditional:
            info = self._info(key)
            if info is None or info.version != version:
                return
        try:
            self.store.delete(key, if_match=version)
        except PreconditionFailedError:
            logger.info("%s/%s was written again, and stays", self.store.url, key)
        except UnsupportedError:
            self.store.delete(key)

    def warn_once(self, message: str) -> None:
        """Logs a warning that is not to be read at every save."""
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)

    def delete_objects(self, keys: Iterable[str]) -> None:
        """Deletes objects of attempts by their keys below the URL. Other keys are ignored."""
        owned = self.owned(keys)
        if owned:
            self.store.delete([self.key(key) for key in owned])
            remove_empty_folders(self._root, owned)

    def owned(self, keys: Iterable[str]) -> list[str]:
        """The keys that belong to attempts. A file that a symbolic link leads to from an attempt's folder does not."""
        names = (key.removeprefix("steps/") for key in keys if Attempt.of_key(key) is not None)
        return [f"steps/{name}" for name in without_links(self._root and self._root / "steps", names)]

    def point(self) -> None:
        """Moves `latest.json` to the newest committed step, for tools that read it."""
        key = self.key(_POINTER)
        for _ in range(_POINTER_ATTEMPTS):
            info = self._info(key)
            newest, there = max(self.versions(), default=None), None if info is None else info.version
            if newest is None:
                return None if there is None else self._remove(key, there)
            body = json.dumps({"step": newest, "commit": self._commit_key(newest)}).encode()
            try:
                self._put_if_quietly(key, body, there)
            except PreconditionFailedError:
                continue
            return None
        return None

    def _put_if_quietly(self, key: str, body: bytes, there: str | None) -> None:
        try:
            self.store.put(key, body, if_none_match=there is None, if_match=there)
        except UnsupportedError:
            self.store.put(key, body)

    def _commit_key(self, step: int) -> str:
        return self.key(f"commits/{step:0{DIGITS}}.json")

    def _parsed(self, step: int, data: Buffer) -> Commit:
        body = bytes(cast("Any", data))
        if not body:
            raise ObjectNotFoundError(f"get {self.store.url}/{self._commit_key(step)}: the step was deleted")
        with self._checked(step):
            return Commit.from_json(body, step)

    @contextmanager
    def _checked(self, step: int) -> Iterator[None]:
        """Raises a ValueError of the block as what is wrong with the commit object of a step."""
        try:
            yield
        except ValueError as error:
            url = f"{self.store.url}/{self._commit_key(step)}"
            help_ = f"restore another step, or remove it with delete({step}) or save({step}, ..., overwrite=True)"
            raise UnreadableCommitError(f"{url}: no commit object of a checkpoint: {error}; {help_}") from error
