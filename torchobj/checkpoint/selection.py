"""Parts of an object by the keys of its mappings joined by dots: found, and kept with their nesting."""

import difflib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from torchobj.exceptions import ConfigError

__all__ = ["Path", "checked_keys", "kept", "select", "value_at"]

#: The keys of mappings that lead from an object to a part of it.
Path: TypeAlias = tuple[Any, ...]


def checked_keys(keys: Any) -> list[str]:
    """`keys` as a list.

    Raises:
        ConfigError: They are not strings.
    """
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"keys={keys!r}: must be a list of names such as ['model.layer1']")
    return list(keys)


def select(tree: Any, keys: Sequence[str], url: str) -> list[Path]:
    """The parts that `keys` name, in their order in the tree, none within another.

    A key names the entry whose path, mapping keys joined by ".", equals it, and those whose path begins with it and
    ".": so it names a nested mapping, a tensor, or all names of a flat state dict under a module.

    Raises:
        ConfigError: A key that names nothing; the message shows names that are near.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{url}: keys={list(keys)!r}: what was saved is no mapping")
    entries = list(_entries(tree, (), ()))
    missing = set(keys)
    found: list[Path] = []
    for name, path in entries:
        naming = [key for key in keys if name == key or name.startswith(key + ".")]
        missing.difference_update(naming)
        if naming and not any(path[: len(outer)] == outer for outer in found):
            found.append(path)
    if missing:
        key = min(missing)
        near = difflib.get_close_matches(key, [name for name, _ in entries], n=3, cutoff=0.4)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise ConfigError(f"{url}: keys: nothing is named {key!r}{hint}")
    return found


def kept(value: Any, paths: Sequence[Path]) -> Any:
    """The mappings of `value` with these parts only."""
    whole = type(value)() if type(value) in (dict, OrderedDict) else {}
    inner: dict[Any, list[Path]] = {}
    for first, *rest in paths:
        inner.setdefault(first, []).append(tuple(rest))
    for key, below in inner.items():
        whole[key] = value[key] if () in below else kept(value[key], below)
    return whole


def value_at(tree: Any, path: Path) -> Any:
    """What a path leads to."""
    for key in path:
        tree = tree[key]
    return tree


def _entries(tree: dict[Any, Any], path: Path, around: tuple[Any, ...]) -> Iterator[tuple[str, Path]]:
    """Everything that has a name, outer before inner; a mapping within itself is not entered again."""
    around = (*around, tree)
    for key, value in tree.items():
        if not isinstance(key, str | int | float | bool):
            continue
        inner = (*path, key)
        yield ".".join(str(part) for part in inner), inner
        if isinstance(value, dict) and not any(value is outer for outer in around):
            yield from _entries(value, inner, around)
