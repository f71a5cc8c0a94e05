"""Entries of nested containers, selected by name."""

import difflib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import traverse_state_dict

from torchobj.checkpoint.matching import Path, name_of
from torchobj.exceptions import ConfigError

__all__ = ["checked_keys", "flattened", "select", "selected"]


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
