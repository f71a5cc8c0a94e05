"""What `get`, `put` and `copy` of fsspec would transfer. Its methods are called with a plan as their file system."""

from collections.abc import Iterable
from glob import has_magic
from typing import Any, Literal

from torchobj.exceptions import ConfigError, ObjectNotFoundError

__all__ = ["CopyPlan", "GetPlan", "Kind", "PutPlan", "expanded"]

#: What is known of a path without a request; None: nothing, because a caller named it.
Kind = Literal["file", "directory"] | None


def expanded(files: Any, path: Any, *, recursive: bool, maxdepth: int | None = None) -> dict[str, Kind]:
    """The selected paths, sorted, by the rules of `expand_path` of fsspec, which sends a request for each.

    Args:
        files: A file system.
        path: A path, glob or list of them.
        recursive: Whether all that is below selected folders is selected.
        maxdepth: Maximum depth of selected paths.

    Raises:
        ObjectNotFoundError: Nothing is selected.
    """
    if maxdepth is not None and maxdepth < 1:
        raise ConfigError(f"maxdepth={maxdepth!r}: must be at least 1")
    found: dict[str, Kind] = {}
    for name in map(files._strip_protocol, _paths_of(path)):
        if has_magic(name):
            matched = files.glob(name, maxdepth=maxdepth, detail=True)
            found |= _kinds(matched)
            if recursive and maxdepth != 1:
                below = None if maxdepth is None else maxdepth - 1
                for folder, entry in matched.items():
                    if entry["type"] == "directory" or "is_folder" in entry:
                        found = _kinds(files.find(folder, maxdepth=below, withdirs=True, detail=True)) | found
        elif recursive:
            found |= _kinds(files.find(name, maxdepth=maxdepth, withdirs=True, detail=True))
        else:
            found[name] = None
    if not found:
        raise ObjectNotFoundError(f"{path!r}: no object or folder is selected")
    return dict(sorted(found.items()))


def _paths_of(path: Any) -> Iterable[str]:
    return path if isinstance(path, (list, tuple, set)) else [path]


def _kinds(entries: dict[str, dict[str, Any]]) -> dict[str, Kind]:
    return {name: entry["type"] for name, entry in entries.items()}


class TransferPlan:
    """Collects the sources and targets of `AbstractFileSystem.get` or `copy`, called with this as its file system."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self.kinds: dict[str, Kind] = {}
        """Of paths that a listing returned."""
        self.pairs: list[tuple[str, Any]] = []

    def expand_path(self, path: Any, recursive: bool, maxdepth: int | None, **_: Any) -> list[str]:  # noqa: FBT001
        """Lists the paths."""
        self.kinds = expanded(self._files, path, recursive=recursive, maxdepth=maxdepth)
        return list(self.kinds)

    def add(self, source: str, target: Any, **_: Any) -> None:
        """Records a transfer."""
        self.pairs.append((source, target))


class GetPlan(TransferPlan):
    """What `AbstractFileSystem.get` would download."""

    get_file = TransferPlan.add

    def isdir(self, path: str) -> bool:
        """Whether it is a folder."""
        return self.kinds.get(path) == "directory"


class PutPlan:
    """Collects what `AbstractFileSystem.put` would upload."""

    def __init__(self, files: Any) -> None:
        self.isdir, self._strip_protocol = files.isdir, files._strip_protocol
        self.pairs: list[tuple[str, Any]] = []

    def put_file(self, lpath: str, rpath: Any, **_: Any) -> None:
        """Records a transfer."""
        self.pairs.append((lpath, rpath))


class CopyPlan(TransferPlan):
    """What `AbstractFileSystem.copy` would copy."""

    cp_file = TransferPlan.add

    def isdir(self, path: str) -> bool:
        """Whether it is a folder. A source that is an object too is copied as that."""
        kind = self.kinds.get(path)
        if kind is not None:
            return kind == "directory"
        return bool(self._files._is_only_folder(path) if path in self.kinds else self._files.isdir(path))

    def overlaps(self) -> bool:
        """Whether a target is written twice, or is also a source."""
        sources = {self._files._strip_protocol(source) for source, _ in self.pairs}
        targets = {self._files._strip_protocol(target) for _, target in self.pairs}
        return len(targets) < len(self.pairs) or not targets.isdisjoint(sources)
