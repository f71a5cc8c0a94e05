"""The objects and folders below a folder: `ls`, `find`, `du`. fsspec's defaults list every folder by itself."""

import logging
from typing import Any

import fsspec as package  # type: ignore[import-untyped]

from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.fsspec.files import file_entry, folder_entry
from torchobj.store.concurrency import concurrently

__all__ = ["Listings"]

logger = logging.getLogger("torchobj")


class Listings(package.AbstractFileSystem):  # type: ignore[misc]
    """Lists objects, for a file system that has `info`, `isdir`, `isfile`, `_locate` and `_created_folders`."""

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  fsspec's signature
        """The objects and folders directly below a folder, or the object with this name.

        A folder without a name, as that of the key `a//b`, has no path and is left out with a warning; `find` returns
        its objects.

        Raises:
            ObjectNotFoundError: Neither exists.
        """
        path = self._strip_protocol(path)
        found = self._children(path)
        if found is None:
            found = [self.info(path)]
        named = [entry for entry in found if not entry["name"].endswith("/")]
        if len(named) < len(found):
            logger.warning("%s/: ls omits a folder without a name; find returns its objects", path)
        return named if detail else [entry["name"] for entry in named]

    def _children(self, path: str) -> list[dict[str, Any]] | None:
        """The entries directly below a folder, by name; None if it is not a folder.

        The name of a folder without one ends with a slash.
        """
        base, slash, key = path.partition("/")
        store, prefix = self._locate(base)[0], f"{key}/" if slash else ""
        found, is_folder = [], not slash or path in self._created_folders
        for page in store.list(prefix, "/").pages():
            is_folder |= bool(page.objects or page.prefixes)
            found += [file_entry(f"{base}/{info.key}", info) for info in page.objects if info.key != prefix]
            found += [folder_entry(f"{base}/{name[:-1]}") for name in page.prefixes]
        if not is_folder:
            return None
        names = {entry["name"] for entry in found}
        found += [folder_entry(made) for made in set(self._created_folders) - names if self._parent(made) == path]
        return sorted(found, key=lambda entry: str(entry["name"]))

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        detail: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        *,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """All objects below a folder, by one recursive listing; or the object with this name.

        Args:
            path: The folder.
            maxdepth: Maximum depth; each level is listed concurrently. None for all levels.
            withdirs: Whether to include folders, also `path` itself.
            detail: Whether to return a dict from names to the results of `info`.
            prefix: Selects objects whose path after the folder starts with it, as in s3fs and gcsfs.

        Raises:
            ConfigError: `prefix` is combined with `maxdepth` or `withdirs`.
        """
        if prefix and (maxdepth is not None or withdirs):
            raise ConfigError(f"prefix={prefix!r}: cannot be combined with maxdepth or withdirs")
        path = self._strip_protocol(path)
        if not path:
            return super().find(path, maxdepth, withdirs, detail, **kwargs)
        entries = self._all_below(path, prefix) if maxdepth is None else self._levels_below(path, maxdepth)
        if withdirs and (entries or self.isdir(path)):
            entries[path] = folder_entry(path)
        if not entries and not prefix and self.isfile(path):
            entries = {path: self.info(path)}
        found = {name: entries[name] for name in sorted(entries) if withdirs or entries[name]["type"] != "directory"}
        return found if detail else list(found)

    def _all_below(self, path: str, prefix: str) -> dict[str, dict[str, Any]]:
        """The objects at all depths, and their folders."""
        store, key = self._locate(path)
        base, below = path.partition("/")[0], f"{key}/" if key else ""
        files, folders = {}, {made for made in list(self._created_folders) if made.startswith(f"{path}/")}
        folder = ""
        for info in store.list(below + prefix):
            *parents, name = info.key.removeprefix(below).split("/")
            # Markers of folders cannot be addressed by a path.
            if name:
                files[f"{base}/{info.key}"] = file_entry(f"{base}/{info.key}", info)
            if (above := "/".join(parents)) != folder:
                folder = above
                folders |= {"/".join((path, *parents[: depth + 1])) for depth, parent in enumerate(parents) if parent}
        return _by_name([*files.values(), *map(folder_entry, folders)])

    def _levels_below(self, path: str, maxdepth: int) -> dict[str, dict[str, Any]]:
        """The objects and folders down to a depth, level by level."""
        found: dict[str, dict[str, Any]] = {}
        level = [path]
        for _ in range(maxdepth):
            entries = []
            for _, children in concurrently(self._children, level):
                if isinstance(children, Exception) and not isinstance(children, ObjectNotFoundError):
                    raise children
                entries += children if isinstance(children, list) else []
            found |= _by_name(entries)
            level = [entry["name"] for entry in entries if entry["type"] == "directory"]
        return {name: entry for name, entry in found.items() if not name.endswith("/")}

    def du(
        self,
        path: str,
        total: bool = True,  # noqa: FBT001, FBT002  fsspec's signature
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        **kwargs: Any,
    ) -> Any:
        """The size of all objects below a folder, from their listing; with `total=False` a dict of names and sizes."""
        entries = self.find(path, maxdepth, withdirs, detail=True, **kwargs)
        sizes = {name: entry["size"] for name, entry in entries.items()}
        return sum(size or 0 for size in sizes.values()) if total else sizes


def _by_name(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The entries by name. An object with the name of a folder takes precedence, and its entry has `is_folder`."""
    folders = {entry["name"]: entry for entry in entries if entry["type"] == "directory"}
    files = {entry["name"]: entry for entry in entries if entry["type"] == "file"}
    return folders | files | {name: files[name] | {"is_folder": True} for name in files.keys() & folders.keys()}
