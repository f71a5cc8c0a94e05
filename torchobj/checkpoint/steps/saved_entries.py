"""Compares the entries of a distributed checkpoint with the state of objects, and gives it what they are read into.

Reads no store: the entries are those of the metadata.
"""

import copy
import itertools
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchobj.checkpoint.archive.entries import flattened
from torchobj.checkpoint.matching import (
    UNREAD,
    Accepts,
    Differences,
    Pair,
    Part,
    Path,
    Skipped,
    TensorOutline,
    match,
    name_of,
)
from torchobj.checkpoint.state.parts import is_optimizer, paths_of_tensors
from torchobj.checkpoint.state.rank_states import PARTS, is_list_of_firsts, key_in, nested_names, own_parts, paths_of
from torchobj.checkpoint.steps.prefixes import wrapper_prefixes
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.ranks.meeting import Ranks
from torchobj.stateful import is_stateful

__all__ = ["SavedEntries", "adopts", "checked"]

#: Objects that do not accept a state of another structure.
_OWN_STRUCTURE = (torch.nn.Module, torch.optim.Optimizer)

#: Maximum number of elements of a list without an entry: empty mappings, which a distributed checkpoint does not have.
_MAX_EMPTY = 1 << 20


def adopts(outer: Any, value: Any) -> bool:
    """Returns whether a value in a mapping is an empty one, which gets all saved entries.

    The moments of an optimizer's state dict are not adopted: they would not be sharded as its parameters.
    """
    return isinstance(value, MutableMapping) and not value and not is_stateful(value) and not is_optimizer(outer)


def checked(found: list[Pair] | Differences, source: str) -> list[Pair]:
    """Returns the pairs of a tree and an outline that match.

    Raises:
        CheckpointError: They differ.
    """
    if isinstance(found, list):
        return found
    prefixes = wrapper_prefixes(found.missing, found.unknown)
    raise CheckpointError(f"{source}: {found}{f'; or restore with prefix_map={prefixes!r}' if prefixes else ''}")


class SavedEntries:
    """The entries of a distributed checkpoint, to be compared with the state of objects.

    Args:
        metadata: The checkpoint's metadata.
        source: The checkpoint, for errors.
    """

    def __init__(self, metadata: Metadata, source: str) -> None:
        self._metadata, self._source = metadata, source
        #: Size and dtype of tensors, by name.
        self._described = metadata.state_dict_metadata
        self._paths = paths_of(metadata)
        #: Whether the checkpoint has paths; otherwise indices of lists are strings.
        self._has_paths = bool(metadata.planner_data)

    def fit(self, into: Mapping[Any, Any], tree: dict[Any, Any]) -> dict[str, Any]:
        """Gives `tree` the entries that the checkpoint has for some values, and returns all entries by name.

        An optimizer without a state gets memory for the saved one. Values that are replaced, such as lists, get the
        structure of the saved ones.

        Args:
            into: The objects to restore.
            tree: Their state, with containers of its own.

        Raises:
            CheckpointError: An optimizer has fewer parameters, or two entries have the same name.
        """
        self._fit_optimizers(into, tree, ())
        if self._has_paths:
            self._fit_values(into, tree, nested_names(self._metadata, self._source))
        try:
            return flattened(tree)
        except ConfigError as error:
            raise CheckpointError(f"{self._source}: two entries of into have the same name: {error}") from error

    def whole(self, ranks: Ranks) -> dict[Any, Any]:
        """Returns what the whole state is read into; of states that ranks have parts of, that of this rank.

        Raises:
            CheckpointError: Such a state was saved by another number of ranks, or a tensor is too large.
        """
        nested = own_parts(nested_names(self._metadata, self._source), (), ranks, self._source)
        try:
            return self._replaced(nested, {}) if nested else {}
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{self._source}: its tensors do not fit into memory: {error}") from error

    def contained(self, entries: Mapping[str, Any]) -> Any:
        """Returns a bit for each entry of the checkpoint: whether it is one of these."""
        return numpy.packbits([name in entries for name in self._described])

    def match(
        self,
        into: Mapping[Any, Any],
        tree: dict[Any, Any],
        entries: Mapping[str, Any],
        of_all: Any,
        skipped: Skipped | None,
    ) -> None:
        """Compares the entries of this rank with those of the checkpoint.

        Args:
            into: The objects to restore.
            tree: Their state.
            entries: What `fit` returned.
            of_all: The bits of `contained` that any rank has.
            skipped: Gets the names of entries that are missing, and of those that no rank has; None if they may not be.

        Raises:
            CheckpointError: Entries are missing, or no rank has them, or they differ in shape or dtype.
        """
        on_any = dict(zip(self._described, numpy.unpackbits(of_all).tolist(), strict=False))
        tops, given = dict.fromkeys(path[0] for path in self._paths.values()), list(map(str, tree))
        # A value without an entry, such as an empty mapping, need not be there.
        held = [top for top in given if any(f"{name}.".startswith(f"{top}.") for name in entries)]
        found = [] if skipped is not None else match(Part(dict.fromkeys(held, Accepts())), tops)
        unknown = (name for name, path in self._paths.items() if path[0] in given and not on_any[name])
        names = {*entries, *(name for name in unknown if not is_list_of_firsts(self._paths[name]))}
        outline = {name: _outline(self._described[name]) for name in self._described if name in names}
        direct = {id(tensor) for tensor in _direct_tensors(dict(into))}
        if not isinstance(found, Differences):
            found = match({name: _to_read(value, direct) for name, value in entries.items()}, outline, skipped)
        checked(found, self._source)
        if skipped is not None:
            self._remove_missing(into, tree, ())

    def _remove_missing(self, into: Mapping[Any, Any], tree: Any, outer: Path) -> None:
        """Removes the states from `tree`, that of `into`, of which the checkpoint has no entry: none is then loaded."""
        for key in [key for key in into if key in tree]:
            value, path = into[key], (*outer, key)
            if isinstance(value, Mapping) and not is_stateful(value):
                self._remove_missing(value, tree[key], path)
            elif (names := _names_in(tree[key], path)) and not any(name in self._described for name in names):
                del tree[key]

    def _fit_optimizers(self, into: Mapping[Any, Any], tree: Any, outer: Path) -> None:
        for key, value in into.items():
            path, of_value = (*outer, str(key)), tree[key]
            if isinstance(of_value, dict) and of_value.keys() == {PARTS}:
                [(part, of_value)] = of_value[PARTS].items()
                path = (*path, PARTS, part)
            if isinstance(value, torch.optim.Optimizer):
                existing = of_value.get("state")
                if isinstance(existing, dict):
                    of_value["state"] = self._optimizer_state(value, existing, (*path, "state"))
            elif isinstance(value, Mapping) and not is_stateful(value):
                self._fit_optimizers(value, of_value, path)

    def _optimizer_state(
        self, optimizer: torch.optim.Optimizer, existing: dict[Any, Any], outer: Path
    ) -> dict[Any, Any]:
        """Returns an optimizer state with the entries of the checkpoint, in existing memory where there is any."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[Any, Any] = {}
        for name, path in self._paths.items():
            if path[: len(outer)] != outer:
                continue
            number, *inner = path[len(outer) :]
            if not (str(number).isdecimal() and len(inner) == 1):
                # Not the structure of torch's optimizers: the optimizer must have this state already.
                return existing
            if int(number) >= len(parameters):
                message = f"{name} belongs to an optimizer of more than {len(parameters)} parameters"
                raise CheckpointError(f"{self._source}: {message}")
            value = existing.get(int(number), {}).get(inner[0])
            if isinstance(self._described[name], TensorStorageMetadata) and not isinstance(value, torch.Tensor):
                value = self._new_tensor(name, parameters[int(number)])
            state.setdefault(int(number), {})[inner[0]] = value
        return state

    def _fit_values(self, into: Any, tree: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
        """Gives the values of `tree` that are neither mappings nor tensors the structure of the saved ones.

        Args:
            into: The mapping whose state `tree` is, or the object.
            tree: Its state.
            saved: Names of entries by their keys, nested, below the same path.
        """
        for key, value in tree.items():
            below, of_key = saved.get(str(key)), into.get(key) if isinstance(into, Mapping) else None
            if below is None or isinstance(value, torch.Tensor) or isinstance(of_key, _OWN_STRUCTURE):
                continue
            if not isinstance(value, Mapping) or (isinstance(below, dict) and adopts(tree, value)):
                tree[key] = self._replaced(below, value)
            elif isinstance(below, dict):
                self._fit_values(of_key, value, below)  # type: ignore[arg-type]  # a container of `tree`

    def _replaced(self, saved: Any, value: Any) -> Any:
        """Returns what the saved value is read into, in place of `value`: its tensors are used again where they fit.

        Args:
            saved: The name of the entry; for lists and mappings the names of their entries, nested.
            value: The value that is replaced.
        """
        if isinstance(saved, str):
            described = self._described[saved]
            if not isinstance(described, TensorStorageMetadata):
                return None
            # A tensor, or what is sharded as one.
            is_tensor = callable(getattr(value, "size", None))
            if is_tensor and not isinstance(match(_to_read(value, {id(value)}), _outline(described)), Differences):
                return value
            return torch.zeros(described.size, dtype=described.properties.dtype, device="cpu")
        if all(isinstance(key, int) for key in saved):
            values = value if isinstance(value, list) else []
            # An empty mapping in a list has no entry. torch does not restore those before others: `match` names them.
            if max(saved) >= len(self._described) + _MAX_EMPTY:
                raise CheckpointError(f"{self._source}: the metadata is damaged: a list has {max(saved) + 1} elements")
            indices = range(max(saved) + 1)
            by_index = dict(enumerate(values))
            made = [self._replaced(saved[at], by_index.get(at)) if at in saved else None for at in indices]
            return [*made, *itertools.takewhile(_is_empty, values[len(made) :])]
        if any(paths_of_tensors({(): value if isinstance(value, Mapping) else {}})):
            # Of a module, which may be one of several ranks' parts: it gets back its own entries.
            own = copy.copy(value)
            self._fit_values(None, own, saved)
            return own
        entries = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key in [key for key, each in entries.items() if str(key) not in saved and not _is_empty(each)]:
            del entries[key]
        for name, inner in saved.items():
            key = key_in(entries, name)
            entries[key] = self._replaced(inner, entries.get(key))
        return entries

    def _new_tensor(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Returns memory for a tensor of an optimizer's state, sharded as its parameter."""
        described: Any = self._described[name]
        size, dtype = described.size, described.properties.dtype
        if size == parameter.size():
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if isinstance(parameter, DTensor) and size.numel() > 1:
            message = f"{name} is {tuple(size)}, and its parameter {tuple(parameter.size())}: the sharding is not known"
            raise CheckpointError(f"{self._source}: {message}; run one optimizer step before the restore")
        return torch.zeros(size, dtype=dtype, device="cpu")


def _is_empty(value: Any) -> bool:
    """Whether a value has no entry in a distributed checkpoint: mappings without one, also in lists."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_empty, value))
    return isinstance(value, Mapping) and all(map(_is_empty, value.values()))


def _names_in(value: Any, path: Path) -> Collection[str]:
    """Returns the names of the entries of a value at a path of a distributed checkpoint."""
    return flattened({name_of(path): value}).keys()


def _outline(described: Any) -> Any:
    """Returns the outline of an entry of the metadata."""
    if isinstance(described, TensorStorageMetadata):
        return TensorOutline(described.properties.dtype, tuple(described.size), described.properties.layout)
    return UNREAD


def _to_read(value: Any, direct: Collection[int]) -> Any:
    """Returns what an entry of the checkpoint must match to be read into a value of an object's state.

    Args:
        value: The value.
        direct: The ids of tensors that belong to no object.
    """
    if isinstance(value, torch.Tensor):
        # Modules and optimizers cast other dtypes, but accept no other shape.
        return value if id(value) in direct else Accepts(tuple(value.shape))
    # What is sharded as a tensor may be no tensor itself.
    return Accepts() if callable(getattr(value, "size", None)) else value


def _direct_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that do not belong to objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping) and not is_stateful(value):
        return [tensor for inner in value.values() for tensor in _direct_tensors(inner)]
    return []
