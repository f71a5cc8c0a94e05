"""Entries of nested containers: selected by name, or matched with those of a file and filled in place.

The name of an entry is the path of keys that leads to it, joined by dots.
"""

import difflib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict

from torchobj.exceptions import ConfigError

__all__ = [
    "Pair",
    "Path",
    "assigned",
    "checked_keys",
    "flattened",
    "listed",
    "name_of",
    "pairs_of",
    "select",
    "selected",
    "wrapper_remedy",
]

#: The keys that lead from an object to one of its entries.
Path: TypeAlias = tuple[Any, ...]

#: Containers with entries. Anything else that is not a tensor is replaced as a whole.
_CONTAINERS = (Mapping, list, tuple)

#: Returned by torch for a tensor with several elements at the same address.
_OVERLAPS = 1

#: Parts of the names of a wrapped module, and what wraps it.
_WRAPPERS = {"module": "DistributedDataParallel", "_orig_mod": "torch.compile"}

#: Maximum number of differences in an error.
_LISTED = 5


def name_of(path: Path) -> str:
    """Returns the name of an entry."""
    return ".".join(map(str, path))


def flattened(tree: dict[Any, Any]) -> dict[str, Any]:
    """Returns the entries of a state by the names that they have in a distributed checkpoint.

    Raises:
        ConfigError: Two entries have the same name, such as those of the keys "a.b" and "b" in "a".
    """
    try:
        entries: dict[str, Any] = flatten_state_dict(tree)[0]
    except ValueError:
        paths: dict[str, Path] = {}

        def check(path: Path, _: Any) -> None:
            first = paths.setdefault(name_of(path), path)
            if first is not path:
                both = " and ".join("".join(f"[{key!r}]" for key in each) for each in (first, path))
                raise ConfigError(
                    f"state{both}: both have the name {name_of(path)!r} in a sharded checkpoint; rename one of the keys"
                ) from None

        traverse_state_dict(tree, check)
        raise
    return entries


def wrapper_remedy(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """Returns what to do if names differ because one of two modules is wrapped; empty if they differ otherwise.

    Args:
        missing: Names that only the object to fill has.
        unknown: Names that only the file has.

    Example:
        >>> wrapper_remedy(["module.weight"], ["weight"])
        "; 'module.' in the names here is of a module that DistributedDataParallel wraps: fill its .module"
        >>> wrapper_remedy(["net.weight"], ["head.weight"])
        ''
    """
    missing, unknown = (set(map(str, names)) for names in (missing, unknown))
    if not {_unwrapped(name) for name in missing} & {_unwrapped(name) for name in unknown}:
        return ""
    remedies = ""
    for part, wrapper in _WRAPPERS.items():
        in_missing, in_unknown = (any(part in name.split(".") for name in names) for names in (missing, unknown))
        if in_missing and not in_unknown:
            remedies += f"; {part + '.'!r} in the names here is of a module that {wrapper} wraps: fill its .{part}"
        elif in_unknown and not in_missing:
            remedies += (
                f"; {part + '.'!r} in the names there is of a module that {wrapper} wraps: fill the wrapped module, or "
                f"save .{part}"
            )
    return remedies


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def listed(differences: Sequence[str]) -> str:
    """Returns the first differences, and the number of the others, for an error."""
    more = f"; and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
    return f"{'; '.join(differences[:_LISTED])}{more}"


def checked_keys(keys: Any) -> list[str]:
    """Returns `keys` as a list.

    Raises:
        ConfigError: `keys` is a string or not iterable, or a key is not a string.
    """
    names: list[Any] = list(keys) if isinstance(keys, Iterable) and not isinstance(keys, str) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"keys={keys!r}: must be a list of names such as ['model.layer1']")
    return names


def select(tree: Any, keys: Sequence[str], url: str) -> list[Path]:
    """Returns the paths of the entries that `keys` select, in their order in the tree, none within another.

    A key selects the entry with this name, and those whose name starts with the key and ".": a nested mapping, a
    tensor, or all names of a flat state dict under a module.

    Raises:
        ConfigError: A key selects nothing; the message lists similar names.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{url}: keys={list(keys)!r}: the saved object is not a mapping")
    wanted, missing = set(keys), set(keys)
    lengths = {len(key) for key in keys}
    found: list[Path] = []
    names: list[str] = []
    for path in _paths(tree, (), ()):
        name = name_of(path)
        names.append(name)
        matching = wanted & {name[:length] for length in lengths if name[length : length + 1] in ("", ".")}
        missing -= matching
        # Entries within another one directly follow it.
        if matching and not (found and path[: len(found[-1])] == found[-1]):
            found.append(path)
    if missing:
        key = min(missing)
        near = difflib.get_close_matches(key, names, n=3, cutoff=0.4)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise ConfigError(f"{url}: keys: there is no entry {key!r}{hint}")
    return found


def _paths(tree: dict[Any, Any], path: Path, outer: tuple[Any, ...]) -> Iterator[Path]:
    """Yields the path of every entry, outer ones first; a mapping within itself is not entered again."""
    outer = (*outer, tree)
    for key, value in tree.items():
        if isinstance(key, str | int | float | bool):
            yield (*path, key)
            if isinstance(value, dict) and not any(value is mapping for mapping in outer):
                yield from _paths(value, (*path, key), outer)


def selected(value: Any, paths: Sequence[Path]) -> Any:
    """Returns the mappings of `value` with the entries at these paths only."""
    result = type(value)() if type(value) in (dict, OrderedDict) else {}
    if isinstance(result, OrderedDict):
        # The state dict of a module has the versions of its parts in an attribute.
        vars(result).update(vars(value))
    inner: dict[Any, list[Path]] = {}
    for first, *rest in paths:
        inner.setdefault(first, []).append(tuple(rest))
    for key, below in inner.items():
        result[key] = value[key] if () in below else selected(value[key], below)
    return result


class Pair(NamedTuple):
    """A tensor of the caller, and the tensor of the file that fills it: on meta if its bytes were not read yet."""

    path: str
    target: torch.Tensor
    source: torch.Tensor


def pairs_of(into: Any, loaded: Any, url: str) -> list[Pair]:
    """Returns the tensors to fill. Each pair of containers is visited once.

    Raises:
        ConfigError: Structure, shape or dtype differ; the message lists where.
    """
    matching = _Matching()
    matching.match(into, loaded, ())
    if matching.differences:
        is_part = isinstance(into, Mapping) and isinstance(loaded, Mapping) and into.keys() < loaded.keys()
        remedy = (
            f"; keys={list(into)!r} loads a part" if is_part else wrapper_remedy(matching.missing, matching.unknown)
        )
        raise ConfigError(f"{url}: into does not match: {listed(matching.differences)}{remedy}")
    return matching.pairs


class _Matching:
    """The comparison of an object to fill with what a file has."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.differences: list[str] = []
        #: Names that only the object has, and those that only the file has.
        self.missing: list[str] = []
        self.unknown: list[str] = []
        self._visited: dict[tuple[int, int], tuple[Any, Any]] = {}

    def match(self, target: Any, source: Any, path: Path) -> None:
        if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
            if reason := _difference(target, source):
                self.differences.append(f"{name_of(path) or 'the object'}: {reason}")
            else:
                self.pairs.append(Pair(name_of(path), target, source))
            return
        has_entries = (torch.Tensor, *_CONTAINERS)
        is_leaf = not isinstance(target, has_entries) and not isinstance(source, has_entries)
        if not is_leaf and (id(target), id(source)) not in self._visited:
            self._visited[id(target), id(source)] = (target, source)
            self._match_containers(target, source, path)

    def _match_containers(self, target: Any, source: Any, path: Path) -> None:
        if isinstance(target, Mapping) and isinstance(source, Mapping):
            missing = [name_of((*path, key)) for key in target if key not in source]
            unknown = [name_of((*path, key)) for key in source if key not in target]
            self.differences += [f"{name}: not in the file" for name in missing]
            self.differences += [f"{name}: only in the file" for name in unknown]
            self.missing += missing
            self.unknown += unknown
            for key in (key for key in source if key in target):
                self.match(target[key], source[key], (*path, key))
        elif isinstance(target, list | tuple) and isinstance(source, list | tuple) and len(target) == len(source):
            for index, both in enumerate(zip(target, source, strict=True)):
                self.match(*both, (*path, index))
        else:
            # The state_dict of a module or an optimizer would match.
            is_stateful = callable(getattr(target, "state_dict", None))
            remedy = "; give its state_dict(), as CheckpointManager.restore does" if is_stateful else ""
            kinds = f"{_kind(target)} here, {_kind(source)} in the file{remedy}"
            self.differences.append(f"{name_of(path) or 'the object'}: {kinds}")


def assigned(into: Any, loaded: Any, visited: dict[tuple[int, int], tuple[Any, ...]] | None = None) -> Any:
    """Returns `into` with everything that is not a tensor replaced by what was loaded, in place where possible."""
    if isinstance(into, torch.Tensor):
        return into
    if not isinstance(into, _CONTAINERS):
        return loaded
    visited = {} if visited is None else visited
    both = id(into), id(loaded)
    if both in visited:
        return visited[both][-1]
    # Keeps both alive, so that no other object gets their ids.
    visited[both] = (into, loaded, into)
    if isinstance(into, Mapping):
        for key, value in loaded.items():
            new = assigned(into[key], value, visited)
            if new is not into[key]:
                into[key] = new  # type: ignore[index]
        return into
    values = [assigned(*pair, visited) for pair in zip(into, loaded, strict=True)]
    if isinstance(into, list):
        into[:] = values
        return into
    new = type(into)(*values) if hasattr(into, "_fields") else type(into)(values)
    visited[both] = (into, loaded, new)
    return new


def _difference(target: torch.Tensor, source: torch.Tensor) -> str:
    """Returns why a tensor cannot be filled; empty if it can."""
    if _form(target) != _form(source):
        return f"{_form(target)} here, {_form(source)} in the file"
    return unfillable(target)


def unfillable(target: torch.Tensor) -> str:
    """Returns why no tensor can be copied into this one; empty if one can."""
    if target.device.type == "meta":
        return "a tensor on meta cannot be filled"
    if target.layout is torch.strided and torch._debug_has_internal_overlap(target) == _OVERLAPS:
        return "its elements share memory, as those of an expanded tensor do"
    return ""


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def _form(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{tensor.dtype}{layout} of shape {tuple(tensor.shape)}"
