"""Local files and folders to and from a bucket: `get`, `put`. fsspec's defaults transfer one file after the other."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec as package  # type: ignore[import-untyped]
from fsspec.callbacks import DEFAULT_CALLBACK, NoOpCallback  # type: ignore[import-untyped]
from fsspec.implementations.local import make_path_posix  # type: ignore[import-untyped]
from fsspec.utils import isfilelike  # type: ignore[import-untyped]

from torchobj.exceptions import InvalidKeyError, ObjectNotFoundError
from torchobj.files import transfers
from torchobj.fsspec.expansion import Plan
from torchobj.fsspec.s3fs_options import check_current, written_attributes
from torchobj.store.concurrency import concurrently
from torchobj.store.transfers import Progress

__all__ = ["Transfers"]

#: Errors of downloading a folder as if it were an object: it does not exist, or its target is a folder.
_FOLDER_ERRORS = (ObjectNotFoundError, IsADirectoryError)


class Transfers(package.AbstractFileSystem):  # type: ignore[misc]
    """Copies files, for a file system that has `open` and `_locate`."""

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Downloads objects concurrently, with the rules of fsspec for targets.

        Args:
            rpath: An object, folder or glob, or a list of them.
            lpath: The file or folder to write, or a list with one for each of `rpath`.
            recursive: Whether everything below folders is downloaded. Otherwise folders are left out.
            callback: Its size is the number of files; its branches receive the bytes of each.
            maxdepth: Maximum depth of downloaded files.

        Raises:
            InvalidKeyError: A key has no path below `lpath`: it contains `..` or an empty component, as `a//b`, or
                leaves the folder by a link in it. Nothing is downloaded.
            StoreError: The first error; downloads that did not start by then are not made.
        """
        is_one_target = isinstance(lpath, (str, os.PathLike))
        if is_one_target:
            # Absolute, as the targets that fsspec derives from it.
            lpath = make_path_posix(os.fspath(lpath))
        plan = _GetPlan(self)
        package.AbstractFileSystem.get(plan, rpath, lpath, recursive=recursive, maxdepth=maxdepth)
        if is_one_target:
            _check_below(lpath, plan.pairs)
        skips_folder = isinstance(rpath, str) and not recursive

        def transfer(source: str, target: Any, child: Any) -> None:
            if plan.kinds.get(source) == "directory":
                Path(target).mkdir(parents=True, exist_ok=True)
                return
            try:
                self.get_file(source, target, callback=child, is_folder=False, **kwargs)
            except _FOLDER_ERRORS:
                if plan.kinds.get(source) == "file" or not self._is_only_folder(source):
                    raise
                if not skips_folder:
                    Path(target).mkdir(parents=True, exist_ok=True)

        _run(transfer, plan.pairs, callback)

    def get_file(
        self, rpath: str, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **kwargs: Any
    ) -> None:
        """Downloads an object to a file as `torchobj.files.download_file`; or creates the folder of a folder.

        Args:
            rpath: The object.
            lpath: The file to write, whose folder is created, or an open binary file.
            callback: Receives the size and the number of bytes.
            outfile: An open binary file, in place of `lpath`.
        """
        check_current(kwargs)
        is_folder = kwargs.pop("is_folder", None)
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        try:
            if outfile is None:
                url = self.unstrip_protocol(rpath)
                transfers.download_file(url, lpath, config=self._config, progress=_progress_of(callback))
            else:
                self._copy_to(rpath, outfile, callback)
        except _FOLDER_ERRORS:
            if outfile is not None or is_folder is False or not self._is_only_folder(rpath):
                raise
            Path(lpath).mkdir(parents=True, exist_ok=True)

    def _is_only_folder(self, path: str) -> bool:
        return self.isdir(path) and not self.isfile(path)

    def _copy_to(self, path: str, file: Any, callback: Any) -> None:
        with self.open(path, "rb") as source:
            callback.set_size(source.size)
            while data := source.read(self.blocksize):
                file.write(data)
                callback.relative_update(len(data))

    def put(
        self,
        lpath: Any,
        rpath: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Uploads files concurrently, with the rules of fsspec for targets.

        Args:
            lpath: A file, folder or glob, or a list of them.
            rpath: The object or folder to write, or a list with one for each of `lpath`.
            recursive: Whether everything below folders is uploaded. Otherwise folders are left out.
            callback: Its size is the number of files; its branches receive the bytes of each.
            maxdepth: Maximum depth of uploaded files.
            kwargs: As for `put_file`, for each file.

        Raises:
            StoreError: The first error; uploads that did not start by then are not made.
        """
        plan = _PutPlan(self)
        package.AbstractFileSystem.put(plan, lpath, rpath, recursive=recursive, maxdepth=maxdepth)

        def transfer(source: str, target: str, child: Any) -> None:
            self.put_file(source, target, callback=child, **kwargs)

        _run(transfer, plan.pairs, callback)

    def put_file(
        self, lpath: Any, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Uploads a file as `torchobj.files.upload_file`, in a transaction at its end; a folder is only created.

        Args:
            lpath: The file.
            rpath: The object.
            callback: Receives the size and the number of bytes.
            mode: `create`: the store refuses to replace an object.
            kwargs: As for `upload_file`, such as `content_type` and `if_version`, also by the names of s3fs.
        """
        kwargs = written_attributes(kwargs)
        if mode == "create":
            kwargs["overwrite"] = False
        source = Path(lpath)
        if source.is_dir():
            self.makedirs(rpath, exist_ok=True)
            return
        if not self._intrans:
            url = self.unstrip_protocol(rpath)
            transfers.upload_file(source, url, config=self._config, progress=_progress_of(callback), **kwargs)
            return
        # Written at the end of the transaction.
        with source.open("rb") as file, self.open(rpath, "wb", **kwargs) as out:
            callback.set_size(os.fstat(file.fileno()).st_size)
            while data := file.read(self.blocksize):
                out.write(data)
                callback.relative_update(len(data))


def _progress_of(callback: Any) -> Callable[[Progress], None] | None:
    """Passes the progress of one file to a callback of fsspec. Without one, the transfer is not interrupted for it."""
    if isinstance(callback, NoOpCallback):
        return None
    sizes: list[int] = []

    def report(progress: Progress) -> None:
        if not sizes and progress.bytes_total is not None:
            sizes.append(progress.bytes_total)
            callback.set_size(progress.bytes_total)
        callback.absolute_update(progress.bytes_done)

    return report


class _GetPlan(Plan):
    """What `AbstractFileSystem.get` would download."""

    get_file = Plan.add

    def isdir(self, path: str) -> bool:
        return self.kinds.get(path) == "directory"


class _PutPlan:
    """Collects what `AbstractFileSystem.put` would upload."""

    def __init__(self, files: Any) -> None:
        self.isdir, self._strip_protocol = files.isdir, files._strip_protocol
        self.pairs: list[tuple[str, Any]] = []

    def put_file(self, lpath: str, rpath: Any, **_: Any) -> None:
        self.pairs.append((lpath, rpath))


def _run(transfer: Any, pairs: list[tuple[str, Any]], callback: Any) -> None:
    """Transfers pairs of source and target concurrently. The callback itself is called by this thread only."""

    def run(pair: tuple[str, Any]) -> None:
        with callback.branched(*pair) as child:
            transfer(*pair, child)

    callback.set_size(len(pairs))
    for _, outcome in concurrently(run, pairs):
        if isinstance(outcome, Exception):
            raise outcome
        callback.relative_update(1)


def _check_below(folder: Any, pairs: list[tuple[str, Any]]) -> None:
    """Refuses keys that contain `..` or an empty component, and targets outside of the folder, to which links lead."""
    root = os.path.realpath(folder)
    for source, target in pairs:
        if Path(target).parts.count("..") > Path(folder).parts.count(".."):
            raise InvalidKeyError(f"{source!r}: is no path below {str(folder)!r}, because it contains '..'")
        if "//" in str(target)[len(folder.rstrip("/")) :]:
            raise InvalidKeyError(
                f"{source!r}: is no path below {str(folder)!r}, because a component is empty; pass the path of a file"
            )
        # The file itself is replaced, also if it is a link.
        parent = os.path.realpath(Path(target).parent)
        if Path(target) != Path(folder) and os.path.commonpath([root, parent]) != root:
            raise InvalidKeyError(f"{source!r}: would be written to {parent!r}, which is outside of {str(folder)!r}")
