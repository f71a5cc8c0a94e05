"""Restores objects from a file or from state shards: checks everything first, then reads tensors, and then copies.

Each rank reads its state shard by `torch.distributed.checkpoint`. torch reads only the names that it is asked for, and
ignores all others, so a restore first compares names, shapes and dtypes with the checkpoint's metadata.
"""

import copy
import functools
import io
import itertools
import logging
import pickle
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.tensor import DTensor
from torch.futures import Future

from torchobj.checkpoint.archive.entries import flattened
from torchobj.checkpoint.archive.load import load_counted
from torchobj.checkpoint.dcp.storage import StorageReader
from torchobj.checkpoint.matching import UNREAD, Accepts, Differences, Pair, Part, Path, TensorOutline, assign, match
from torchobj.checkpoint.state.parts import paths_of_tensors
from torchobj.checkpoint.state.rank_states import (
    PARTS,
    is_list_of_firsts,
    key_in,
    own_state,
    paths_of,
    with_rank_states,
)
from torchobj.checkpoint.state.staging import with_containers
from torchobj.checkpoint.state.taken import take_state
from torchobj.checkpoint.steps.commit import STATE_FILE
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError
from torchobj.ranks.meeting import Ranks
from torchobj.stateful import is_stateful
from torchobj.store.transfers import ByteProgress

__all__ = ["restore_file", "restore_shards"]

logger = logging.getLogger("torchobj")

#: Objects that do not accept a state of another structure.
_OWN_STRUCTURE = (torch.nn.Module, torch.optim.Optimizer)

_LOAD_MODULE = torch.nn.Module.load_state_dict


def restore_file(
    into: MutableMapping[str, Any],
    folder: str,
    config: StoreConfig | None,
    ranks: Ranks,
    source: str,
    *,
    weights_only: bool,
    counted: ByteProgress,
) -> None:
    """Restores a state from the file in a folder. Collective. Reads only the entries of `into`; `counted` counts bytes.

    Tensors and modules are read directly into their memory. The states of other objects, such as optimizers, which may
    not have a state yet, are read into new memory.

    Raises:
        CheckpointError: As for `_matched`, before anything is changed, and for `_fill`.
        ConfigError: A tensor of `into` is sharded among ranks.
        Exception: A rank could not read. Every error is raised on all ranks.
    """
    load = functools.partial(
        load_counted, folder + STATE_FILE, weights_only=weights_only, config=config, counted=counted
    )
    with ranks.meeting():
        taken = take_state(into, sharded=False)
        # Names that are not strings cannot be selected: then the whole file is loaded.
        has_names = all(isinstance(name, str) for name in into)
        in_place = {name: value for name, value in into.items() if has_names and _is_memory(value)}
        others = {name: value for name, value in into.items() if name not in in_place}
        loaded, pairs = _matching_entries(load, others, taken.tree, ranks, source)
        if in_place:
            memory: Any = {name: taken.tree[name] for name in in_place}
            try:
                load(map_location=None, keys=list(in_place), into=memory)
            except ConfigError as error:
                # A module casts values of another dtype, and ranks may have tensors of their own; other differences
                # are found now.
                logger.debug("%s: not read in place: %s", source, error)
                memory, more = _matching_entries(load, in_place, taken.tree, ranks, source)
                pairs += more
            loaded |= memory
        _fill(into, loaded, pairs, source)


def _matching_entries(
    load: Callable[..., Any], into: Mapping[Any, Any], existing: Mapping[Any, Any], ranks: Ranks, source: str
) -> tuple[Any, list[Pair]]:
    """Loads the entries of a file that objects are restored from, with their tensors on the CPU.

    Raises:
        CheckpointError: They do not match.
    """
    if not into:
        return {}, []
    names = sorted(into) if all(isinstance(name, str) for name in into) else None
    try:
        loaded = load(map_location="cpu", keys=names, into=None)
    except ConfigError:
        # Raises if one of them is missing.
        _matched(dict.fromkeys(into), load(map_location="meta", keys=None, into=None), source)
        raise
    if isinstance(loaded, dict):
        # Without entries that are not asked for, which may be of another number of ranks.
        loaded = {name: loaded[name] for name in into if name in loaded}
    loaded = own_state(loaded, ranks, source, existing)
    return loaded, _matched(into, loaded, source)


def _is_memory(value: Any) -> bool:
    """Returns whether a value consists of tensors that exist already."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    return isinstance(value, Mapping) and not is_stateful(value) and all(map(_is_memory, value.values()))


def _matched(into: Mapping[Any, Any], saved: Any, source: str) -> list[Pair]:
    """Returns the tensors of the objects to restore that belong to no object, with the saved ones.

    Args:
        into: A dict as passed to `CheckpointManager.restore`, or a part of it.
        saved: The saved state, which may have more entries at the top.
        source: The checkpoint, for errors.

    Raises:
        CheckpointError: The state does not match.
    """
    # The top is entered, as by a save, also if it is an object.
    found = match(Part(_to_fill(dict(into))), saved)
    if isinstance(found, Differences):
        raise CheckpointError(f"{source}: {found}")
    return found


def _to_fill(value: Any) -> Any:
    """Returns the tree that a saved state must match, so that `load_state_dict` of objects accepts it."""
    if isinstance(value, torch.nn.Module):
        # Its own method copies, and casts other dtypes; others may assign what is loaded.
        copies = type(value).load_state_dict is _LOAD_MODULE
        state = value.state_dict()
        tensors = {key: each for key, each in state.items() if isinstance(each, torch.Tensor)}
        accepted = {key: Accepts(tuple(each.shape), each if copies else None) for key, each in tensors.items()}
        return dict.fromkeys(state, Accepts()) | accepted
    if isinstance(value, torch.optim.Optimizer):
        groups = [[Accepts(memory=each) for each in group["params"]] for group in value.param_groups]
        return Part(param_groups=[Part(params=each) for each in groups])
    if isinstance(value, Mapping) and not is_stateful(value):
        return {key: _to_fill(inner) for key, inner in value.items()}
    return value if isinstance(value, torch.Tensor) else Accepts()


def _fill(into: MutableMapping[Any, Any], saved: Mapping[Any, Any], pairs: Sequence[Pair], source: str) -> None:
    """Restores objects from a saved state that matches.

    Tensors are copied into existing tensors, objects with `load_state_dict` load their state, mappings are entered, and
    other values are replaced.

    Raises:
        CheckpointError: The `load_state_dict` of an object fails.
    """
    with torch.no_grad():
        for pair in pairs:
            # The same tensor if it was read in place.
            if pair.target is not pair.source:
                pair.target.copy_(pair.source)
    assign(into, saved, source=source)


def restore_shards(
    into: MutableMapping[str, Any],
    folder: str,
    config: StoreConfig | None,
    ranks: Ranks,
    source: str,
    *,
    weights_only: bool,
    counted: ByteProgress,
) -> None:
    """Restores a state from a folder. Collective. `counted` counts the bytes of this rank.

    Names, shapes and dtypes are compared with the checkpoint's first, then values are read, and tensors last.

    Raises:
        CheckpointError: The state does not match, or `weights_only` refuses a value; no tensor was changed.
        Exception: A rank could not read.
    """
    reader = _Reader(folder, counted, config)
    with ranks.meeting() as meeting:
        metadata = reader.read_metadata()
        own_tree = take_state(into, sharded=True).tree
        # Only memory can differ.
        _matched(into, own_tree, source)
        # Copied, because `state_dict` may return containers that the object uses.
        existing = _copy_containers(own_tree)
        tree = with_rank_states(existing, metadata, ranks, source)
        checkpoint = _Checkpoint(metadata, source)
        entries = checkpoint.fit(into, tree)
        # A rank that has a part of the state does not have the entries of other parts.
        of_all = meeting.gather(checkpoint.contained(entries))
        if of_all is not None:
            meeting.result = numpy.bitwise_or.reduce(of_all)
    with ranks.meeting():
        checkpoint.match(into, tree, entries, meeting.result)
    _load_items(tree, reader, LoadItemType.BYTE_IO, ranks, source, weights_only=weights_only)
    with ranks.meeting():
        # Copied: tensors are read by the checkpoint's names, which `tree` has.
        own = own_state(_copy_containers(tree), ranks, source, existing)
        pairs = _matched(into, own, source)
    _load_items(tree, reader, LoadItemType.TENSOR, ranks, source, weights_only=weights_only)
    with ranks.meeting():
        _fill(into, own, pairs, source)


def _copy_containers(tree: Any) -> Any:
    return with_containers(tree, lambda value: value)


def _load_items(
    tree: dict[str, Any], reader: StorageReader, kind: LoadItemType, ranks: Ranks, source: str, *, weights_only: bool
) -> None:
    planner = _Planner(kind, source, weights_only=weights_only)
    try:
        with ranks.collective():
            load_shards(tree, storage_reader=reader, planner=planner, process_group=ranks.group)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, TorchobjError):
            raise
        raise CheckpointError(f"{source}: {error}") from error


class _Reader(StorageReader):
    """Reads the metadata once, and counts the bytes of several loads."""

    def __init__(self, folder: str, counted: ByteProgress, config: StoreConfig | None) -> None:
        super().__init__(folder, config=config)
        self._counted = counted
        self._known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the checkpoint."""
        if self._known is None:
            self._known = super().read_metadata(*args, **kwargs)
        return self._known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads the items of one kind."""
        return self._load(plan, planner)


class _Planner(DefaultLoadPlanner):
    """Reads items of one kind, tensors or values; of values only those that `weights_only` allows."""

    def __init__(self, kind: LoadItemType, source: str, *, weights_only: bool) -> None:
        super().__init__()
        self._kind, self._source, self._weights_only = kind, source, weights_only

    def create_local_plan(self) -> LoadPlan:
        """Returns the items of the kind."""
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if item.type is self._kind])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickles a value and puts it into the state.

        Raises:
            CheckpointError: The value is refused, or damaged.
        """
        name = read_item.dest_index.fqn
        torch_load: Any = torch.load
        try:
            loaded = torch_load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            hint = "; weights_only=False reads it and runs code that it names: use it for trusted checkpoints only"
            raise CheckpointError(f"{self._source}: {name}: {error}{hint if self._weights_only else ''}") from error
        *outer, last = self.mappings[name]
        inner: Any = self.original_state_dict
        for key in outer:
            inner = inner[key_in(inner, key)]
        inner[key_in(inner, last)] = loaded


class _Checkpoint:
    """The entries of a distributed checkpoint, to be compared with the state of objects.

    Args:
        metadata: The checkpoint's metadata.
        source: The checkpoint, for errors.
    """

    def __init__(self, metadata: Metadata, source: str) -> None:
        self._source = source
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
            self._fit_values(into, tree, self._nested())
        try:
            return flattened(tree)
        except ConfigError as error:
            raise CheckpointError(f"{self._source}: two entries of into have the same name: {error}") from error

    def contained(self, entries: Mapping[str, Any]) -> Any:
        """Returns a bit for each entry of the checkpoint: whether it is one of these."""
        return numpy.packbits([name in entries for name in self._described])

    def match(self, into: Mapping[Any, Any], tree: dict[Any, Any], entries: Mapping[str, Any], of_all: Any) -> None:
        """Compares the entries of this rank with those of the checkpoint.

        Args:
            into: The objects to restore.
            tree: Their state.
            entries: What `fit` returned.
            of_all: The bits of `contained` that any rank has.

        Raises:
            CheckpointError: Entries are missing, or no rank has them, or they differ in shape or dtype.
        """
        on_any = dict(zip(self._described, numpy.unpackbits(of_all).tolist(), strict=False))
        tops, given = dict.fromkeys(path[0] for path in self._paths.values()), list(map(str, tree))
        # A value without an entry, such as an empty mapping, need not be there.
        held = [top for top in given if any(f"{name}.".startswith(f"{top}.") for name in entries)]
        found = match(Part(dict.fromkeys(held, Accepts())), tops)
        unknown = (name for name, path in self._paths.items() if path[0] in given and not on_any[name])
        names = {*entries, *(name for name in unknown if not is_list_of_firsts(self._paths[name]))}
        outline = {name: _outline(self._described[name]) for name in self._described if name in names}
        direct = {id(tensor) for tensor in _direct_tensors(dict(into))}
        if not isinstance(found, Differences):
            found = match({name: _to_read(value, direct) for name, value in entries.items()}, outline)
        if isinstance(found, Differences):
            raise CheckpointError(f"{self._source}: {found}")

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

    def _nested(self) -> dict[Any, Any]:
        """Returns the names of the entries by their keys, nested."""
        nested: dict[Any, Any] = {}
        for name, (*outer, last) in self._paths.items():
            inner = nested
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = name
        return nested

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
            if not isinstance(value, Mapping):
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
