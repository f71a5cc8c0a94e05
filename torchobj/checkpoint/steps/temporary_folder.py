"""Temporary folders beside the user's, on the same file system. That of a killed process is removed by the next one.

A lock of the kernel tells whether the process of a temporary folder lives. Some network file systems show it to one
machine only, so the lock file names the machine; a folder of another one is removed after a day. Only folders with the
name and the lock file of this module are removed, and nothing behind a symbolic link.
"""

import fcntl
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from torchobj.checkpoint.leftovers import EXPIRED_AFTER
from torchobj.exceptions import ConfigError
from torchobj.ranks.machine import machine

__all__ = ["TEMPORARY", "TemporaryFolder"]

#: Start of the names of temporary files and folders, which uploads skip.
TEMPORARY = ".torchobj-"

_NAME = re.compile(rf"{re.escape(TEMPORARY)}staged-[0-9a-f]{{32}}")
_LOCK = "lock"

#: More than the name of a machine takes.
_NAME_BYTES = 4096


class TemporaryFolder:
    """A new temporary folder. Removes those of killed processes first.

    Args:
        parent: The existing folder in which it is created.

    Raises:
        ConfigError: It cannot be created.
    """

    def __init__(self, parent: Path) -> None:
        _sweep(parent)
        self._path = parent / f"{TEMPORARY}staged-{secrets.token_hex(16)}"
        #: The folder for the files.
        self.files = self._path / "files"
        new = self._path / "new"
        try:
            self._path.mkdir(0o700)
            self.files.mkdir()
            self._lock = new.open("xb", buffering=0)
            self._lock.write(machine().encode())
        except OSError as error:
            _remove(self._path)
            raise ConfigError(
                f"{parent}: a temporary folder cannot be created: {error.strerror}; the folder above a checkpoint must "
                "be writable, and should be on the same file system, so that files need not be copied"
            ) from error
        # On a file system without locks the folder has no lock file, so that no other process removes it.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Renamed when it is locked: another process does not find it before.
            new.rename(self._path / _LOCK)

    def remove(self) -> None:
        """Removes the folder with its files, as far as the file system allows."""
        self._lock.close()
        _remove(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _sweep(parent: Path) -> None:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                # An error: it is in use, has no lock file, or belongs to another user.
                with suppress(OSError), open(parent / entry.name / _LOCK, "r+b", opener=_without_links) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    age_s = time.time() - os.fstat(lock.fileno()).st_mtime
                    if lock.read(_NAME_BYTES) == machine().encode() or age_s > EXPIRED_AFTER.total_seconds():
                        _remove(parent / entry.name)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _remove(path: Path) -> None:
    # The lock file last: if the process is killed in between, the next one removes the rest.
    shutil.rmtree(path / "files", ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
