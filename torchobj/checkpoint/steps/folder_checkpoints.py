"""Saves and restores local folders by step. The content of a save is `folder_content`.

A restore writes only files that the commit names, into a temporary folder beside the target, and renames it when all of
them are complete.
"""

import errno
import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, overload

from torchobj.checkpoint.steps.checkpoints import Checkpoints, NoStepError
from torchobj.checkpoint.steps.commit import Commit, folder_of
from torchobj.checkpoint.steps.commits import Commits
from torchobj.checkpoint.steps.folder_content import FolderContent, files_below, link_or_copy, sha256_of
from torchobj.checkpoint.steps.pending_save import SaveHandle
from torchobj.checkpoint.steps.temporary_folder import TemporaryFolder
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError
from torchobj.files import download
from torchobj.files.patterns import Pattern
from torchobj.ranks.machine import machine
from torchobj.ranks.meeting import check_same
from torchobj.store.transfers import FilePath, ProgressOption, make_folders

__all__ = ["FolderCheckpoints"]

#: Maximum number of objects below the folder of a step that its commit does not name. Each is compared with all keys.
_MAX_OTHERS = 1000


class FolderCheckpoints(Checkpoints):
    """Saves and restores folders by step, such as the checkpoint folders of a framework.

    A step exists if its commit object exists, which is written last and names each file. So a restore returns all files
    of a save, also if processes were killed. Steps, rules and ranks are those of `CheckpointManager`. Both can save in
    one URL; each restores its own steps.

    With several ranks, each passes its folder: the same one, or one on its machine. Each file is sent once, by one of
    the ranks that have it. A file of the same name and size on another machine is a copy. Other files of the same name
    are an error, and so are symbolic links, devices, pipes and sockets. Empty folders, and files whose names start with
    `.torchobj-`, are not saved.

    Args:
        url, keep_last, keep_every, keep_best, process_group, config: As for `CheckpointManager`.

    Raises:
        ConfigError: As for `CheckpointManager`.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "checkpoint-100"
        >>> folder.mkdir()
        >>> _ = (folder / "model.bin").write_bytes(b"weights")
        >>> with FolderCheckpoints("memory://example/frameworks", keep_last=2) as checkpoints:
        ...     checkpoints.save(100, folder)
        ...     restored = folder.with_name("restored")
        ...     checkpoints.restore("latest", restored), (restored / "model.bin").read_bytes()
        (100, b'weights')
    """

    def save(
        self,
        step: int,
        folder: FilePath,
        metrics: Mapping[str, float] | None = None,
        *,
        overwrite: bool = False,
        progress: ProgressOption = None,
        deadline_s: float | None = None,
    ) -> None:
        """Saves the files of a folder; the step is committed when this returns. Waits for a background save first.

        Args:
            step, metrics, overwrite: As for `CheckpointManager.save`.
            folder: The folder of this rank, in which the framework has written all files. The folder above it must be
                writable, and on the same file system so that files are linked there instead of copied. A rank without
                the folder has no files.
            progress: As for `torchobj.files.upload`, on each rank that sends files. An exception that it raises ends
                the save, and nothing is committed.
            deadline_s: As for `CheckpointManager.save`. Files are linked on this thread.

        Raises:
            CheckpointError: The step is committed already, another writer committed it first, a file cannot be saved,
                the folder was changed meanwhile, or the deadline has passed.
            ConfigError: An argument is not valid, no rank has a file, the folder above is not writable, or the ranks
                save other steps.
            StoreError: The files could not be written. Nothing is committed, unless a note of the error says that this
                is not known.
            Exception: An earlier background save failed and its error was not retrieved; this save was not started,
                unless it has a deadline.
        """
        self._save(step, metrics, self._content(folder, progress), overwrite=overwrite, deadline_s=deadline_s)

    def save_async(
        self,
        step: int,
        folder: FilePath,
        metrics: Mapping[str, float] | None = None,
        *,
        when_busy: Literal["wait", "fail"] = "wait",
        overwrite: bool = False,
        progress: ProgressOption = None,
    ) -> SaveHandle:
        """Saves the files of a folder in the background. Only one save runs at a time.

        The files are hard-linked before this returns, or copied where the file system cannot link them: the framework
        may delete and replace them. If one of them is rewritten in place before it was sent, the save fails and nothing
        is committed; a change that keeps size and time of modification is not detected.

        Args:
            step, folder, metrics, overwrite: As for `save`.
            when_busy: If a save is still running: `wait` for it, or `fail`.
            progress: As for `save`. It is called in the thread of the save.

        Returns:
            The running save. If the caller does not retrieve its error, the next call raises it.

        Raises:
            CheckpointError: As for `save`; or a save is running and `when_busy="fail"`.
            ConfigError: As for `save`.
            Exception: An earlier save failed, as for `save`.
        """
        content = self._content(folder, progress)
        return self._save_async(step, metrics, content, when_busy=when_busy, overwrite=overwrite)

    def _content(self, folder: FilePath, progress: ProgressOption) -> FolderContent:
        return FolderContent(folder, self._commits, progress=progress, config=self._config)

    def latest_of_ranks(self) -> int | None:
        """Returns what `latest` returns on the first rank. Collective: a step may be committed meanwhile."""
        with self._ranks.meeting() as meeting:
            if self._ranks.is_first:
                meeting.result = self.latest()
        latest: int | None = meeting.result
        return latest

    @overload
    def restore(
        self,
        step: int | Literal["latest"] = "latest",
        folder: FilePath | None = None,
        *,
        replace: bool = False,
        missing_ok: Literal[False] = False,
        progress: ProgressOption = None,
    ) -> int: ...

    @overload
    def restore(
        self,
        step: int | Literal["latest"] = "latest",
        folder: FilePath | None = None,
        *,
        replace: bool = False,
        missing_ok: bool,
        progress: ProgressOption = None,
    ) -> int | None: ...

    def restore(
        self,
        step: int | Literal["latest"] = "latest",
        folder: FilePath | None = None,
        *,
        replace: bool = False,
        missing_ok: bool = False,
        progress: ProgressOption = None,
    ) -> int | None:
        """Downloads the files of a committed step. All ranks call it, and restore the same step.

        The folder appears when all files are complete. Of the ranks of a machine that pass the same folder, the first
        one downloads. A folder that has exactly the files of the step is kept, and nothing is downloaded.

        Args:
            step: Number of the step, or the latest.
            folder: The folder, which does not exist, is empty, or has these files already. It is created by a rename,
                so it cannot be a mount point. Required.
            replace: Whether a file, or a folder that has other files, is replaced, when the download is complete.
            missing_ok: Whether to return None if no step is committed, as at the first start of a run.
            progress: As for `torchobj.files.download`, on each rank that downloads. An exception that it raises is
                raised on all ranks.

        Returns:
            The step.

        Raises:
            CheckpointError: The step is not committed, was saved by `CheckpointManager`, or its files are gone or
                damaged.
            ConfigError: An argument is not valid, there is a file, or a folder that has other files, and `replace` is
                false, or the ranks restore other steps.
            StoreError: A file cannot be read or written. The folder does not appear.
        """
        try:
            with self._ranks.meeting() as meeting:
                if folder is None:
                    raise ConfigError("folder=None: must be the path of the folder to restore")
                place = machine(), str(Path(folder).resolve())
                of_all = meeting.gather((self._settings("restore", step=step), place))
                if of_all is not None:
                    check_same([settings for settings, _ in of_all])
                    meeting.result = self._found(step), [each for _, each in of_all]
        except NoStepError:
            if missing_ok:
                return None
            raise
        commit: Commit = meeting.result[0]
        places: list[tuple[str, str]] = meeting.result[1]
        with self._ranks.meeting():
            if commit.kind != "folder":
                raise CheckpointError(
                    f"{self.url}, step {commit.step}: not the files of a folder; restore it with CheckpointManager"
                )
            if places.index(place) == self._ranks.number:
                try:
                    _Restore(self._commits, commit, self._config).run(Path(place[1]), progress, replace=replace)
                except TorchobjError:
                    raise
                except OSError as error:
                    raise CheckpointError(
                        f"{place[1]}: step {commit.step} cannot be restored there: {error}"
                    ) from error
        return commit.step


class _Restore:
    """The restore of a step to a folder of this machine."""

    def __init__(self, commits: Commits, commit: Commit, config: StoreConfig | None) -> None:
        self._commits, self._config = commits, config
        self._prefix = folder_of(commit.attempt)
        self._source = f"{commits.url}, step {commit.step}"
        #: The objects of the commit, by the names of their files.
        self._objects = {item.key.removeprefix(self._prefix): item for item in commit.objects}

    def run(self, folder: Path, progress: ProgressOption, *, replace: bool) -> None:
        """Downloads the files, or keeps a folder that has them."""
        make_folders(folder.parent)
        try:
            if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
                return self._check_existing(folder)
        except (CheckpointError, ConfigError):
            if not replace:
                raise
        with TemporaryFolder(folder.parent) as temporary:
            others = self._check_listed()
            url = self._commits.url_of(self._prefix)
            download(url, temporary.files, config=self._config, patterns=others, progress=progress)
            if different := self._different(temporary.files):
                raise CheckpointError(f"{self._source}: {different!r} is not as it was saved; restore another step")
            replaced = temporary.files.with_name("replaced")
            if replace and folder.exists():
                folder.rename(replaced)
            try:
                temporary.files.rename(folder)
            except BaseException as error:
                if replaced.exists() and not folder.exists():
                    replaced.rename(folder)
                if not isinstance(error, OSError) or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # Another process has restored to the same folder meanwhile.
                self._check_existing(folder)

    def _check_listed(self) -> list[Pattern]:
        """Checks that all objects exist with their sizes. Returns patterns that exclude others.

        Raises:
            CheckpointError: There is no object, or one does not exist, or has another size.
        """
        if not self._objects:
            raise CheckpointError(f"{self._source}: the commit names no files")
        listed = {info.key.removeprefix(self._prefix): info.size for info in self._commits.objects(self._prefix)}
        for name, item in self._objects.items():
            if name not in listed or listed[name] not in (None, item.size):
                raise CheckpointError(
                    f"{self._source}: committed, but {name!r} is gone, or has another size; restore another step"
                )
        others = listed.keys() - self._objects.keys()
        if len(others) > _MAX_OTHERS:
            raise CheckpointError(
                f"{self._source}: {len(others)} objects are below {self._commits.url_of(self._prefix)} that the save "
                "did not write; delete them, or restore another step"
            )
        return [("exclude", glob.escape(name)) for name in others]

    def _check_existing(self, folder: Path) -> None:
        """Checks that a folder has exactly the files of the step.

        Large files have no SHA-256: they are compared by the store's checksum through a link, so that a download cannot
        touch the folder.

        Raises:
            ConfigError: It has other files.
        """
        if not folder.is_dir():
            raise ConfigError(f"folder={os.fspath(folder)!r}: is a file")
        different, commits = self._different(folder), self._commits
        large = [(name, item.key) for name, item in self._objects.items() if item.sha256 is None]
        if different is None and large:
            with TemporaryFolder(folder.parent) as temporary:
                for number, (name, key) in enumerate(large):
                    link = temporary.files / f"{number}"
                    link_or_copy(folder / name, link)
                    if not commits.store.download_file(commits.key(key), link, skip_unchanged=True).skipped:
                        different = name
                        break
        if different is not None:
            raise ConfigError(
                f"folder={os.fspath(folder)!r}: has other files than {self._source}, such as {different!r}; remove "
                "it, or restore to another folder"
            )

    def _different(self, folder: Path) -> str | None:
        """Returns the name of a file that only the step or the folder has, or that differs in size or SHA-256."""
        found = files_below(folder)
        if others := found.keys() ^ self._objects.keys():
            return min(others)
        for name, item in self._objects.items():
            if found[name][2] != item.size or (item.sha256 is not None and sha256_of(folder / name) != item.sha256):
                return name
        return None
