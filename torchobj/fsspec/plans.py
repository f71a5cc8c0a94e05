"""The sources and targets of `get`, `put` and `copy` of fsspec, by one listing in place of a request for each path."""

from collections.abc import Callable, Iterable
from glob import has_magic
from typing import Any, Literal, NamedTuple

from fsspec.implementations.local import LocalFileSystem, trailing_sep  # type: ignore[import-untyped]
from fsspec.utils import other_paths  # type: ignore[import-untyped]

from torchobj.exceptions import ConfigError, ObjectNotFoundError

__all__ = ["Kind", "Plan", "expanded", "planned"]

#: What is known of a path without a request; None: nothing, because a caller named it, or it is a link.
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
                    kind = _kind_of(entry)
                    if kind == "directory" or "is_folder" in entry or (kind is None and files.isdir(folder)):
                        found = _kinds(files.find(folder, maxdepth=below, withdirs=True, detail=True)) | found
        elif recursive:
            found |= _kinds(files.find(name, maxdepth=maxdepth, withdirs=True, detail=True))
        else:
            found[name] = None
    if not found:
        if isinstance(files, LocalFileSystem):
            raise FileNotFoundError(f"{path!r}: no file or folder is selected")
        raise ObjectNotFoundError(f"{path!r}: no object or folder is selected")
    return dict(sorted(found.items()))


def _paths_of(path: Any) -> Iterable[str]:
    return path if isinstance(path, (list, tuple, set)) else [path]


def _kinds(entries: dict[str, dict[str, Any]]) -> dict[str, Kind]:
    return {name: _kind_of(entry) for name, entry in entries.items()}


def _kind_of(entry: dict[str, Any]) -> Kind:
    kind: Kind = entry["type"] if entry["type"] in ("file", "directory") else None
    return kind


class Plan(NamedTuple):
    """What to transfer."""

    kinds: dict[str, Kind]
    """Of paths that were selected in the file system of the sources."""
    pairs: list[tuple[str, Any]]
    """Sources and targets."""


def planned(
    files: Any,
    source: Any,
    target: Any,
    *,
    is_folder: Callable[[str], bool] | None,
    is_target_folder: Callable[[str], bool],
    recursive: bool,
    maxdepth: int | None,
) -> Plan:
    """What `get`, `put` or `copy` of fsspec would transfer.

    Args:
        files: The file system of the sources.
        source: A path, glob or list of them.
        target: A file or folder, or a list with one for each source.
        is_folder: Returns whether a path of unknown kind is that of a folder. None: such paths are objects.
        is_target_folder: Returns whether a path is that of a folder that exists.
        recursive: Whether all that is below selected folders is selected.
        maxdepth: Maximum depth of selected paths.

    Raises:
        FileNotFoundError: Nothing is selected.
        ConfigError: The list has another number of targets.
    """
    if isinstance(source, list) and isinstance(target, list):
        return Plan({}, _with_targets(source, target, source, is_target_folder))
    kinds = expanded(files, source, recursive=recursive, maxdepth=maxdepth)
    selected = list(kinds)
    if isinstance(source, str) and (not recursive or maxdepth is not None):
        named = {path for path, kind in kinds.items() if kind is None and is_folder is not None and is_folder(path)}
        selected = [path for path, kind in kinds.items() if kind != "directory" and path not in named]
    return Plan(kinds, _with_targets(source, target, selected, is_target_folder))


def _with_targets(
    source: Any, target: Any, selected: list[str], is_target_folder: Callable[[str], bool]
) -> list[tuple[str, Any]]:
    """The selected paths and their targets."""
    if not selected:
        return []
    if not isinstance(target, str) and len(target) != len(selected):
        raise ConfigError(f"{len(target)} targets for {len(selected)} paths: pass one target for each path")
    is_one = isinstance(source, str)
    if is_one and has_magic(source):
        is_within = len(selected) == 1
    else:
        is_folder = isinstance(target, str) and (trailing_sep(target) or is_target_folder(target))
        is_within = is_one and is_folder and not trailing_sep(source)
    return list(zip(selected, other_paths(selected, target, exists=is_within, flatten=not is_one), strict=True))
