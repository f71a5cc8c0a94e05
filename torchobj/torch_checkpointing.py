"""A storage backend of torch_checkpointing for buckets. Needs torch_checkpointing installed.

The writer of torch_checkpointing writes a checkpoint into a temporary folder, and the first rank renames this folder.
Stores have no folders: a rename copies objects, on the server, and then deletes the old ones. While a folder is renamed
or removed, an object beside it marks it as uncommitted, and the backend treats a marked folder as missing. So a
checkpoint exists as a whole or not at all, also after a kill; the next rename to this folder replaces what was left.
"""

import contextlib
import fnmatch
import io
import logging
import os.path
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch

from torchobj._torchobj import ObjectReader
from torchobj.checkpoint.archive.plan import Plan, PlanError, plan_of
from torchobj.checkpoint.archive.save import save_counted
from torchobj.checkpoint.checkpoint_dir import CheckpointDir, is_canonical
from torchobj.config import StoreConfig
from torchobj.exceptions import (
    ConfigError,
    IntegrityError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
)
from torchobj.files.links import remove_empty_folders
from torchobj.store import ObjectInfo
from torchobj.store.concurrency import concurrently
from torchobj.store.copies import Copy, unverified
from torchobj.store.transfers import ByteProgress
from torchobj.urls import parse_url

try:
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
except ImportError as error:
    raise ImportError(
        f"torchobj.torch_checkpointing needs torch_checkpointing ({error}): pip install 'torchobj[torch-checkpointing]'"
    ) from error

__all__ = ["ObjectStorage", "ObjectStorageConfig"]

logger = logging.getLogger("torchobj")

#: Ends the name of the object beside a folder that is being renamed or removed.
_UNCOMMITTED = ".uncommitted"


@dataclass
class ObjectStorageConfig(StorageConfig):
    """The storage of a `torch_checkpointing.CheckpointManager`: a folder of a bucket.

    Checkpoints have paths relative to the folder, such as `step-100`, and the files that torch_checkpointing writes to
    a local disk. With `write_to_temp_dir`, its default, a checkpoint exists as a whole or not at all. The configuration
    is pickled without credentials, for the process that writes.

    Args:
        url: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder` or `memory://name/folder`. A `memory://` store
            belongs to a process: it is for `CheckpointManager.Config.with_sync_save()`.
        config: Settings of the store.

    Raises:
        ConfigError: `url` is not a URL of a store.

    Example:
        ```python
        from torch_checkpointing import CheckpointManager
        from torchobj.torch_checkpointing import ObjectStorageConfig

        manager = CheckpointManager(CheckpointManager.Config(storage_config=ObjectStorageConfig("s3://bucket/run")))
        manager.save("step-100", {"model": model.state_dict()})
        manager.load("step-100", into={"model": model.state_dict()})
        ```
    """

    url: str
    config: StoreConfig | None = None

    def __post_init__(self) -> None:
        parse_url(self.url)

    def create_storage(self) -> "ObjectStorage":
        """Returns the storage."""
        return ObjectStorage(self)


class ObjectStorage(Storage):
    """The storage of an `ObjectStorageConfig`. Its methods raise a `ConfigError` for a path that is not relative.

    A folder exists if there are objects below it and no rename or removal of it is unfinished.

    Args:
        config: The folder, and the settings of its store.
    """

    def __init__(self, config: ObjectStorageConfig) -> None:
        self._dir = CheckpointDir(config.url, config.config)

    @property
    def mmap_fill_workers(self) -> int:
        """1: a read of a whole file is divided into parallel ranges, which go directly to the memory of the reader."""
        return 1

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> ObjectReader:  # type: ignore[override]
        """Returns a file for reading.

        Args:
            path: The file.
            read_args: With `pre_read_full_file`, which is the default, the file is read at once; otherwise on demand,
                and ahead of sequential reads. The others have no effect: timeouts are those of the `StoreConfig`.

        Raises:
            ObjectNotFoundError: The file does not exist. On demand, the first read raises this.
        """
        key = self._file(path)
        if read_args is not None and not read_args.pre_read_full_file:
            return self._dir.store.open(self._dir.key(key))
        url = parse_url(self._dir.url_of(key))
        return ObjectReader(str(url), url.bucket, url.key, self._dir.store.get(self._dir.key(key)))

    def stream_write(self, path: Path) -> io.IOBase:
        """Returns a file for writing, which appears whole when it is closed, unless its `with` block raises."""
        return self._dir.store.open(self._dir.key(self._file(path)), "wb")

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        """Returns the file to save `data` to by `torch.save` in a `with` block, at whose end it is sent.

        Tensors are sent from their own memory. The file equals that of `torch.save`, except for the
        `serialization_id` in it, which torch computes of the bytes.

        Raises:
            Exception: Pickling failed.
        """
        try:
            plan = plan_of(data, copies_small=True)
        except PlanError:
            return self.stream_write(path)
        return _PlannedFile(plan, self._dir.url_of(self._file(path)), self._dir.store.config)

    def write(self, path: Path, data: Any) -> None:
        """Writes a file, from the memory of `data`. It appears whole or not at all."""
        self._dir.store.put(self._dir.key(self._file(path)), data)

    def delete(self, path: Path) -> None:
        """Deletes a file. A missing file is not an error."""
        self._delete([self._file(path)])

    def mkdir(self, path: Path, recursive: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002  torch_checkpointing's
        """Writes nothing: a folder exists with its first file.

        Raises:
            PreconditionFailedError: A rename or removal of this folder is unfinished.
        """
        key = self._key(path)
        if key and self._dir.head(key + _UNCOMMITTED) is not None:
            raise PreconditionFailedError(
                f"mkdir {self._dir.url_of(key)}: a rename or removal of this folder is unfinished; if no process is at "
                "it, rmdir deletes what was left"
            )

    def rmdir(self, path: Path) -> None:
        """Deletes a folder with all files below it, except behind symbolic links.

        Raises:
            ConfigError: It is the folder of the storage.
            ObjectNotFoundError: The folder does not exist.
        """
        key = self._file(path)
        is_marked = self._dir.head(key + _UNCOMMITTED) is not None
        if not is_marked and not self._below(key):
            raise ObjectNotFoundError(f"rmdir {self._dir.url_of(key)}: no such folder")
        self._clear(key)
        self._unmark(key)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,  # noqa: FBT001, FBT002  torch_checkpointing's signature
        background_cleanup: bool = False,  # noqa: ARG002, FBT001, FBT002  torch_checkpointing's signature
    ) -> None:
        """Copies a file, or all files of a folder, on the server, verifies the copies, and deletes the old ones.

        A folder appears when all is copied. If a rename fails, the new folder is missing, and the old one is complete.
        Old files that cannot be deleted are logged.

        Raises:
            ObjectNotFoundError: The file or folder does not exist.
            PreconditionFailedError: A folder has the new name; or a file has that of a folder. It is also a
                `FileExistsError`.
            IntegrityError: A copy is not equal to its file.
        """
        source, target = self._file(src_path), self._file(dst_path)
        if source == target and not is_directory:
            return
        file = None if is_directory else self._dir.head(source)
        files = self._below(source) if file is None else [file._replace(key=source)]
        if not files:
            raise ObjectNotFoundError(f"rename {self._dir.url_of(source)}: no such file or folder")
        if self.exists(dst_path) if file is None else self.isdir(dst_path):
            raise PreconditionFailedError(
                f"rename {self._dir.url_of(source)}: {self._dir.url_of(target)} exists; delete it first to replace it"
            )
        if file is None:
            self._clear(target)
        self._copy((info, target + info.key.removeprefix(source)) for info in files)
        if file is None:
            self._unmark(target)
        try:
            self._delete(info.key for info in files)
        except StoreError as error:
            # The new name is committed.
            logger.warning("rename %s: old files were not deleted: %s", self._dir.url_of(source), error)

    def ls(self, path: Path) -> list[str]:
        """Returns the names of the files and folders directly below a folder, sorted.

        Raises:
            ObjectNotFoundError: The folder does not exist.
        """
        key = self._key(path)
        if not self.isdir(path):
            raise ObjectNotFoundError(f"ls {self._dir.url_of(key)}: no such folder")
        beginning = f"{key}/" if key else ""
        start = self._dir.key(beginning)
        files, folders = set[str](), set[str]()
        for page in self._dir.pages(beginning, "/"):
            files |= {info.key.removeprefix(start) for info in page.objects}
            folders |= {name.removeprefix(start).rstrip("/") for name in page.prefixes}
        marks = {name for name in files if name.endswith(_UNCOMMITTED)}
        return sorted((files - marks | folders) - {"", *(mark.removesuffix(_UNCOMMITTED) for mark in marks)})

    def glob(self, pattern: str) -> list[str]:
        """Returns the paths that match a pattern in their last component.

        Raises:
            StoreError: The folder cannot be listed.
        """
        folder, names = os.path.split(pattern)
        if not self.isdir(Path(folder)):
            return []
        return [os.path.join(folder, name) for name in fnmatch.filter(self.ls(Path(folder)), names)]  # noqa: PTH118  as the base class

    def exists(self, path: Path) -> bool:
        """Returns whether a file or folder exists."""
        key = self._key(path)
        return bool(key and self._dir.head(key)) or self.isdir(path)

    def isdir(self, path: Path) -> bool:
        """Returns whether a folder exists. That of the storage always does."""
        key = self._key(path)
        # In this order: the mark is there from before the first file until after the last one.
        pages = self._dir.pages(f"{key}/")
        return not key or (any(page.objects for page in pages) and self._dir.head(key + _UNCOMMITTED) is None)

    def getsize(self, path: Path) -> int:
        """Returns the size of a file in bytes.

        Raises:
            ObjectNotFoundError: The file does not exist.
        """
        return cast("int", self._dir.store.head(self._dir.key(self._file(path))).size)

    def remap_path(self, path: Path) -> str:
        """Returns the URL of a file or folder."""
        key = self._key(path)
        return self._dir.url_of(key) if key else self._dir.url

    def _key(self, path: Path) -> str:
        """Returns the key of a file or folder relative to the folder of the storage, which is empty itself.

        Raises:
            ConfigError: The path is absolute, a URL, or leads out of the folder.
        """
        key = "" if path == Path() else path.as_posix()
        # A URL that was converted to a path has lost a slash.
        if key and (not is_canonical(key) or key.partition("/")[0].endswith(":")):
            raise ConfigError(
                f"path={str(path)!r}: must be relative to {self._dir.url}, the url of the storage, and without '..'"
            )
        return key

    def _file(self, path: Path) -> str:
        """As `_key`, but refuses the folder of the storage."""
        if key := self._key(path):
            return key
        raise ConfigError(f"path={str(path)!r}: is {self._dir.url}, the folder of the storage")

    def _below(self, key: str) -> list[ObjectInfo]:
        return self._dir.objects(f"{key}/")

    def _delete(self, names: Iterable[str]) -> None:
        """Deletes files, and on a disk the folders that are empty then, except for that of the storage."""
        deleted, root = self._dir.delete(names), self._dir.root
        if root is not None:
            remove_empty_folders(root.parent, [f"{root.name}/{name}" for name in deleted])

    def _clear(self, key: str) -> None:
        """Marks a folder as uncommitted, and deletes what is below it."""
        self._dir.store.put(self._dir.key(key + _UNCOMMITTED), b"")
        self._delete(info.key for info in self._below(key))

    def _unmark(self, key: str) -> None:
        # Also behind a symbolic link, where `_delete` keeps what is there.
        self._dir.store.delete(self._dir.key(key + _UNCOMMITTED))

    def _copy(self, pairs: Iterable[tuple[ObjectInfo, str]]) -> None:
        """Copies files, given with the keys of their copies.

        Raises:
            IntegrityError: A copy is not equal to its file.
        """
        store = self._dir.store

        def copy(pair: tuple[ObjectInfo, str]) -> Copy:
            info, target = pair
            source, key = self._dir.key(info.key), self._dir.key(target)
            return Copy(source, info.size, info.version, key, store.copy(source, key))

        copies = []
        for _, outcome in concurrently(copy, pairs):
            if isinstance(outcome, Exception):
                raise outcome
            copies.append(outcome)
        for reason in unverified(store, copies, store).values():
            raise IntegrityError(f"rename: {reason}; nothing was deleted")


class _PlannedFile(io.RawIOBase):
    """Ignores what `torch.save` writes, and sends the planned file when it is closed.

    Nothing is sent if its `with` block raises, or if it is dropped unclosed.

    Args:
        plan: The file that `torch.save` writes.
        url: The object.
        config: Settings of the store.
    """

    def __init__(self, plan: Plan, url: str, config: StoreConfig) -> None:
        super().__init__()
        self._plan: Plan | None = plan
        self._url, self._config = url, config
        self._skipping = contextlib.ExitStack()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:  # noqa: ARG002  skips the bytes of a tensor
        return offset

    def __enter__(self) -> Self:
        self._skipping.enter_context(torch.serialization.skip_data())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._skipping.close()
        if error is not None:
            self._plan = None
        self.close()

    def close(self) -> None:
        super().close()
        plan, self._plan = self._plan, None
        if plan is not None:
            save_counted(plan, self._url, config=self._config, counted=ByteProgress(None))

    def __del__(self) -> None:
        # io.IOBase would call close.
        self._plan = None
