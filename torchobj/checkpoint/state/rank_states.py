"""The states of several ranks in one checkpoint, and which of them a rank restores. Reads and writes no store.

A value that differs among ranks is a dict with the values of all ranks; states that ranks have parts of are saved below
the number of the first rank of each part.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from torchobj.checkpoint.matching import Path, name_of
from torchobj.checkpoint.state.digest import digest_of
from torchobj.checkpoint.state.parts import PARAM_GROUPS, groups_of_own
from torchobj.exceptions import CheckpointError
from torchobj.ranks.meeting import Ranks

__all__ = [
    "FIRSTS",
    "NONE",
    "PARTS",
    "RANKS",
    "is_list_of_firsts",
    "key_in",
    "nested_names",
    "own_parts",
    "own_state",
    "paths_of",
    "value_at",
    "with_rank_states",
    "with_value",
    "without_value",
]

#: The only key of a dict with the states of all ranks, which are in a tuple: a distributed checkpoint keeps a tuple as
#: one value.
RANKS = "torchobj_states_of_ranks"
#: The rank in the state of a sampler; its loader compares it where it matters.
_RANK = "rank"
#: In place of a value that is None, because None stands for a rank without a value.
NONE = "torchobj_none"

#: The only key of a dict with the parts that ranks have, by the number of the first rank of each.
PARTS = "torchobj_parts"
#: Maximum depth of a state.
_DEEPEST = 200

#: In this dict, a dict whose only key lists the number for each rank, which a reader has before it reads values.
FIRSTS = "firsts"


def with_rank_states(tree: dict[Any, Any], metadata: Metadata, ranks: Ranks, source: str) -> dict[Any, Any]:
    """Returns the state to fill from a distributed checkpoint, with the entries that have the states of several ranks.

    Args:
        tree: The state of the objects to fill.
        metadata: The checkpoint's metadata.
        ranks: The ranks that restore.
        source: The checkpoint, for errors.

    Raises:
        CheckpointError: A state was saved in parts, by another number of ranks or by other ranks; the message names it.
    """
    for path in paths_of(metadata).values():
        top = next((top for top in tree if str(top) == path[0]), None)
        if path[-1] == RANKS and top is not None:
            # The groups of an optimizer that this rank does not have are of no use.
            if path[-2:-1] != (PARAM_GROUPS,) or value_at(tree, path[:-1]) is not None:
                tree = with_value(tree, path[:-1], {RANKS: None})
        elif is_list_of_firsts(path) and (value := value_at(tree, path[:-3])) is not None:
            if not (first := _first_of_part(path[-1], path[:-3], ranks, source)):
                raise _of_other_ranks(path[:-3], sum(map(bool, path[-1].split(","))), ranks, source)
            tree = with_value(tree, path[:-3], {PARTS: {first: value}})
    return tree


def paths_of(metadata: Metadata) -> dict[str, Path]:
    """Returns the keys that lead to each entry of a checkpoint; strings, except for indices of lists."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return {name: _path_of(paths.get(name), name) for name in metadata.state_dict_metadata}


def _path_of(path: Any, name: str) -> Path:
    is_path = type(path) is tuple and path and all(type(key) in (str, int) for key in path)
    return path if is_path else tuple(name.split("."))


def nested_names(metadata: Metadata, source: str) -> dict[Any, Any]:
    """Returns the names of the entries of a checkpoint by their keys, nested; lists are dicts by index.

    Raises:
        CheckpointError: The keys are not those of nested dicts and lists.
    """
    nested: dict[Any, Any] = {}
    for name, path in paths_of(metadata).items():
        inner: Any = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
        if not isinstance(inner, dict) or path[-1] in inner or len(path) > _DEEPEST:
            raise CheckpointError(f"{source}: the metadata is damaged: the place of {name[:200]} is not valid")
        inner[path[-1]] = name
    return nested


def own_parts(nested: Any, path: Path, ranks: Ranks, source: str) -> Any:
    """Returns what `nested_names` returned for a path, without the parts that other ranks have.

    Raises:
        CheckpointError: A state was saved in parts by another number of ranks.
    """
    if not isinstance(nested, dict):
        return nested
    if nested.keys() == {PARTS} and isinstance(parts := nested[PARTS], dict) and isinstance(parts.get(FIRSTS), dict):
        first = _first_of_part(next(iter(parts[FIRSTS])), path, ranks, source)
        return {PARTS: {first: parts[first]}} if first in parts else {}
    own = {key: own_parts(inner, (*path, key), ranks, source) for key, inner in nested.items()}
    return {key: inner for key, inner in own.items() if inner != {}}


def _first_of_part(firsts: str, path: Path, ranks: Ranks, source: str) -> str:
    """Returns the number of the first rank that has the part of this rank; empty if this rank has none.

    Args:
        firsts: The list of these numbers for all ranks, joined by commas.
        path: The path of the state that ranks have parts of.
        ranks, source: As for `with_rank_states`.

    Raises:
        CheckpointError: There were other ranks.
    """
    numbers = str(firsts).split(",")
    if len(numbers) != ranks.count:
        raise _of_other_ranks(path, sum(map(bool, numbers)), ranks, source)
    return numbers[ranks.number]


def is_list_of_firsts(path: Path) -> bool:
    """Returns whether the entry at a path of a checkpoint lists the ranks of parts, and has no value."""
    return path[-3:-1] == (PARTS, FIRSTS)


def own_state(loaded: Any, ranks: Ranks, source: str, existing: Mapping[Any, Any] | None = None) -> Any:
    """Replaces the states of all ranks in a loaded state by that of this rank. Modifies its dicts.

    Args:
        loaded: The state.
        ranks: The ranks that restore.
        source: The checkpoint, for errors.
        existing: The state to fill, as it was before `with_rank_states`; None to return what this rank saved.

    Raises:
        CheckpointError: A state was saved by another number of ranks, each its own; the message names it. Or it is
            damaged.
    """
    root = {None: loaded}
    visited: set[int] = set()
    # A stack, not recursion: a file may nest dicts at will. Each dict with the names that lead to it, innermost first.
    stack: list[tuple[dict[Any, Any], Any]] = [(root, None)]
    while stack:
        outer, names = stack.pop()
        for name, value in list(outer.items()):
            if type(value) is not dict:
                continue
            inner = (name, names)
            if value.keys() == {RANKS}:
                own = None if existing is None else value_at(existing, _path(inner))
                if name == PARAM_GROUPS and isinstance(own, list):
                    outer[name] = groups_of_own(value[RANKS], own, source, _path(inner))
                elif existing is not None and own is None and _is_absent(value[RANKS], ranks):
                    del outer[name]
                else:
                    outer[name] = _own(value[RANKS], ranks, source, inner)
            elif value.keys() == {PARTS} and isinstance(value[PARTS], dict):
                # Only that of this rank was read.
                [part] = list(value[PARTS].values())[:1] or [None]
                outer[name] = None if isinstance(part, str) and part == NONE else part
            elif id(value) not in visited:
                visited.add(id(value))
                stack.append((value, inner))
    return root[None]


def _path(names: Any) -> Path:
    """Returns the path below the root that names lead to, innermost first."""
    path: Path = ()
    while names is not None:
        path, names = (names[0], *path), names[1]
    return path[1:]


def _own(states: Any, ranks: Ranks, source: str, names: Any) -> Any:
    if not isinstance(states, list | tuple) or not states:
        kind = type(states).__name__
        raise CheckpointError(f"{source}: the states of the ranks are damaged: expected a list, found a {kind}")
    # None stands for a rank without the object.
    given = [state for state in states if state is not None]
    own = states[ranks.number] if len(states) == ranks.count else None
    if own is None and (not given or _are_same(given)):
        own = given[0] if given else None
    if own is not None or not given:
        return None if isinstance(own, str) and own == NONE else own
    is_loader = isinstance(given[0], Mapping) and "within_epoch" in given[0]
    advice = "; the loader of an ElasticDistributedSampler has one state for all ranks" if is_loader else ""
    raise _of_other_ranks(_path(names), len(given), ranks, source, advice)


def _of_other_ranks(path: Path, saved: int, ranks: Ranks, source: str, advice: str = "") -> CheckpointError:
    return CheckpointError(
        f"{source}: {name_of(path) or 'the state'} was saved by {saved} ranks, each its own, and there are "
        f"{ranks.count}: leave it out of into={advice}"
    )


def _is_absent(states: Any, ranks: Ranks) -> bool:
    """Returns whether other ranks saved a state, and this rank none."""
    return isinstance(states, list | tuple) and len(states) == ranks.count and states[ranks.number] is None


def value_at(tree: Any, path: Path) -> Any:
    """Returns the value at a path as it is kept among those of all ranks; None if there is none."""
    for name in path:
        if not isinstance(tree, Mapping) or (key := key_in(tree, name)) not in tree:
            return None
        tree = tree[key]
    return NONE if tree is None else tree


def key_in(tree: Any, name: Any) -> Any:
    """Returns the key of a mapping for a name, which a checkpoint has as a string; the name if no key has it."""
    if isinstance(tree, Mapping) and name not in tree:
        return next((found for found in tree if str(found) == name), name)
    return name


def with_value(tree: Mapping[Any, Any], path: Path, value: Any) -> dict[Any, Any]:
    """Returns a tree with a value at a path."""
    name, *rest = key_in(tree, path[0]), *path[1:]
    inner = tree.get(name)
    below = inner if isinstance(inner, Mapping) else {}
    return {**tree, name: with_value(below, tuple(rest), value) if rest else value}


def without_value(tree: Mapping[Any, Any], path: Path) -> dict[Any, Any]:
    """Returns a tree without the value at a path."""
    name, *rest = path
    left = {key: value for key, value in tree.items() if key != name}
    return {**left, name: without_value(tree[name], tuple(rest))} if rest and name in tree else left


def _are_same(states: list[Any]) -> bool:
    """Returns whether states are equal except for their rank."""
    if len(states) == 1:
        return True
    try:
        return len({digest_of(_without_rank(state)) for state in states}) == 1
    except Exception:  # noqa: BLE001  of any object that is pickled
        # States that cannot be compared, such as one that contains itself, count as different.
        return False


def _without_rank(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _without_rank(value) for name, value in state.items() if name != _RANK}
    return list(map(_without_rank, state)) if type(state) in (list, tuple) else state
