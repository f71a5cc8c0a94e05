"""The copies of steps on the disk of a machine: a folder of `Commits` that one job locks, beside the bucket's.

A copy has the names of its attempt in the bucket. It has what the ranks that share the folder have written, and its
commit object says how much of the step that is (`LocalPart`). `local_copy` writes it, and `nearest` selects the step
that a restore takes.

Ranks with the same folder on the same machine share a disk, of which the first one holds the lock, and writes and
deletes commit objects.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import re
import stat
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torchobj.checkpoint.leftovers import Attempt
from torchobj.checkpoint.steps.commit import Commit, WrittenObject, folder_of
from torchobj.checkpoint.steps.commits import Commits, UnreadableCommitError
from torchobj.checkpoint.steps.retention import Retention, check_count, expired
from torchobj.exceptions import ConfigError, TorchobjError
from torchobj.files.links import without_links
from torchobj.ranks.machine import machine
from torchobj.ranks.meeting import Ranks, check_same
from torchobj.store.concurrency import concurrently
from torchobj.warn_once import warn_once
from torchobj.workers.descriptors import Descriptor

__all__ = ["LocalFiles", "LocalSteps"]

logger = logging.getLogger("torchobj")

_LOCK = ".torchobj-lock"
#: Bytes of a file that are in memory while its CRC-32 is computed.
_BLOCK_BYTES = 4 << 20
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
#: Maximum length of the part of a folder's name that comes from the URL.
_MAX_NAME = 64

_open: "weakref.WeakSet[LocalSteps]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for steps in list(_open):
        steps.forget_lock()


# A child would keep the lock of a rank that was killed.
os.register_at_fork(after_in_child=_forget_in_child)


class LocalFiles(NamedTuple):
    """The files of a step that this rank reads from the local disk."""

    folder: str = ""
    """URL of their folder, with the slash."""
    names: frozenset[str] = frozenset()
    """Their names in it."""


class LocalSteps:
    """The copies on the disk of this machine. `open` comes first.

    Args:
        local: The folder.
        keep: Number of copies to keep.
        url: URL of the checkpoints, without a slash at the end.

    Raises:
        ConfigError: An argument is not valid.
    """

    def __init__(self, local: str | os.PathLike[str], keep: int, url: str) -> None:
        if not isinstance(local, str | os.PathLike) or not (path := os.fspath(local)) or "://" in str(path):
            raise ConfigError(f"local={local!r}: must be the path of a folder, such as '/nvme/checkpoints'")
        check_count("keep_local", keep)
        self.folder = Path(os.path.abspath(path))  # noqa: PTH100  links are not followed
        self._keep = Retention(keep)
        last = _NOT_IN_NAMES.sub("_", url.rsplit("/", 1)[-1])[-_MAX_NAME:]
        #: The folder of the copies, and their commit objects.
        self._root = self.folder / f"{last}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
        self.commits = Commits(f"file://{self._root}", None)
        #: The disk of each rank; empty before `open`.
        self.disks: list[str] = []
        #: Whether the first rank of this disk has locked it, and whether this rank is that one.
        self.is_locked = self.is_first = False
        #: Why no copy can be written on some disk; None if all can.
        self.unusable: str | None = None
        #: Seconds that the last upload of copies took; None if there was none.
        self.upload_s: float | None = None
        #: As `LocalPart.continues`, of the next step.
        self.continues: tuple[str | None, ...] = (None,)
        #: The file whose lock this rank holds.
        self._lock: Descriptor | None = None

    def open(self, ranks: Ranks, settings: Mapping[str, str]) -> None:
        """Locks the folders of all disks, at the first call. Collective.

        Args:
            ranks: The ranks that save.
            settings: The `repr` of values by name, which must be the same on all ranks.

        Raises:
            ConfigError: Another job uses a folder, other users can write to it, or the settings differ.
        """
        if self.disks:
            return
        own = f"{machine()} {self.folder}"
        with ranks.meeting() as meeting:
            of_all = meeting.gather({**settings, "disk": own})
            if of_all is not None:
                meeting.result = [each.pop("disk", "") for each in of_all]
                check_same(of_all)
        disks: list[str] = meeting.result
        first = disks.index(own)
        try:
            with ranks.meeting() as meeting:
                meeting.result = meeting.gather(self._locked() if first == ranks.number else None)
        except BaseException:
            self.close()
            raise
        failures: list[str | None] = meeting.result
        self.disks, self.unusable = disks, next((failed for failed in failures if failed is not None), None)
        self.is_locked, self.is_first = failures[first] is None, self._lock is not None

    def _locked(self) -> str | None:
        """Creates and locks the folder. Returns why it cannot be used, or None."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder, self._root):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(0o700)
                _check_folder(folder, is_ours=folder is self._root)
            _open.add(self)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = Descriptor(os.open(self.folder / _LOCK, flags, 0o600))
            fcntl.flock(self._lock.number(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"local={str(self.folder)!r}: another job, or a manager that is not closed, uses this folder; use "
                "another one"
            ) from None
        except OSError as error:
            self.close()
            return f"{self.folder}: {error}"
        return None

    def close(self) -> None:
        """Releases the lock. The next `open` takes it again."""
        if self._lock is not None:
            # Also for a child that has just been forked.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock.number(), fcntl.LOCK_UN)
        self.forget_lock()

    def forget_lock(self) -> None:
        """Closes the file in this process."""
        self._lock, self.disks, self.is_locked, self.is_first = None, [], False, False

    def path_of(self, attempt: Attempt[int]) -> Path:
        """Returns the folder of an attempt."""
        return self._root / folder_of(attempt)

    def url_of(self, attempt: Attempt[int]) -> str:
        """Returns the URL of the folder of an attempt, with the slash."""
        return self.commits.url_of(folder_of(attempt))

    def sweep(self) -> None:
        """Deletes what killed saves left, once. The lock says that none of them runs. Failures are only logged."""
        if self.commits.is_swept:
            return
        self.commits.is_swept = True
        with self._logged("what killed saves left was not deleted"):
            self.commits.remove(self.commits.leftovers())

    def publish(self, commit: Commit, known: Mapping[str, WrittenObject]) -> None:
        """Commits a copy, whose files are complete. It replaces another one of the step.

        Args:
            commit: The commit, without objects.
            known: What is known of the objects of all ranks, by their names.

        Raises:
            OSError: A file cannot be read, or the commit object not be written.
        """
        commits, attempt, folder = self.commits, commit.attempt, folder_of(commit.attempt)
        here = {info.key.removeprefix(folder) for info in commits.objects(folder)}
        stored = commits.stored(attempt, {name: each for name, each in known.items() if name in here})
        # Each has one, because an upload that is finished later compares it.
        sums = (_crc32(self._root / item.key) if item.crc32 is None else item.crc32 for item in stored)
        objects = tuple(dataclasses.replace(item, crc32=crc32) for item, crc32 in zip(stored, sums, strict=True))
        found, old = commits.find_commit(attempt.checkpoint), None
        if found is not None:
            with contextlib.suppress(UnreadableCommitError):
                old = commits.read(attempt.checkpoint, found)
        commits.publish(dataclasses.replace(commit, objects=objects), None if found is None else found.version)
        if old is not None:
            commits.delete(item.key for item in old.objects)

    def discard(self, attempt: Attempt[int]) -> None:
        """Deletes the copy of an attempt. Failures are only logged."""
        with self._logged(f"the copy of step {attempt.checkpoint} was not deleted"):
            commit = self.copy_of(attempt)
            if commit is not None:
                self.commits.delete_commit(commit)
            self.commits.delete(info.key for info in self.commits.objects(folder_of(attempt)))

    def committed(self, attempt: Attempt[int]) -> None:
        """Takes note that an attempt is in the bucket: the next step continues it.

        On the first rank of the disk: its copy says so too, so that it is not taken for one whose upload was
        interrupted, should the step be deleted in the bucket.
        """
        self.continues = (attempt.nonce,)
        if not self.is_first:
            return
        with self._logged(f"the copy of step {attempt.checkpoint} was not marked"):
            commit = self.copy_of(attempt)
            if commit is not None and commit.local is not None and commit.local.continues:
                part = dataclasses.replace(commit.local, continues=())
                self.commits.publish(dataclasses.replace(commit, local=part), commit.version)

    def restored(self, commit: Commit, *, is_local: bool) -> None:
        """Takes note of the step that was restored, which the next one continues.

        Args:
            commit: The commit; that of a copy if `is_local`.
            is_local: Whether only the local disks have it.
        """
        if is_local and commit.local is not None:
            self.continues = (commit.attempt.nonce, *commit.local.continues)
        else:
            self.committed(commit.attempt)

    def prune(self, attempt: Attempt[int]) -> None:
        """Deletes old copies, after an attempt was committed: all of them if it has none. Failures are only logged."""
        with self._logged("old copies were not deleted"):
            found = self.commits.readable()
            has_copy = any(commit.attempt == attempt for commit in found)
            old = expired(found, self._keep, {attempt.checkpoint}) if has_copy else [commit.step for commit in found]
            for commit in found:
                if commit.step in old:
                    self.commits.delete_commit(commit)

    @contextlib.contextmanager
    def _logged(self, failure: str) -> Iterator[None]:
        try:
            yield
        except (TorchobjError, OSError) as error:
            warn_once(self.commits.once, "%s: %s: %s", self.folder, failure, error, key=failure)

    def copies(self) -> list[Commit]:
        """Returns the copies on this disk whose files are all there, with their sizes; nothing if it cannot be read."""
        found: list[Commit] = []
        with self._logged("copies cannot be read"):
            found = [each for each in self.commits.readable() if each.local is not None]
        return [each for each in found if len(self._names(each)) == len(each.objects)]

    def copy_of(self, attempt: Attempt[int]) -> Commit | None:
        """Returns the copy of an attempt on this disk; None if the disk has no copy."""
        with contextlib.suppress(UnreadableCommitError):
            found = self.commits.find_commit(attempt.checkpoint)
            if found is not None:
                commit = self.commits.read(attempt.checkpoint, found)
                return commit if commit.attempt == attempt and commit.local is not None else None
        return None

    def files_of(self, commit: Commit) -> LocalFiles:
        """Returns the files on this disk that have the names and sizes of the objects of a step."""
        files = LocalFiles()
        with self._logged("copies cannot be read"):
            if self.is_locked and self.copy_of(commit.attempt) is not None:
                files = LocalFiles(self.url_of(commit.attempt), self._names(commit))
        return files

    def _names(self, commit: Commit) -> frozenset[str]:
        folder = folder_of(commit.attempt)
        sizes = {item.key: item.size for item in commit.objects}
        real = without_links(self._root, sizes)
        return frozenset(key.removeprefix(folder) for key in real if _size(self._root / key) == sizes[key])

    def damage(self, attempt: Attempt[int]) -> str | None:
        """Compares the files of a copy with its commit object. Returns how they differ, or None."""
        commit = self.copy_of(attempt)
        if commit is None:
            return None
        of_file = {self._root / item.key: item for item in commit.objects}
        for path, found in concurrently(_crc32, of_file):
            if isinstance(found, OSError):
                return f"{path}: {found}"
            if isinstance(found, Exception):
                raise found
            if (_size(path), found) != (of_file[path].size, of_file[path].crc32):
                return f"{path}: its size or CRC-32 differs from what was written"
        return None


def _check_folder(folder: Path, *, is_ours: bool) -> None:
    """Checks that no other user can change the copies. The folder above ours may be that of a disk, as `/tmp` is."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"local: {folder} is a link or a file: must be a folder")
    owners = {os.geteuid()} if is_ours else {os.geteuid(), 0}
    if found.st_uid not in owners:
        raise ConfigError(f"local: {folder} belongs to another user: use a folder of your own, such as one in it")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and (is_ours or not found.st_mode & stat.S_ISVTX):
        raise ConfigError(
            f"local: other users can write to {folder}, and so change what a restore reads: use a folder in it, or run "
            "`chmod 700` on it"
        )


def _size(path: Path) -> int | None:
    """Returns the size of a regular file; None if no file has this path."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
