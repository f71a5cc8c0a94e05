"""A local folder as the content of a save: which rank sends which file, their staging, and the upload.

Frameworks rotate and rewrite their folders while a save runs in the background. So a rank first links the files that it
sends into a temporary folder (`temporary_folder`), from which they are uploaded. A file that is rewritten in place
changes under its link: its size and time of modification are compared when it was sent.

Files of up to 64 MiB have a SHA-256 in the commit. One that is equal to that of the last commit is copied by the store.
"""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeVar

from torchobj.checkpoint.checkpoint_dir import is_canonical
from torchobj.checkpoint.steps.commit import Kind, StoredObject, WrittenObject, folder_of
from torchobj.checkpoint.steps.commits import Commits, UnreadableCommitError
from torchobj.checkpoint.steps.temporary_folder import TEMPORARY, TemporaryFolder
from torchobj.config import StoreConfig
from torchobj.exceptions import (
    CheckpointError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    StoreError,
    TransferError,
)
from torchobj.files import upload
from torchobj.ranks.machine import machine
from torchobj.ranks.meeting import Ranks
from torchobj.store.concurrency import concurrently
from torchobj.store.transfers import FilePath, FileState, ProgressOption, counters_to

__all__ = ["FolderContent", "files_below", "link_or_copy", "sha256_of"]

#: Maximum size of files that have a SHA-256, in bytes. Weights and optimizer states are larger, and differ each time.
_HASHED_BYTES = 64 << 20

#: Errors of file systems and of the kernel that refuse to link a file.
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}

#: The files below a folder, by relative path.
_Files: TypeAlias = Mapping[str, FileState]

_Result = TypeVar("_Result")


class FolderContent:
    """The files below a folder. The ranks meet twice in `stage`, and twice in `write`.

    Args:
        folder: The folder of this rank. Ranks may have the same one, or folders of their own.
        commits: The commit objects; the last one may name equal files.
        progress: Receives the progress of the files that this rank sends.
        config: How the store is reached.
    """

    kind: Kind = "folder"

    def __init__(
        self, folder: FilePath, commits: Commits, *, progress: ProgressOption, config: StoreConfig | None
    ) -> None:
        self._folder, self._commits, self._progress, self._config = folder, commits, progress, config
        #: Has the files that this rank sends; None if it sends none.
        self._temporary: TemporaryFolder | None = None
        self._staged: _Files = {}

    def stage(self, ranks: Ranks) -> None:
        """Links the files that this rank sends into a temporary folder, or copies them where links fail.

        Raises:
            ConfigError: `progress` is not valid, no rank has a file, or a temporary folder cannot be created.
            CheckpointError: A file cannot be saved, or the folder changes meanwhile.
        """
        with ranks.meeting() as meeting:
            counters_to(self._progress)
            folder, found = self._found()
            seen = meeting.gather((machine(), found))
            if seen is not None:
                if not any(files for _, files in seen):
                    raise ConfigError(f"folder={os.fspath(self._folder)!r}: does not exist, or has no files")
                meeting.result = _senders(seen)
        own = [name for name, rank in meeting.result.items() if rank == ranks.number]
        try:
            with ranks.meeting():
                if own:
                    self._temporary = TemporaryFolder(folder.parent)
                    self._link(folder, self._temporary.files, own, found)
        except BaseException:
            self._remove()
            raise

    def _found(self) -> tuple[Path, _Files]:
        """Returns the folder without symbolic links in its path, and the files below it: none if it does not exist."""
        try:
            folder = Path(self._folder).resolve()
            return folder, files_below(folder) if folder.exists() else {}
        except OSError as error:
            raise CheckpointError(f"{self._folder}: the folder cannot be read: {error}") from error

    def _link(self, folder: Path, target: Path, names: Sequence[str], found: _Files) -> None:
        try:
            for each in {PurePosixPath(name).parent for name in names}:
                (target / each).mkdir(parents=True, exist_ok=True)
            for name in names:
                link_or_copy(folder / name, target / name)
            self._staged = files_below(target)
            unchanged = files_below(folder)
        except FileNotFoundError as error:
            raise self._changed(f"{error.filename} is gone") from error
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be staged in {target}: {error}") from error
        for name in names:
            if _content_of(self._staged[name]) != _content_of(found[name]):
                raise self._changed(name)
        if unchanged != found:
            raise self._changed(min(name for name, _ in unchanged.items() ^ found.items()))

    def write(self, folder: str, writers: Ranks) -> Mapping[str, WrittenObject]:
        """Uploads the files that this rank sends, except for those that the store can copy from the last commit.

        Raises:
            CheckpointError: A file was changed since it was staged, or cannot be read.
            TransferError: Some files could not be uploaded.
        """
        try:
            with writers.meeting() as meeting:
                if writers.is_first:
                    meeting.result = self._last_objects()
            last = meeting.result
            with writers.meeting() as meeting:
                sent = {} if self._temporary is None else self._sent(self._temporary.files, folder, last)
                of_all = meeting.gather(sent)
            return {name: item for of_rank in of_all or () for name, item in of_rank.items()}
        finally:
            self._remove()

    def _last_objects(self) -> dict[str, StoredObject]:
        """Returns the objects of the latest step that have a SHA-256, by their names in its folder.

        Only those that the store has as they were committed: damage is not copied.
        """
        try:
            commit = self._commits.read(max(self._commits.versions(), default=0))
        except (ObjectNotFoundError, UnreadableCommitError):
            return {}
        folder = folder_of(commit.attempt)
        versions = {info.key: info.version for info in self._commits.objects(folder)}
        return {
            item.key.removeprefix(folder): item
            for item in commit.objects
            if item.sha256 is not None and item.etag is not None and versions.get(item.key) == item.etag
        }

    def _sent(self, staged: Path, url: str, last: Mapping[str, StoredObject]) -> dict[str, WrittenObject]:
        states = self._staged
        small = [name for name, state in states.items() if state[2] <= _HASHED_BYTES]
        try:
            sha256s = _each(lambda name: sha256_of(staged / name), small)
            self._check(files_below(staged), states)
        except OSError as error:
            raise CheckpointError(f"{self._folder}: cannot be read: {error}") from error
        equal = {
            name: last[name]
            for name, sha256 in sha256s.items()
            if name in last and (last[name].size, last[name].sha256) == (states[name][2], sha256)
        }
        copied = self._copied(url, equal)
        for name in copied:
            (staged / name).unlink()
        if len(copied) < len(states):
            try:
                done = upload(staged, url, config=self._config, progress=self._progress, _lists_files=True)
            except TransferError as error:
                if any(isinstance(failure, ObjectChangedError) for _, failure in error.failures):
                    raise self._changed(str(error)) from error
                raise
            sent = {name: state for name, (_, state) in done._files.items() if state is not None}
            self._check(sent, states.keys() - copied)
        return {name: WrittenObject(state[2], None, sha256s.get(name)) for name, state in states.items()}

    def _copied(self, url: str, equal: Mapping[str, StoredObject]) -> set[str]:
        """Lets the store copy equal objects of the last commit. Returns the names of those that it copied."""
        commits = self._commits
        target = commits.key(url.removeprefix(f"{commits.url}/"))

        def is_copied(name: str) -> bool:
            try:
                commits.store.copy(commits.key(equal[name].key), target + name)
            except StoreError:
                # Its step was deleted meanwhile, or this account may not read it: the file is sent.
                return False
            return True

        return {name for name, done in _each(is_copied, equal).items() if done}

    def _check(self, read: _Files, names: Iterable[str]) -> None:
        """Checks that these files were read as they were staged."""
        for name in names:
            if name not in read or _content_of(read[name]) != _content_of(self._staged[name]):
                raise self._changed(name)

    def _changed(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{os.fspath(self._folder)}: changed while it was saved: {what}; save it when the framework has written "
            "all files, which must be replaced instead of rewritten as long as the save runs"
        )

    def _remove(self) -> None:
        if self._temporary is not None:
            self._temporary.remove()
            self._temporary = None


def files_below(folder: Path) -> dict[str, FileState]:
    """Returns the files below a folder, by relative path, without those whose names start with `.torchobj-`.

    Raises:
        CheckpointError: A checkpoint cannot contain a file: it is a symbolic link, a device, a pipe or a socket, or its
            name is not UTF-8 or has a backslash.
        OSError: A folder cannot be read.
    """
    found, folders = dict[str, FileState](), [""]
    while folders:
        prefix = folders.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.name.startswith(TEMPORARY):
                    continue
                name, info = prefix + entry.name, entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    folders.append(f"{name}/")
                elif stat.S_ISREG(info.st_mode) and is_canonical(name):
                    found[name] = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
                else:
                    raise CheckpointError(_refusal(folder, name, info.st_mode))
    return found


def _refusal(folder: Path, name: str, mode: int) -> str:
    if stat.S_ISLNK(mode):
        return f"{folder}: {name!r} is a symbolic link, which a checkpoint cannot contain; replace it by its target"
    if stat.S_ISREG(mode):
        return f"{folder}: {name!r} cannot be saved: the name of a file must be UTF-8, without backslashes; rename it"
    return f"{folder}: {name!r} is a device, a pipe or a socket, which a checkpoint cannot contain; remove it"


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content_of(state: FileState) -> tuple[int, int]:
    """Size and time of modification, which a copy has too."""
    return state[2:]


def link_or_copy(source: Path, target: Path) -> None:
    """Links a file, or copies it with its time of modification where links fail."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _senders(seen: Sequence[tuple[str, _Files]]) -> dict[str, int]:
    """Returns which rank sends each file: of the ranks that have it, the one with the fewest bytes so far.

    A file of the same name and size on another machine is a copy: that of the first rank is sent.

    Args:
        seen: The machine of each rank, and the files that it has.

    Raises:
        CheckpointError: Ranks have different files of one name, or one rank has a folder of this name.
    """
    ranks_of = dict[str, list[int]]()
    for rank, (host, files) in enumerate(seen):
        for name, state in files.items():
            ranks = ranks_of.setdefault(name, [rank])
            first_host, first = seen[ranks[0]][0], seen[ranks[0]][1][name]
            # A network file system has another device number on each machine.
            if state[1:] == first[1:] and (host != first_host or state == first):
                ranks += [rank] * (rank != ranks[0])
            elif host == first_host or state[2] != first[2]:
                raise CheckpointError(
                    f"{name!r} is another file on rank {rank} ({state[2]} bytes) than on rank {ranks[0]} ({first[2]} "
                    "bytes): save one folder, or files with names of their own"
                )
    folders = {os.fspath(parent) for name in ranks_of if "/" in name for parent in PurePosixPath(name).parents}
    if both := sorted(folders & ranks_of.keys()):
        raise CheckpointError(f"{both[0]!r} is a file on one rank, and a folder on another one")
    bytes_of, senders = [0] * len(seen), dict[str, int]()
    for name in sorted(ranks_of, key=lambda name: -seen[ranks_of[name][0]][1][name][2]):
        senders[name] = rank = min(ranks_of[name], key=bytes_of.__getitem__)
        # Empty files are divided too.
        bytes_of[rank] += seen[rank][1][name][2] + 1
    return senders


def _each(function: Callable[[str], _Result], names: Iterable[str]) -> dict[str, _Result]:
    """Calls a function with each name, concurrently, and returns the results by name. Raises the first error."""
    results = dict[str, _Result]()
    for name, outcome in concurrently(function, names):
        if isinstance(outcome, Exception):
            raise outcome
        results[name] = outcome
    return results
