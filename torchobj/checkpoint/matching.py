"""Compares a tree of state with an outline of what is saved, and puts what was loaded into it. Reads nothing.

A tree has mappings, lists and tuples of the caller's tensors and values. An outline has the same structure; in place of
tensors it may have `TensorOutline`s, or tensors without memory. The name of an entry is the path of keys that leads to
it, joined by dots.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.stateful import is_stateful

__all__ = [
    "UNREAD",
    "WRAPPERS",
    "Accepts",
    "Differences",
    "Pair",
    "Part",
    "Path",
    "Skipped",
    "TensorOutline",
    "assign",
    "match",
    "name_of",
    "pairs_of",
    "unwrapped",
]

#: The keys that lead from an object to one of its entries.
Path: TypeAlias = tuple[Any, ...]

#: Returned by torch for a tensor with several elements at the same address.
_OVERLAPS = 1

_ON_META = "a tensor on meta cannot be filled; to_empty() of its module gives it memory"

#: Parts of the names of a wrapped module, and what wraps it.
WRAPPERS = {"module": "DistributedDataParallel", "_orig_mod": "torch.compile"}

#: Maximum number of differences, and of names, in an error.
_LISTED = 5


def name_of(path: Path) -> str:
    """Returns the name of an entry."""
    return ".".join(map(str, path))


class TensorOutline(NamedTuple):
    """A saved tensor without its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: torch.layout = torch.strided

    def __str__(self) -> str:
        layout = "" if self.layout is torch.strided else f" {self.layout}"
        return f"{self.dtype}{layout} of shape {self.shape}"


class _Unread:
    """A saved value that is not a tensor, and was not read yet."""


#: In an outline.
UNREAD = _Unread()


class Accepts(NamedTuple):
    """In a tree: what an object loads by itself, or what is replaced as a whole."""

    shape: tuple[int, ...] | None = None
    """The shape of a tensor, of any dtype; None for any value."""
    memory: torch.Tensor | None = None
    """The tensor that the object copies it into."""


class Part(dict[Any, Any]):
    """In a tree: a mapping that may have fewer entries than the outline."""


class Pair(NamedTuple):
    """A tensor of the tree, and the tensor of the outline that fills it."""

    path: str
    target: torch.Tensor
    source: Any


class Skipped(NamedTuple):
    """Names that only one of a tree and an outline has, where these are no differences."""

    missing: list[str]
    """Names that only the tree has."""
    unexpected: list[str]
    """Names that only the outline has."""

    def __str__(self) -> str:
        groups = (
            ("not in the checkpoint, left unchanged", self.missing),
            ("only in the checkpoint, ignored", self.unexpected),
        )
        return "; ".join(f"{text}: {_listed(names, ', ')}" for text, names in groups if names)


class Differences:
    """What differs between a tree and an outline. Its text names the first differences, and what to do."""

    def __init__(self) -> None:
        #: Names that only the tree has, and those that only the outline has.
        self.missing: list[str] = []
        self.unknown: list[str] = []
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def __str__(self) -> str:
        remedy = _wrapper_remedy(self.missing, self.unknown)
        return f"into does not match: {_listed(self._texts)}{remedy}"

    def add(self, path: Path, text: str) -> None:
        """Adds the difference of an entry."""
        self._texts.append(f"{name_of(path) or 'the object'}: {text}")

    def add_keys(
        self, path: Path, tree: Mapping[Any, Any], outline: Mapping[Any, Any], skipped: Skipped | None = None
    ) -> None:
        """Adds the keys that only one of two mappings has; to `skipped` instead if it is given."""
        missing = [name_of((*path, key)) for key in tree if key not in outline]
        unknown = [] if isinstance(tree, Part) else [name_of((*path, key)) for key in outline if key not in tree]
        if skipped is not None:
            skipped.missing.extend(missing)
            skipped.unexpected.extend(unknown)
            return
        has = f", which has {_listed([str(key) for key in outline], ', ')}" if isinstance(tree, Part) else ""
        self._texts += [f"{name}: not in the checkpoint{has}" for name in missing]
        self._texts += [f"{name}: only in the checkpoint" for name in unknown]
        self.missing += missing
        self.unknown += unknown


def match(tree: Any, outline: Any, skipped: Skipped | None = None) -> list[Pair] | Differences:
    """Compares a tree with an outline.

    Tensors must have the same dtype, layout and shape, and memory that can be filled; lists and tuples the same length;
    mappings the same keys. Other values match any other value. `Accepts` and `Part` in the tree are less strict.

    Args:
        tree: What one has. It may contain itself.
        outline: What is saved.
        skipped: Gets the names that only one of them has, which then are no differences.

    Returns:
        The tensors of the tree with those that fill them, or the differences, if there are any.

    Example:
        >>> print(match({"a": torch.ones(2), "b": 1}, {"a": TensorOutline(torch.float32, (3,)), "c": 1}))
        into does not match: b: not in the checkpoint; c: only in the checkpoint; a: torch.float32 of shape (2,) here, \
torch.float32 of shape (3,) in the checkpoint
    """
    matching = _Matching(skipped)
    matching.match(tree, outline, ())
    return matching.differences or matching.pairs


def pairs_of(into: Any, loaded: Any, url: str) -> list[Pair]:
    """Returns the tensors to fill, and those of the file at `url` that fill them.

    Raises:
        ConfigError: Structure, shape or dtype differ; the message lists where.
    """
    found = match(into, loaded)
    if isinstance(found, Differences):
        is_part = isinstance(into, Mapping) and isinstance(loaded, Mapping) and into.keys() < loaded.keys()
        raise ConfigError(f"{url}: {found}{f'; keys={list(into)!r} loads a part' if is_part else ''}")
    return found


class _Matching:
    """A comparison. Each pair of containers is visited once."""

    def __init__(self, skipped: Skipped | None) -> None:
        self.pairs: list[Pair] = []
        self.differences = Differences()
        self._skipped = skipped
        self._visited: dict[tuple[int, int], tuple[Any, Any]] = {}

    def match(self, tree: Any, outline: Any, path: Path) -> None:
        if isinstance(tree, Accepts):
            self._match_accepted(tree, outline, path)
        elif isinstance(tree, torch.Tensor) and isinstance(outline, torch.Tensor | TensorOutline):
            here, there = _outline_of(tree), _outline_of(outline)
            if reason := _unfillable(tree) if here == there else _kinds(here, there):
                self.differences.add(path, reason)
            else:
                self.pairs.append(Pair(name_of(path), tree, outline))
        elif _is_replaced(tree, outline):
            pass
        elif not _are_alike(tree, outline):
            # The state_dict of a module or an optimizer would match.
            remedy = "; give its state_dict(), as CheckpointManager.restore does" if is_stateful(tree) else ""
            self.differences.add(path, f"{_kinds(tree, outline)}{remedy}")
        elif (id(tree), id(outline)) not in self._visited:
            # Keeps both alive, so that no other object gets their ids.
            self._visited[id(tree), id(outline)] = (tree, outline)
            if isinstance(tree, Mapping):
                self.differences.add_keys(path, tree, outline, self._skipped)
            for key in [key for key in outline if key in tree] if isinstance(tree, Mapping) else range(len(tree)):
                self.match(tree[key], outline[key], (*path, key))

    def _match_accepted(self, tree: Accepts, outline: Any, path: Path) -> None:
        there = _outline_of(outline)
        if tree.shape is not None and outline is not UNREAD and (there is None or there.shape != tree.shape):
            self.differences.add(
                path, f"a tensor of shape {tree.shape} here, {_kind(there or outline)} in the checkpoint"
            )
        elif tree.memory is not None and tree.memory.is_meta:
            self.differences.add(path, _ON_META)


def _outline_of(value: Any) -> Any:
    """Returns the outline of a tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        return TensorOutline(value.dtype, tuple(value.shape), value.layout)
    return value if isinstance(value, TensorOutline) else None


def _is_replaced(tree: Any, outline: Any) -> bool:
    """Returns whether neither is a tensor or a container, as far as it is known: any other value replaces any other."""
    if outline is UNREAD:
        return not isinstance(tree, torch.Tensor)
    return not any(isinstance(each, torch.Tensor | Mapping | list | tuple) for each in (tree, outline))


def _are_alike(tree: Any, outline: Any) -> bool:
    """Returns whether both are mappings, or both are lists or tuples of one length."""
    if isinstance(tree, Mapping):
        return isinstance(outline, Mapping)
    are_lists = isinstance(tree, list | tuple) and isinstance(outline, list | tuple) and _outline_of(outline) is None
    return are_lists and len(tree) == len(outline)


def _kinds(tree: Any, outline: Any) -> str:
    return f"{_kind(tree)} here, {_kind(outline)} in the checkpoint"


def _kind(value: Any) -> str:
    if isinstance(value, TensorOutline):
        return str(value)
    if value is UNREAD:
        return "a value"
    if isinstance(value, Part):
        return "dict"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def _unfillable(target: torch.Tensor) -> str:
    """Returns why no tensor can be copied into this one; empty if one can."""
    if target.is_meta:
        return _ON_META
    if target.layout is torch.strided and torch._debug_has_internal_overlap(target) == _OVERLAPS:
        return "its elements share memory, as those of an expanded tensor do"
    return ""


def _listed(texts: Sequence[str], joint: str = "; ") -> str:
    """Returns the first texts, and the number of the others, for an error."""
    more = f"{joint}and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return f"{joint.join(texts[:_LISTED])}{more}"


def _wrapper_remedy(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """Returns what to do if names differ because one of two modules is wrapped; empty if they differ otherwise.

    Args:
        missing: Names that only the object to fill has.
        unknown: Names that only the checkpoint has.

    Example:
        >>> _wrapper_remedy(["module.weight"], ["weight"])
        "; 'module.' in the names here is of a module that DistributedDataParallel wraps: fill its .module"
        >>> _wrapper_remedy(["net.weight"], ["head.weight"])
        ''
    """
    missing, unknown = set(missing), set(unknown)
    if not set(map(unwrapped, missing)) & set(map(unwrapped, unknown)):
        return ""
    remedies = ""
    for part, wrapper in WRAPPERS.items():
        in_missing, in_unknown = (any(part in name.split(".") for name in names) for names in (missing, unknown))
        if in_missing and not in_unknown:
            remedies += f"; {part + '.'!r} in the names here is of a module that {wrapper} wraps: fill its .{part}"
        elif in_unknown and not in_missing:
            remedies += (
                f"; {part + '.'!r} in the names there is of a module that {wrapper} wraps: fill the wrapped module, or "
                f"save .{part}"
            )
    return remedies


def unwrapped(name: str) -> str:
    """Returns a name without the parts that wrappers of modules add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def assign(into: Any, loaded: Any, *, source: str | None = None, strict: bool = True) -> Any:
    """Returns `into` with everything that is not a tensor replaced by what was loaded, in place where possible.

    Args:
        into: What was matched. Its tensors are those of the pairs, and are left to the caller.
        loaded: What was loaded; may have more entries at the top.
        source: The checkpoint, for errors, if there may be objects below `into`, which load their states. Lists and
            tuples are then replaced, too.
        strict: Passed to the `load_state_dict` of modules if it is False.

    Raises:
        CheckpointError: The `load_state_dict` of an object fails; the message names it.
    """
    return _assign(into, loaded, (), {}, source=source, strict=strict)


#: By the ids of `into` and what was loaded: both, and what `_assign` returns for them.
_Visited: TypeAlias = dict[tuple[int, int], tuple[Any, ...]]


def _assign(into: Any, loaded: Any, path: Path, visited: _Visited, *, source: str | None, strict: bool) -> Any:
    if source is not None and path and is_stateful(into):
        try:
            into.load_state_dict(
                loaded, **({} if strict or not isinstance(into, torch.nn.Module) else {"strict": False})
            )
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            message = f"{source}: {name_of(path)}: {type(into).__name__} refuses its state"
            raise CheckpointError(f"{message}; earlier entries are restored: {error}") from error
    elif (both := (id(into), id(loaded))) in visited:
        return visited[both][-1]
    elif isinstance(into, Mapping):
        # Keeps both alive, so that no other object gets their ids.
        visited[both] = (into, loaded, into)
        for key in [key for key in into if key in loaded]:
            new = _assign(into[key], loaded[key], (*path, key), visited, source=source, strict=strict)
            if new is not into[key]:
                into[key] = new  # type: ignore[index]
    elif isinstance(into, list | tuple) and source is None:
        visited[both] = (into, loaded, into)
        pairs = enumerate(zip(into, loaded, strict=True))
        values = [_assign(*pair, (*path, index), visited, source=source, strict=strict) for index, pair in pairs]
        if isinstance(into, tuple):
            into = type(into)(*values) if hasattr(into, "_fields") else type(into)(values)
            visited[both] = (*visited[both][:2], into)
        else:
            into[:] = values
    elif not isinstance(into, torch.Tensor):
        return loaded
    return into
