"""Many objects in one call: `cat`, `cat_ranges`, `pipe`, `get`, `put`, `copy`, `mv` and `sizes`.

fsspec's defaults send one request after the other; these methods expand globs and folders by one listing each, and send
requests concurrently. The rules for targets are fsspec's (`plans`).
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import fsspec as package  # type: ignore[import-untyped]
from fsspec.callbacks import DEFAULT_CALLBACK, NoOpCallback  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem, make_path_posix  # type: ignore[import-untyped]
from fsspec.utils import isfilelike  # type: ignore[import-untyped]

from torchobj._torchobj import ObjectRef
from torchobj.exceptions import (
    ConfigError,
    IntegrityError,
    InvalidKeyError,
    ObjectChangedError,
    ObjectNotFoundError,
    RangeError,
)
from torchobj.files import transfers
from torchobj.fsspec.deletes import delete_with_markers
from torchobj.fsspec.options import check_current, written_attributes
from torchobj.fsspec.plans import Plan, expanded, planned
from torchobj.store import ObjectInfo, Store, reads
from torchobj.store.concurrency import call_each, concurrently
from torchobj.store.copies import Copy, unverified
from torchobj.store.transfers import Progress

__all__ = ["ManyObjects"]

logger = logging.getLogger("torchobj")

#: Errors of downloading a folder as if it were an object: it does not exist, or its target is a folder.
_FOLDER_ERRORS = (ObjectNotFoundError, IsADirectoryError)

#: Versions of copies, by the paths of sources and copies; None if a version is not known.
_Versions: TypeAlias = dict[tuple[str, str], str | None]


class ManyObjects(package.AbstractFileSystem):  # type: ignore[misc]
    """Reads, writes and copies objects, for a file system that has `_locate` and the methods for single ones."""

    def _by_store(self, paths: Iterable[str]) -> dict[Store, dict[str, str]]:
        """The keys of paths without a protocol, by their stores. Whole buckets are left out."""
        found: dict[Store, dict[str, str]] = {}
        for path in paths:
            bucket, _, key = path.partition("/")
            if key:
                found.setdefault(self._locate(bucket)[0], {})[path] = key
        return found

    def _heads(self, paths: Iterable[str]) -> dict[str, ObjectInfo | Exception]:
        """The metadata of objects by path, or the error, by concurrent requests. Whole buckets are left out."""
        found: dict[str, ObjectInfo | Exception] = {}
        for store, keys in self._by_store(paths).items():
            found |= zip(keys, store.head_many(keys.values(), return_errors=True), strict=True)
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Bytes `start:end` of an object, with the semantics of slices."""
        check_current(kwargs)
        content: bytes = self.cat_ranges([path], start, end, on_error="raise")[0]
        return content

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Reads ranges of objects concurrently, in one call without the GIL.

        Args:
            paths: The object of each range.
            starts, ends: First byte and end of each range, with the semantics of slices; or one value for all. A
                negative value, other than a start without an end, takes a HEAD request for each object.
            max_gap: Must be None.
            on_error: `return` puts exceptions in place of ranges that cannot be read; `raise` raises the first one.

        Returns:
            The bytes of each range, in order.

        Raises:
            ConfigError: The numbers of paths, starts and ends differ.
        """
        check_current(kwargs)
        if max_gap is not None:
            raise NotImplementedError(f"max_gap={max_gap!r}: must be None")
        if on_error not in ("raise", "return"):
            raise ConfigError(f"on_error={on_error!r}: must be raise or return")
        starts, ends = _one_each("starts", starts, len(paths)), _one_each("ends", ends, len(paths))
        paths = list(map(self._strip_protocol, paths))
        results: list[Any] = [b""] * len(paths)
        ranges = list(zip(paths, starts, ends, strict=True))
        heads = self._heads({path for path, start, end in ranges if min(start or 0, end or 0) < 0})
        refs, numbers = [], []
        for number, (path, start, end) in enumerate(ranges):
            head = heads.get(path)
            if isinstance(head, Exception):
                results[number] = head
                continue
            if head is not None:
                start, end, _step = slice(start, end).indices(head.size or 0)  # noqa: PLW2901  counted from the start
            if end is None or end > (start or 0):
                refs.append(self._ref(path, start, end))
                numbers.append(number)
        for number, result in zip(numbers, self._read(refs, stops=on_error == "raise"), strict=True):
            results[number] = result
        if on_error == "raise" and (error := next((each for each in results if isinstance(each, Exception)), None)):
            raise error
        return results

    def _ref(self, path: str, start: int | None = None, end: int | None = None) -> ObjectRef:
        store, key = self._locate(path)
        if not key:
            raise ObjectNotFoundError(f"{self.unstrip_protocol(path)}: is a bucket, not an object")
        return ObjectRef(f"{store.url}/{key}", start, end)

    def _read(self, refs: list[ObjectRef], *, stops: bool) -> list[Any]:
        """The bytes of each reference, or its error. A range after the end of its object is empty, as of a slice.

        stops: Whether to raise the first error, unless it is of such a range.
        """
        read: list[Any]
        try:
            read = [*reads.get_many(refs, config=self._config, return_errors=not stops)]
        except RangeError:
            read = [*reads.get_many(refs, config=self._config, return_errors=True)]
        for number, result in enumerate(read):
            # Each buffer is freed when its bytes are copied.
            if isinstance(result, RangeError):
                read[number] = b""
            elif not isinstance(result, Exception):
                read[number] = bytes(result)
            del result
        return read

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        """Reads objects concurrently, in one call without the GIL.

        Args:
            path: An object or glob, or a list of them; folders that a glob selects are left out.
            recursive: Whether paths can be folders, whose objects are read.
            on_error: `raise` raises the first error, `omit` leaves out objects that cannot be read, and `return` puts
                exceptions in their place.
            kwargs: `start` and `end` of the range to read from each.

        Returns:
            The bytes of a single object; otherwise a dict of paths and bytes.
        """
        if on_error not in ("raise", "omit", "return"):
            raise ConfigError(f"on_error={on_error!r}: must be raise, omit or return")
        check_current(kwargs)
        start, end = kwargs.pop("start", None), kwargs.pop("end", None)
        kinds = expanded(self, path, recursive=recursive)
        names = [name for name, kind in kinds.items() if kind != "directory"]
        is_one = isinstance(path, str) and names == [self._strip_protocol(path)]
        contents = self.cat_ranges(names, start, end, on_error="raise" if on_error == "raise" else "return")
        if is_one:
            if isinstance(contents[0], Exception) and on_error == "return":
                raise contents[0]
            return contents[0]
        found = dict(zip(names, contents, strict=True))
        if on_error == "omit":
            found = {name: content for name, content in found.items() if not isinstance(content, Exception)}
        return found

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """Writes objects concurrently.

        Args:
            path: An object, or a dict of objects and contents.
            value: The content, if `path` is a single object.
            kwargs: As for `pipe_file`, for each.

        Raises:
            StoreError: The first error; objects whose writes did not start by then are not written.
        """
        if isinstance(path, str):
            path = {path: value}
        elif not isinstance(path, Mapping):
            raise ConfigError(f"path as {type(path)}: must be a str, or a dict of paths and contents")
        call_each(lambda item: self.pipe_file(*item, **kwargs), path.items())

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
        is_target = LocalFileSystem().isdir
        plan = planned(
            self, rpath, lpath, is_folder=None, is_target_folder=is_target, recursive=recursive, maxdepth=maxdepth
        )
        pairs = [pair for pair in plan.pairs if not (pair[0] in plan.kinds and _is_temporary(*pair))]
        if is_one_target:
            _check_below(lpath, pairs)
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

        _run(transfer, pairs, callback)

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
        local = LocalFileSystem()
        plan = planned(
            local,
            lpath,
            rpath,
            is_folder=local.isdir,
            is_target_folder=self.isdir,
            recursive=recursive,
            maxdepth=maxdepth,
        )

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

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        maxdepth: int | None = None,
        on_error: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Copies objects on the server concurrently, with the rules of fsspec for targets.

        Objects whose keys end with a slash, with which other tools mark folders, are copied with their folders.

        Args:
            path1: An object, folder or glob, or a list of them.
            path2: The object or folder to write, or a list with one for each of `path1`.
            recursive: Whether everything below folders is copied. Otherwise folders are left out.
            maxdepth: Maximum depth of copied objects.
            on_error: `ignore` leaves out objects that do not exist; `raise` raises that error. None is `ignore` with
                `recursive`, and otherwise `raise`.
            kwargs: As for `cp_file`, for each.

        Raises:
            StoreError: The first error; copies that did not start by then are not made.
        """
        plan = self._copies(path1, path2, recursive=recursive, maxdepth=maxdepth)
        self._copy_planned(plan, ignores=on_error == "ignore" or (on_error is None and recursive), **kwargs)

    def _copies(self, source: Any, target: Any, *, recursive: bool, maxdepth: int | None) -> Plan:
        return planned(
            self,
            source,
            target,
            is_folder=self._is_only_folder,
            is_target_folder=self.isdir,
            recursive=recursive,
            maxdepth=maxdepth,
        )

    def _copy_planned(self, plan: Plan, *, ignores: bool, **kwargs: Any) -> _Versions:
        """Copies what was planned. Returns the versions of the copies."""
        written: _Versions = {}

        def run(pair: tuple[str, str]) -> str | None:
            version: str | None = self.cp_file(*pair, **kwargs)
            return version

        files = [pair for pair in plan.pairs if plan.kinds.get(pair[0]) != "directory"]
        # Copies of which one reads or replaces what another one writes are made in the order of the caller.
        batches = [[pair] for pair in files] if self._overlap(plan.pairs) else [files]
        for pair, outcome in itertools.chain.from_iterable(concurrently(run, batch) for batch in batches):
            if not isinstance(outcome, Exception):
                written[self._stripped(pair)] = outcome
            elif not (ignores and isinstance(outcome, FileNotFoundError)):
                raise outcome
        folders = [pair for pair in plan.pairs if plan.kinds.get(pair[0]) == "directory"]
        for _, target in folders:
            self.makedirs(target, exist_ok=True)
        return written | self._copy_markers(folders)

    def _overlap(self, pairs: list[tuple[str, str]]) -> bool:
        """Whether a target is written twice, or is also a source."""
        stripped = list(map(self._stripped, pairs))
        sources, targets = {source for source, _ in stripped}, {target for _, target in stripped}
        return len(targets) < len(pairs) or not targets.isdisjoint(sources)

    def _stripped(self, pair: tuple[str, str]) -> tuple[str, str]:
        source, target = map(self._strip_protocol, pair)
        return source, target

    def _copy_markers(self, folders: list[tuple[str, str]]) -> _Versions:
        """Copies the objects with which other tools mark these folders, which may have contents."""
        targets = {f"{self._strip_protocol(source)}/": target for source, target in folders}
        found = []
        for marker, head in self._heads(targets).items():
            if _is_missing(head):
                continue
            if isinstance(head, Exception):
                raise head
            found.append(marker)

        def run(marker: str) -> str:
            store, key = self._locate(targets[marker])
            version: str = store.copy(f"{self.unstrip_protocol(marker[:-1])}/", f"{key}/")
            return version

        written: _Versions = {}
        for marker, outcome in concurrently(run, found):
            if isinstance(outcome, Exception):
                raise outcome
            written[marker, f"{self._strip_protocol(targets[marker])}/"] = outcome
        return written

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copies objects as `copy`, verifies all copies, then deletes those that were copied, a thousand per request.

        Args:
            path1: An object, folder or glob, or a list of them.
            path2: The object or folder to write, or a list with one for each of `path1`.
            recursive: Whether everything below folders is moved. Otherwise folders are left out.
            maxdepth: Maximum depth of moved objects; those below are kept.
            kwargs: As for `cp_file`, for each.

        Raises:
            UnsupportedError: A path is a whole bucket, which is never emptied; nothing is copied then.
            IntegrityError: A copy does not exist, or is not equal to its source; nothing is deleted then.
            ObjectChangedError: An object changed while it was copied; nothing is deleted then.
            StoreError: The first error of the copies, also for an object that does not exist; nothing is deleted then.
        """
        if path1 == path2:
            return
        for each in [path1] if isinstance(path1, str) else path1:
            self._refuse_bucket(each)
        plan = self._copies(path1, path2, recursive=recursive, maxdepth=maxdepth)
        pairs = [self._stripped(pair) for pair in plan.pairs]
        targets = {target for _, target in pairs}
        moved = [pair for pair in pairs if pair[0] not in targets]
        # With a slash: objects with which other tools mark folders.
        ends = {path: "/" if plan.kinds.get(path) == "directory" else "" for path, _ in moved}
        copied = [(f"{path}{ends[path]}", f"{target}{ends[path]}") for path, target in moved]
        # Before the copies: what is written to a source later is not in its copy.
        heads = {path: info for path, info in self._heads(dict(copied)).items() if not _is_missing(info)}
        written = self._copy_planned(plan, ignores=False, **kwargs)
        self._delete_copied([pair for pair in copied if pair[0] in heads], heads, written)
        for path, _ in moved:
            self._created_folders.pop(path, None)

    def _delete_copied(
        self, pairs: list[tuple[str, str]], heads: dict[str, ObjectInfo | Exception], written: _Versions
    ) -> None:
        """Deletes objects, given pairs of their paths and those of their copies, if all copies are right and no object
        changed.

        Args:
            pairs: The paths of the objects and of their copies.
            heads: The metadata of the objects before they were copied, by path.
            written: The versions of the copies.

        Raises:
            IntegrityError: A copy does not exist, or is not equal to the object; nothing was deleted.
            ObjectChangedError: An object changed meanwhile; nothing was deleted.
        """
        copies: dict[tuple[Store, Store], list[Copy]] = {}
        for path, target in pairs:
            info = heads[path]
            if isinstance(info, Exception):
                raise info
            # Not `_locate`, which removes the slash of a marker.
            bucket, _, key = target.partition("/")
            stores = self._locate(bucket)[0], self._locate(path.partition("/")[0])[0]
            made_copy = Copy(info.key, info.size, info.version, key, written.get((path, target)))
            copies.setdefault(stores, []).append(made_copy)
        for (new, old), made in copies.items():
            for reason in unverified(new, made, old).values():
                raise IntegrityError(f"mv: {reason}; no source was deleted")
        for path, info in self._heads(heads).items():
            if isinstance(info, Exception) or info != heads[path]:
                raise ObjectChangedError(f"mv: {path} changed while it was copied; no source was deleted")
        for store, keys in self._by_store(heads).items():
            delete_with_markers(store, list(keys.values()))

    def sizes(self, paths: Iterable[str]) -> list[int | None]:
        """Sizes in bytes of objects, by concurrent requests; 0 for a folder.

        Raises:
            ObjectNotFoundError: Neither an object nor a folder has one of the names.
        """
        names = [self._strip_protocol(path) for path in paths]
        found = {path: head.size for path, head in self._heads(names).items() if not isinstance(head, Exception)}
        return [found[name] if name in found else self.size(name) for name in names]


def _is_missing(info: ObjectInfo | Exception) -> bool:
    # A store of files has no markers of folders.
    return isinstance(info, (InvalidKeyError, ObjectNotFoundError))


def _one_each(name: str, values: Any, count: int) -> Sequence[int | None]:
    of_each: Sequence[int | None] = [values] * count if values is None or isinstance(values, int) else values
    if len(of_each) != count:
        raise ConfigError(f"{name} has {len(of_each)} values for {count} paths")
    return of_each


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


def _is_temporary(source: str, target: Any) -> bool:
    """Whether a file would have the name of a temporary one, such as that of a download that was interrupted."""
    if not Path(target).name.startswith(".torchobj-"):
        return False
    logger.warning("%s has the name of a temporary file: skipped", source)
    return True


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
