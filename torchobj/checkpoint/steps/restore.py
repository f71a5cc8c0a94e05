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

from torchobj.checkpoint.archive.entries import Path, flattened, listed, name_of, unfillable, wrapper_remedy
from torchobj.checkpoint.archive.load import load_counted
from torchobj.checkpoint.dcp.storage import StorageReader
from torchobj.checkpoint.state.parts import paths_of_tensors
from torchobj.checkpoint.state.rank_states import PARTS, is_list_of_firsts, own_state, with_rank_states
from torchobj.checkpoint.state.ranks import Ranks
from torchobj.checkpoint.state.staging import with_containers
from torchobj.checkpoint.state.taken import take_state
from torchobj.checkpoint.steps.commit import STATE_FILE
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError
from torchobj.stateful import is_stateful
from torchobj.store.transfers import ByteProgress

__all__ = ["restore_file", "restore_shards"]

logger = logging.getLogger("torchobj")

#: Objects that do not accept a state of another structure.
_OWN_STRUCTURE = (torch.nn.Module, torch.optim.Optimizer)

_LOAD_MODULE = torch.nn.Module.load_state_dict
_TO_EMPTY = "; to_empty() of its module gives it memory"


def restore_file(
    into: MutableMapping[str, Any],
    folder: str,
    config: StoreConfig | None,
    ranks: Ranks,
    source: str,
    *,
    weights_only: bool,
    counted: ByteProgress | None = None,
) -> None:
    """Restores a state from the file in a folder. Collective. Reads only the entries of `into`; `counted` counts bytes.

    Tensors and modules are read directly into their memory. The states of other objects, such as optimizers, which may
    not have a state yet, are read into new memory.

    Raises:
        CheckpointError: As for `_check`, before anything is changed, and for `_assign`.
        ConfigError: A tensor of `into` is sharded among ranks.
        Exception: A rank could not read. Every error is raised on all ranks.
    """
    load = functools.partial(
        load_counted, folder + STATE_FILE, weights_only=weights_only, config=config, counted=counted
    )
    with ranks.together():
        taken = take_state(into, sharded=False)
        # Names that are not strings cannot be selected: then the whole file is loaded.
        has_names = all(isinstance(name, str) for name in into)
        in_place = {name: value for name, value in into.items() if has_names and _is_memory(value)}
        others = {name: value for name, value in into.items() if name not in in_place}
        loaded: Any = {}
        if others:
            names = others.keys() if has_names else None
            loaded = _load_entries(load, names, source=source)
            if isinstance(loaded, dict):
                # Without entries that are not asked for, which may be of another number of ranks.
                loaded = {name: loaded[name] for name in others if name in loaded}
            loaded = own_state(loaded, ranks, source, taken.tree)
            _check(others, loaded, source)
        if in_place:
            memory: Any = {name: taken.tree[name] for name in in_place}
            try:
                load(map_location=None, keys=list(in_place), into=memory)
            except ConfigError as error:
                # A module casts values of another dtype, and ranks may have tensors of their own; `_check` reports
                # other differences.
                logger.debug("%s: not read in place: %s", source, error)
                memory = _load_entries(load, in_place, source=source)
                memory = own_state(memory, ranks, source, taken.tree)
                _check(in_place, memory, source)
            loaded |= memory
        _assign(into, loaded, source)


def _load_entries(load: Callable[..., Any], names: Collection[str] | None, *, source: str) -> Any:
    """Loads entries of a file, or all of them.

    Raises:
        CheckpointError: The file does not have all of them.
    """
    if names is None:
        return load(map_location="cpu", keys=None, into=None)
    try:
        return load(map_location="cpu", keys=sorted(names), into=None)
    except ConfigError:
        saved = load(map_location="meta", keys=None, into=None)
        missing = sorted(name for name in names if name not in saved)
        if not missing:
            raise
        raise CheckpointError(f"{source}: has no {', '.join(missing)}; it has {', '.join(map(str, saved))}") from None


def _is_memory(value: Any) -> bool:
    """Returns whether a value consists of tensors that exist already."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    return isinstance(value, Mapping) and not is_stateful(value) and all(map(_is_memory, value.values()))


def _check(into: Mapping[Any, Any], saved: Any, source: str) -> None:
    """Checks that a saved state fits the objects to restore.

    Entries that `into` does not have are ignored at the top, but not in nested mappings.

    Args:
        into: A dict as passed to `CheckpointManager.restore`, or a part of it.
        saved: The saved state.
        source: The checkpoint, for errors.

    Raises:
        CheckpointError: A value is missing, unknown, or differs in shape or dtype.
    """
    try:
        _check_entries(into, saved, ())
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _check_entries(into: Mapping[Any, Any], saved: Any, path: Path) -> None:
    if not isinstance(saved, Mapping):
        raise _difference(name_of(path) or "the state", saved, "dict")
    for key, value in into.items():
        name = name_of((*path, key))
        if key not in saved:
            remedy = wrapper_remedy(into.keys() - saved.keys(), saved.keys() - into.keys())
            raise CheckpointError(f"has no {name}; it has {', '.join(map(str, saved)) or 'nothing'}{remedy}")
        if isinstance(value, torch.Tensor):
            _check_tensor(value, saved[key], name)
        elif isinstance(value, torch.nn.Module):
            _check_module(value, saved[key], name)
        elif isinstance(value, torch.optim.Optimizer):
            _check_optimizer(value, saved[key], name)
        elif isinstance(value, Mapping) and not is_stateful(value):
            _check_entries(value, saved[key], (*path, key))
    if path and (unknown := [name_of((*path, key)) for key in saved if key not in into]):
        raise CheckpointError(f"has {listed(unknown)}, which into does not have")


def _difference(name: str, saved: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"{name} is a {type(saved).__name__} there, and a {expected} here")


def _check_tensor(tensor: torch.Tensor, saved: Any, name: str) -> None:
    if not isinstance(saved, torch.Tensor):
        raise _difference(name, saved, "tensor")
    if (tensor.shape, tensor.dtype) != (saved.shape, saved.dtype):
        saved_is, tensor_is = (f"{tuple(each.shape)} {each.dtype}" for each in (saved, tensor))
        raise CheckpointError(f"{name} is {saved_is} there, and {tensor_is} here")
    if not saved.is_meta and (reason := unfillable(tensor)):
        raise CheckpointError(f"{name}: {reason}{_TO_EMPTY if tensor.is_meta else ''}")


def _check_module(module: torch.nn.Module, saved: Any, name: str) -> None:
    own = module.state_dict()
    if not isinstance(saved, Mapping):
        raise _difference(name, saved, "module")
    missing, unknown = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if missing or unknown:
        remedy = wrapper_remedy(missing, unknown)
        raise CheckpointError(f"{name} is of another module: missing {missing}, unknown {unknown}{remedy}")
    for key, tensor in own.items():
        # A module casts other dtypes, but accepts no other shape.
        if isinstance(tensor, torch.Tensor) and getattr(saved[key], "shape", None) != tensor.shape:
            shape = tuple(getattr(saved[key], "shape", ()))
            raise CheckpointError(f"{name}.{key} is {shape} there, and {tuple(tensor.shape)} here")
    if not any(isinstance(value, torch.Tensor) and value.is_meta for value in saved.values()):
        _check_memory(module, name)


def _check_memory(value: Any, name: str) -> None:
    """Checks that no tensor is on meta, into which torch copies nothing, without an error.

    Raises:
        CheckpointError: One is.
    """
    tensors: dict[str, Any] = {}
    if isinstance(value, torch.Tensor):
        tensors[name] = value
    elif isinstance(value, torch.optim.Optimizer):
        tensors = {f"a parameter of {name}": each for group in value.param_groups for each in group["params"]}
    elif isinstance(value, torch.nn.Module) and type(value).load_state_dict is _LOAD_MODULE:
        # Others may assign what is loaded.
        tensors = {f"{name}.{key}": each for key, each in value.state_dict().items()}
    elif isinstance(value, Mapping) and not is_stateful(value):
        for key, inner in value.items():
            _check_memory(inner, f"{name}.{key}" if name else str(key))
    for key, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise CheckpointError(f"{key}: {unfillable(tensor)}{_TO_EMPTY}")


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: Any, name: str) -> None:
    """Checks what `load_state_dict` of torch's optimizers checks."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list):
        raise _difference(name, saved, "optimizer")
    saved_counts, counts = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if saved_counts != counts:
        raise CheckpointError(f"{name} has groups of {saved_counts} parameters there, and of {counts} here")
    _check_memory(optimizer, name)


def _assign(into: MutableMapping[Any, Any], saved: Mapping[Any, Any], source: str, path: Path = ()) -> None:
    """Restores objects from a saved state that `_check` has checked.

    Tensors are copied into existing tensors, objects with `load_state_dict` load their state, mappings are entered, and
    other values are replaced.

    Raises:
        CheckpointError: The `load_state_dict` of an object fails.
    """
    for key, value in list(into.items()):
        if key not in saved:
            continue
        if isinstance(value, torch.Tensor):
            # The same tensor if it was read in place.
            if value is not saved[key]:
                with torch.no_grad():
                    value.copy_(saved[key])
        elif is_stateful(value):
            try:
                value.load_state_dict(saved[key])
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                message = f"{name_of((*path, key))}: {type(value).__name__} refuses its state"
                raise CheckpointError(f"{source}: {message}; earlier entries are restored: {error}") from error
        elif isinstance(value, Mapping):
            _assign(value, saved[key], source, (*path, key))  # type: ignore[arg-type]
        else:
            into[key] = saved[key]


def restore_shards(
    into: MutableMapping[str, Any],
    folder: str,
    config: StoreConfig | None,
    ranks: Ranks,
    source: str,
    *,
    weights_only: bool,
    counted: ByteProgress | None = None,
) -> None:
    """Restores a state from a folder. Collective. `counted` counts the bytes of this rank.

    Names, shapes and dtypes are compared with the checkpoint's first, then values are read, and tensors last.

    Raises:
        CheckpointError: The state does not match, or `weights_only` refuses a value; no tensor was changed.
        Exception: A rank could not read.
    """
    reader = _Reader(folder, config=config)
    reader.counted = counted

    with ranks.together():
        metadata = reader.read_metadata()
        try:
            _check_memory(into, "")
        except CheckpointError as error:
            raise CheckpointError(f"{source}: {error}") from None
        # Copied, because `state_dict` may return containers that the object uses.
        existing = _copy_containers(take_state(into, sharded=True).tree)
        tree = with_rank_states(existing, metadata, ranks, source)
        checkpoint = _Checkpoint(metadata, source)
        entries = checkpoint.fit(into, tree)
    # A rank that has a part of the state does not have the entries of other parts.
    of_all = ranks.gather(checkpoint.contained(entries))
    with ranks.together():
        checkpoint.match(into, tree, entries, of_all)
    _load_items(tree, reader, LoadItemType.BYTE_IO, ranks, source, weights_only=weights_only)
    with ranks.together():
        # Copied: tensors are read by the checkpoint's names, which `tree` has.
        own = own_state(_copy_containers(tree), ranks, source, existing)
        _check(into, own, source)
    _load_items(tree, reader, LoadItemType.TENSOR, ranks, source, weights_only=weights_only)
    with ranks.together():
        _assign(into, own, source)


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

    _metadata: Metadata | None = None
    counted: ByteProgress | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the checkpoint."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads the items of one kind."""
        return self._load(plan, planner, self.counted)


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
            inner = inner[_actual_key(inner, key)]
        inner[_actual_key(inner, last)] = loaded


def _actual_key(container: Any, key: Any) -> Any:
    """Returns the key of a mapping for a name of torch, which converts keys to strings."""
    if isinstance(container, Mapping) and key not in container:
        return next((found for found in container if str(found) == key), key)
    return key


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
        paths = metadata.planner_data or {}
        #: Whether the checkpoint has them; otherwise indices of lists are strings.
        self._has_paths = bool(paths)
        #: The keys that lead to an entry; strings, except for indices of lists.
        self._paths: dict[str, Path] = {name: paths.get(name) or tuple(name.split(".")) for name in self._described}

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

    def contained(self, entries: Mapping[str, Any]) -> bytes:
        """Returns a bit for each entry of the checkpoint: whether it is one of these."""
        return numpy.packbits([name in entries for name in self._described]).tobytes()

    def match(
        self, into: Mapping[Any, Any], tree: dict[Any, Any], entries: Mapping[str, Any], of_all: Sequence[bytes]
    ) -> None:
        """Compares the entries of this rank with those of the checkpoint.

        Args:
            into: The objects to restore.
            tree: Their state.
            entries: What `fit` returned.
            of_all: What `contained` returned on each rank.

        Raises:
            CheckpointError: Entries are missing, or no rank has them, or they differ in shape or dtype.
        """
        bits = numpy.bitwise_or.reduce([numpy.frombuffer(bits, numpy.uint8) for bits in of_all])
        on_any = dict(zip(self._described, numpy.unpackbits(bits).tolist(), strict=False))
        tops, given = {path[0] for path in self._paths.values()}, list(map(str, tree))
        for top in given:
            if top not in tops and any(name == top or name.startswith(f"{top}.") for name in entries):
                raise CheckpointError(f"{self._source}: has no {top}; it has {', '.join(sorted(map(str, tops)))}")
        missing = sorted(entries.keys() - self._described.keys())
        unknown = [name for name, path in self._paths.items() if path[0] in given and not on_any[name]]
        unknown = [name for name in unknown if not is_list_of_firsts(self._paths[name])]
        differences = [f"{name} is not in the checkpoint" for name in missing]
        differences += [f"{name} is only in the checkpoint" for name in unknown]
        direct = {id(tensor) for tensor in _direct_tensors(into)}
        for name, value in entries.items():
            if name in self._described:
                difference = _item_difference(value, self._described[name], is_direct=id(value) in direct)
                differences += [f"{name} is {difference}"] if difference else []
        if differences:
            remedy = wrapper_remedy(missing, unknown)
            raise CheckpointError(f"{self._source}: does not match: {listed(differences)}{remedy}")

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
            if callable(getattr(value, "size", None)) and not _item_difference(value, described, is_direct=True):
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
            key = _actual_key(entries, name)
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


def _item_difference(value: Any, described: Any, *, is_direct: bool) -> str:
    """Returns how a value differs from its entry in the checkpoint; empty if it can be restored.

    Args:
        value: The value of an object's state, or of a tensor that belongs to no object.
        described: The entry.
        is_direct: Whether it is such a tensor.
    """
    if not isinstance(described, TensorStorageMetadata):
        # A tensor of an object's state may have been another value in the saving process.
        return "not a tensor there, and a tensor here" if is_direct else ""
    if not isinstance(value, torch.Tensor):
        return "" if callable(getattr(value, "size", None)) else f"a tensor there, and a {type(value).__name__} here"
    saved, own = (described.size, described.properties.dtype), (value.size(), value.dtype)
    # Modules and optimizers cast other dtypes, but accept no other shape.
    if saved[0] == own[0] and (saved[1] == own[1] or not is_direct):
        return ""
    return f"{tuple(saved[0])} {saved[1]} there, and {tuple(own[0])} {own[1]} here"


def _direct_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that do not belong to objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping) and not is_stateful(value):
        return [tensor for inner in value.values() for tensor in _direct_tensors(inner)]
    return []
