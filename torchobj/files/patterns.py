"""Patterns that exclude or include the files of a tree by their paths, in order."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torchobj.exceptions import ConfigError

__all__ = ["Pattern", "native_patterns", "selects"]

#: Whether a path that matches is excluded or included, and a pattern of a shell.
Pattern = tuple[Literal["exclude", "include"], str]


def selects(patterns: Sequence[Pattern], path: str) -> bool:
    """Whether patterns select a relative path. The last one that matches counts; without any, the path is selected.

    Example:
        >>> patterns = [("exclude", "*"), ("include", "*.jpg"), ("exclude", "tmp/*")]
        >>> [path for path in ("a.txt", "b.jpg", "x/c.jpg", "tmp/d.jpg") if selects(patterns, path)]
        ['b.jpg', 'x/c.jpg']
    """
    matching = (action for action, pattern in reversed(patterns) if fnmatchcase(path, pattern))
    return next(matching, "include") == "include"


def native_patterns(patterns: Iterable[Pattern]) -> list[tuple[bool, str]]:
    """Patterns for the native module.

    Raises:
        ConfigError: One is not a pair of `exclude` or `include` and a pattern.
    """
    native = []
    for each in patterns:
        action, pattern = each if isinstance(each, tuple) and len(each) == 2 else (None, None)
        if action not in ("exclude", "include") or not isinstance(pattern, str):
            raise ConfigError(f'patterns: {each!r} must be a pair such as ("exclude", "*.tmp") or ("include", "*.jpg")')
        native.append((action == "include", pattern))
    return native
