"""Renames the entries of a saved state by prefixes: the state of a wrapped module fits a plain one, and vice versa.

A name is a key of a dict. Reads and writes no store.
"""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from torchobj.checkpoint.matching import WRAPPERS, Path, name_of, unwrapped
from torchobj.checkpoint.state.parts import PARAM_GROUPS
from torchobj.checkpoint.state.rank_states import nested_names
from torchobj.exceptions import CheckpointError, ConfigError

__all__ = ["PrefixMap", "wrapper_prefixes"]


class PrefixMap:
    """Prefixes of saved names, with what replaces them.

    A prefix is replaced at the start of a name; one that is replaced by "" is removed wherever a part of a name starts
    with it. The prefix "" is that of the names in a dict of tensors, and of the parameters of optimizers. Of several
    prefixes the longest applies.

    Args:
        prefixes: The prefixes; None for none.

    Raises:
        ConfigError: It is not a dict of strings.

    Example:
        >>> prefixes = PrefixMap({"_orig_mod.": "", "module.": "", "old.": "new."})
        >>> [prefixes.name(name, of_tensor=True) for name in ("module.a", "blocks.0._orig_mod.a", "old.old.a")]
        ['a', 'blocks.0.a', 'new.old.a']
        >>> PrefixMap({"": "module."}).name("a", of_tensor=True)
        'module.a'
    """

    def __init__(self, prefixes: Mapping[str, str] | None) -> None:
        given = {} if prefixes is None else prefixes
        if not isinstance(given, Mapping) or not all(type(each) is str for pair in given.items() for each in pair):
            raise ConfigError(f"prefix_map={prefixes!r}: must be a dict of strings, such as {{'module.': ''}}")
        self._prefixes = dict(sorted(given.items(), key=lambda pair: -len(pair[0])))

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def __repr__(self) -> str:
        return repr(self._prefixes)

    def name(self, name: str, *, of_tensor: bool) -> str:
        """Returns the new name for a saved one; `of_tensor` tells whether the prefix "" applies."""
        renamed, is_start, rest, dot = "", True, name, "."
        while dot:
            found = (each for each in self._prefixes.items() if rest.startswith(each[0]))
            allowed = (each for each in found if (each[0] and not each[1]) or (is_start and (each[0] or of_tensor)))
            if (pair := next(allowed, None)) is None:
                part, dot, rest = rest.partition(".")
                renamed, is_start = f"{renamed}{part}{dot}", False
            else:
                prefix, new = pair
                renamed, rest, is_start = renamed + new, rest[len(prefix) :], is_start and bool(prefix) and not new
        return renamed

    def tops(self, tree: Mapping[Any, Any]) -> dict[Any, Any]:
        """Returns the new names of the entries at the top of a saved state, by their names."""
        return {name: self.name(name, of_tensor=False) if isinstance(name, str) else name for name in tree}

    def state(self, tree: Any, source: str, tensors: Collection[str] = ()) -> Any:
        """Returns a saved state with other names. Its dicts are copied, and may contain themselves.

        Args:
            tree: The state.
            source: The checkpoint, for errors.
            tensors: Names of tensors, if the state has names in place of them.

        Raises:
            CheckpointError: Two entries of a dict get the same name.
        """
        if not self or type(tree) is not dict:
            return tree
        root: dict[Any, Any] = {}
        made = {id(tree): root}
        # A stack, not recursion: a file may nest dicts at will. Whether the prefix "" applies to a dict, and to those
        # in it; None if it applies to dicts of tensors.
        stack: list[tuple[Any, Any, Path, bool | None, bool | None]] = [(tree, root, (), False, None)]
        while stack:
            old, new, path, of_tensor, of_inner = stack.pop()
            if of_tensor is None:
                of_tensor = bool(old) and all(_is_tensor(each, tensors) for each in old.values())
            names: dict[Any, Any] = {}
            for key, value in old.items():
                # The numbers of an optimizer's parameters are strings in metadata.
                is_name = isinstance(key, str) and not (of_inner is False and key.isdecimal())
                name = self.name(key, of_tensor=of_tensor) if is_name else key
                if names.setdefault(name, key) != key:
                    both = " and ".join(repr(name_of((*path, each))) for each in (names[name], key))
                    raise CheckpointError(f"{source}: prefix_map={self!r}: {both} get the name {name!r}")
                new[name] = value
                if type(value) in (dict, OrderedDict):
                    if id(value) not in made:
                        made[id(value)] = type(value)()
                        # The dicts of an optimizer's state have the moments of one parameter each.
                        is_moments = key == "state" and PARAM_GROUPS in old
                        below = (True, False) if is_moments else (of_inner, None)
                        stack.append((value, made[id(value)], (*path, key), *below))
                    new[name] = made[id(value)]
                elif key == PARAM_GROUPS:
                    new[name] = self.groups(value)
            # The versions of a module's parts, by their names.
            if isinstance(versions := getattr(old, "_metadata", None), dict):
                new._metadata = OrderedDict(
                    (self.name(f"{name}." if name else "", of_tensor=True).removesuffix("."), version)
                    for name, version in versions.items()
                )
        return root

    def groups(self, value: Any, depth: int = 4) -> Any:
        """Returns groups of an optimizer's parameters with other names of these.

        Args:
            value: A list of names, a list of groups, which have such lists, or the lists of groups of several ranks.
            depth: How deep to look for names.
        """
        if type(value) is dict and depth:
            return {key: self.groups(inner, depth - 1) for key, inner in value.items()}
        if type(value) not in (list, tuple) or not depth:
            return value
        return type(value)(
            self.name(each, of_tensor=True) if isinstance(each, str) else self.groups(each, depth - 1) for each in value
        )

    def metadata(self, metadata: Metadata, source: str) -> Metadata:
        """Returns the metadata of a distributed checkpoint as if it were saved with other names.

        Raises:
            CheckpointError: Two entries get the same name.
        """
        if not self or not isinstance(metadata.storage_data, dict):
            return metadata
        described = metadata.state_dict_metadata
        tensors = {name for name, what in described.items() if isinstance(what, TensorStorageMetadata)}
        paths = dict(_leaves(self.state(nested_names(metadata, source), source, tensors), ()))
        names = {name: name_of(path) for name, path in paths.items()}
        olds = {new: name for name, new in names.items()}
        if len(olds) < len(names):
            name = next(name for name, new in names.items() if olds[new] != name)
            both = f"{name!r} and {olds[names[name]]!r}"
            raise CheckpointError(f"{source}: prefix_map={self!r}: {both} get the name {names[name]!r}")
        return replace(
            metadata,
            state_dict_metadata={names[name]: what for name, what in described.items()},
            planner_data=metadata.planner_data and {names[name]: path for name, path in paths.items()},
            storage_data={
                MetadataIndex(names.get(index.fqn, index.fqn), index.offset, index.index): info
                for index, info in metadata.storage_data.items()
                if isinstance(index, MetadataIndex)
            },
        )


def _is_tensor(value: Any, tensors: Collection[str]) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, str) and value in tensors)


def _leaves(nested: Mapping[Any, Any], path: Path) -> Iterator[tuple[str, Path]]:
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield value, (*path, key)


def wrapper_prefixes(missing: Sequence[str], unknown: Sequence[str]) -> PrefixMap:
    """Returns the prefixes by which names match that differ because one of two modules is wrapped; none if they do not.

    Args:
        missing: Names that only the objects to restore have.
        unknown: Names that only the checkpoint has.

    Example:
        >>> wrapper_prefixes(["net.module.a"], ["net._orig_mod.a"])
        {'_orig_mod.': '', '': 'module.'}
    """
    here, there = ({unwrapped(name): name.split(".") for name in names} for names in (missing, unknown))
    both = here.keys() & there.keys()
    if not both:
        return PrefixMap(None)
    parts = {part for name in both for part in there[name]} & WRAPPERS.keys()
    others = parts - {part for name in both for part in here[name]}
    # What wraps the whole module here.
    outer = itertools.takewhile(WRAPPERS.__contains__, here[min(both)][1:])
    for removed, added in ((others, ""), (parts, ""), (parts, "".join(f"{part}." for part in outer))):
        found = PrefixMap({f"{part}.": "" for part in sorted(removed)} | ({"": added} if added else {}))
        if found and all(_below(there[name], found) == here[name] for name in both):
            return found
    return PrefixMap(None)


def _below(parts: list[str], prefixes: PrefixMap) -> list[str]:
    return [parts[0], *prefixes.name(".".join(parts[1:]), of_tensor=True).split(".")]
