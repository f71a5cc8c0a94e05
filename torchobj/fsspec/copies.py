"""Objects within buckets: `copy`, `mv`, `sizes`. fsspec's defaults send one request after the other."""

import itertools
from collections.abc import Iterable
from typing import Any

import fsspec as package  # type: ignore[import-untyped]

from torchobj.exceptions import ObjectNotFoundError
from torchobj.fsspec.expansion import Plan
from torchobj.store.concurrency import concurrently
from torchobj.store.object_info import ObjectInfo

__all__ = ["Copies"]


class Copies(package.AbstractFileSystem):  # type: ignore[misc]
    """Copies and moves objects on the server, for a file system that has `cp_file`, `makedirs` and `_locate`."""

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
        self._copy_all(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error=on_error, **kwargs)

    def _copy_all(self, path1: Any, path2: Any, *, on_error: str | None, **kwargs: Any) -> "_CopyPlan":
        plan = _CopyPlan(self)
        package.AbstractFileSystem.copy(plan, path1, path2, on_error=on_error, **kwargs)
        ignores = on_error == "ignore" or (on_error is None and kwargs["recursive"])
        options = {name: value for name, value in kwargs.items() if name not in ("recursive", "maxdepth")}

        def run(pair: tuple[str, str]) -> None:
            self.cp_file(*pair, **options)

        files = [pair for pair in plan.pairs if plan.kinds.get(pair[0]) != "directory"]
        # Copies of which one reads or replaces what another one writes are made in the order of the caller.
        batches = [[pair] for pair in files] if plan.overlaps() else [files]
        for _, outcome in itertools.chain.from_iterable(concurrently(run, batch) for batch in batches):
            if isinstance(outcome, Exception) and not (ignores and isinstance(outcome, FileNotFoundError)):
                raise outcome
        folders = [pair for pair in plan.pairs if plan.kinds.get(pair[0]) == "directory"]
        for _, target in folders:
            self.makedirs(target, exist_ok=True)
        self._copy_markers(folders)
        return plan

    def _copy_markers(self, folders: list[tuple[str, str]]) -> None:
        """Copies the objects with which other tools mark these folders, which may have contents."""
        targets = {f"{self._strip_protocol(source)}/": target for source, target in folders}
        found = []
        for marker, head in self._heads(targets).items():
            if isinstance(head, ObjectNotFoundError):
                continue
            if isinstance(head, Exception):
                raise head
            found.append(marker)

        def run(marker: str) -> None:
            store, key = self._locate(targets[marker])
            store.copy(f"{self.unstrip_protocol(marker[:-1])}/", f"{key}/")

        for _, outcome in concurrently(run, found):
            if isinstance(outcome, Exception):
                raise outcome

    def mv(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        maxdepth: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Copies objects as `copy`, then deletes those that were copied, a thousand per request.

        Args:
            path1: An object, folder or glob, or a list of them.
            path2: The object or folder to write, or a list with one for each of `path1`.
            recursive: Whether everything below folders is moved. Otherwise folders are left out.
            maxdepth: Maximum depth of moved objects; those below are kept.
            kwargs: As for `cp_file`, for each.

        Raises:
            UnsupportedError: A path is a whole bucket, which is never emptied; nothing is copied then.
            StoreError: The first error of the copies, also for an object that does not exist; nothing is deleted then.
        """
        if path1 == path2:
            return
        for each in [path1] if isinstance(path1, str) else path1:
            self._refuse_bucket(each)
        plan = self._copy_all(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise", **kwargs)
        targets = {self._strip_protocol(target) for _, target in plan.pairs}
        moved = sorted({self._strip_protocol(source) for source, _ in plan.pairs} - targets)
        # With a slash: objects with which other tools mark folders.
        self._delete_each(f"{path}/" if plan.kinds.get(path) == "directory" else path for path in moved)
        for path in moved:
            self._created_folders.pop(path, None)

    def _delete_each(self, paths: Iterable[str]) -> None:
        for bucket, names in itertools.groupby(paths, key=lambda path: path.partition("/")[0]):
            self._locate(bucket)[0].delete([key for name in names if (key := name.partition("/")[2])])

    def _heads(self, paths: Iterable[str]) -> dict[str, ObjectInfo | Exception]:
        """The metadata of objects by path, or the error, by concurrent requests. Whole buckets are left out."""
        found: dict[str, ObjectInfo | Exception] = {}
        for bucket, group in itertools.groupby(sorted(set(paths)), key=lambda path: path.partition("/")[0]):
            keys = {path: key for path in group if (key := path.partition("/")[2])}
            found |= zip(keys, self._locate(bucket)[0].head_many(keys.values(), return_errors=True), strict=True)
        return found

    def sizes(self, paths: Iterable[str]) -> list[int | None]:
        """Sizes in bytes of objects, by concurrent requests; 0 for a folder.

        Raises:
            ObjectNotFoundError: Neither an object nor a folder has one of the names.
        """
        names = [self._strip_protocol(path) for path in paths]
        heads = self._heads(names)
        found = {path: head.size for path, head in heads.items() if not isinstance(head, Exception)}
        return [found[name] if name in found else self.size(name) for name in names]


class _CopyPlan(Plan):
    """What `AbstractFileSystem.copy` would copy."""

    cp_file = Plan.add

    def isdir(self, path: str) -> bool:
        kind = self.kinds.get(path)
        return bool(self._files.isdir(path)) if kind is None else kind == "directory"

    def overlaps(self) -> bool:
        """Whether a target is written twice, or is also a source."""
        sources = {self._files._strip_protocol(source) for source, _ in self.pairs}
        targets = {self._files._strip_protocol(target) for _, target in self.pairs}
        return len(targets) < len(self.pairs) or not targets.isdisjoint(sources)
