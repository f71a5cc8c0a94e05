"""Saves and restores sharded states: each rank writes and reads its state shard by `torch.distributed.checkpoint`.

Commits nothing. torch reads only the names that it is asked for, and ignores all others, so a restore first compares
names, shapes and dtypes with the checkpoint's metadata.
"""

import io
import pickle
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from torchobj.checkpoint.dcp.object_names import METADATA
from torchobj.checkpoint.dcp.reader import StorageReader
from torchobj.checkpoint.dcp.writer import StorageWriter
from torchobj.checkpoint.entries import listed, wrapper_remedy
from torchobj.checkpoint.ranks import Ranks, rank_gone
from torchobj.checkpoint.restoring import assign, check
from torchobj.checkpoint.staging import with_containers
from torchobj.checkpoint.state import own_state, take_state, with_rank_states
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, TorchobjError
from torchobj.stateful import is_stateful

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["restore_shards", "save_shards"]


def save_shards(
    tree: dict[Any, Any], folder: str, config: StoreConfig, group: "ProcessGroup | None"
) -> dict[str, int | None]:
    """Writes a state to a folder. Collective. The first rank that has a replicated entry writes it.

    Args:
        tree: The state; each rank has its shard.
        folder: URL of the folder, which contains nothing else.
        config: How its store is reached.
        group: The ranks, on the CPU; None for one rank.

    Returns:
        On the first rank the objects of all ranks, by name, with the CRC-32 of those that have one.

    Raises:
        Exception: The error of the first rank that failed.
        RankGoneError: Another rank does not respond.
    """
    # By default torch divides the entries of one object among ranks, which would mix replicas that differ.
    planner, writer = DefaultSavePlanner(dedup_save_to_lowest_rank=True), StorageWriter(folder, config=config)
    try:
        with rank_gone():
            save(tree, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _cause(error) from error
    return {**writer.checksums, METADATA: None}


def restore_shards(
    into: MutableMapping[str, Any], folder: str, config: StoreConfig, ranks: Ranks, source: str, *, weights_only: bool
) -> None:
    """Restores a state from a folder. Collective.

    Names, shapes and dtypes are compared with the checkpoint's first, then values are read, and tensors last.

    Raises:
        CheckpointError: The state does not match, or `weights_only` refuses a value; no tensor was changed.
        Exception: A rank could not read.
    """
    reader = _Reader(folder, config=config)

    with ranks.together():
        metadata = reader.read_metadata()
        # Copied, because `state_dict` may return containers that the object uses.
        tree = with_rank_states(_copy_containers(take_state(into).tree), metadata)
        _match(into, tree, metadata, source)
    _load(tree, reader, LoadItemType.BYTE_IO, ranks, source, weights_only=weights_only)
    with ranks.together():
        # Copied: tensors are read by the checkpoint's names, which `tree` has.
        own = own_state(_copy_containers(tree), ranks, source)
        check(into, own, source)
    _load(tree, reader, LoadItemType.TENSOR, ranks, source, weights_only=weights_only)
    with ranks.together():
        assign(into, own, source)


def _copy_containers(tree: Any) -> Any:
    return with_containers(tree, lambda value: value)


def _load(
    tree: dict[str, Any], reader: StorageReader, kind: LoadItemType, ranks: Ranks, source: str, *, weights_only: bool
) -> None:
    planner = _Planner(kind, source, weights_only=weights_only)
    try:
        with rank_gone():
            load(tree, storage_reader=reader, planner=planner, process_group=ranks.group)
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, RuntimeError | ValueError) and not isinstance(cause, TorchobjError):
            raise CheckpointError(f"{source}: {cause}") from error
        raise cause from error


class _Reader(StorageReader):
    """Reads the metadata once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the checkpoint."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


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


def _cause(error: CheckpointException) -> BaseException:
    """Returns the error of the first rank that failed; torch's own is not an Exception."""
    return next((cause for cause, _ in error.failures.values()), error)


class _Checkpoint(NamedTuple):
    """The entries of a distributed checkpoint."""

    described: dict[str, Any]
    """Size and dtype of tensors, by name."""
    paths: dict[str, tuple[Any, ...]]
    """The keys that lead to an entry; strings, except for indices of lists."""
    source: str


def _match(into: Mapping[str, Any], tree: dict[str, Any], metadata: Metadata, source: str) -> None:
    """Gives optimizers in `tree` the entries that the checkpoint has for them, and compares all entries.

    An optimizer without a state gets memory for the saved one.

    Args:
        into: The objects to restore.
        tree: Their state, with containers of its own.
        metadata: The checkpoint's metadata.
        source: The checkpoint, for errors.

    Raises:
        CheckpointError: Entries are missing or unknown, or differ in shape or dtype.
    """
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    described = metadata.state_dict_metadata
    there = _Checkpoint(described, {name: paths.get(name) or tuple(name.split(".")) for name in described}, source)
    tops = {path[0] for path in there.paths.values()}
    _match_objects(into, tree, (), there)
    try:
        here = flatten_state_dict(tree)[0]
    except ValueError as error:
        raise CheckpointError(f"{source}: two entries of into have the same name: {error}") from error
    for name in tree:
        if str(name) not in tops and any(key == name or key.startswith(f"{name}.") for key in here):
            raise CheckpointError(f"{source}: has no {name}; it has {', '.join(sorted(map(str, tops)))}")
    given = set(map(str, tree))
    direct = {id(tensor) for tensor in _direct_tensors(into)}
    missing = sorted(here.keys() - described.keys())
    unknown = [name for name, path in there.paths.items() if path[0] in given and name not in here]
    differences = [f"{name} is not in the checkpoint" for name in missing]
    differences += [f"{name} is only in the checkpoint" for name in unknown]
    compared = (_difference(name, value, described[name], direct) for name, value in here.items() if name in described)
    differences += [difference for difference in compared if difference is not None]
    if differences:
        raise CheckpointError(f"{source}: does not match: {listed(differences)}{wrapper_remedy(missing, unknown)}")


def _difference(name: str, value: Any, described: Any, direct: set[int]) -> str | None:
    if not isinstance(described, TensorStorageMetadata):
        # A tensor of an object's state may have been another value in the saving process.
        return f"{name} is not a tensor there, and a tensor here" if id(value) in direct else None
    if not isinstance(value, torch.Tensor):
        size = getattr(value, "size", None)
        return None if callable(size) else f"{name} is a tensor there, and a {type(value).__name__} here"
    there, here = (described.size, described.properties.dtype), (value.size(), value.dtype)
    # Modules and optimizers cast other dtypes, but accept no other shape.
    if there[0] == here[0] and (there[1] == here[1] or id(value) not in direct):
        return None
    there_is, here_is = (f"{tuple(size)} {dtype}" for size, dtype in (there, here))
    return f"{name} is {there_is} there, and {here_is} here"


def _direct_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that do not belong to objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping) and not is_stateful(value):
        return [tensor for inner in value.values() for tensor in _direct_tensors(inner)]
    return []


def _match_objects(into: Mapping[Any, Any], tree: Any, outer: tuple[str, ...], there: _Checkpoint) -> None:
    for key, value in into.items():
        path = (*outer, str(key))
        if isinstance(value, torch.optim.Optimizer):
            state = tree[key].get("state")
            if isinstance(state, dict):
                tree[key]["state"] = _optimizer_state(value, state, path, there)
        elif isinstance(value, Mapping) and not is_stateful(value):
            _match_objects(value, tree[key], path, there)


def _optimizer_state(
    optimizer: torch.optim.Optimizer, existing: dict[Any, Any], path: tuple[str, ...], there: _Checkpoint
) -> dict[Any, Any]:
    """Returns an optimizer state with the entries of the checkpoint, in existing memory where there is any."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    depth = len(path) + 1
    state: dict[Any, Any] = {}
    for name, where in there.paths.items():
        if where[:depth] != (*path, "state"):
            continue
        number, *inner = where[depth:]
        if not (str(number).isdecimal() and len(inner) == 1):
            # Not the structure of torch's optimizers: the optimizer must have this state already.
            return existing
        if int(number) >= len(parameters):
            message = f"{name} belongs to an optimizer of more than {len(parameters)} parameters"
            raise CheckpointError(f"{there.source}: {message}")
        old = existing.get(int(number), {}).get(inner[0])
        is_new = isinstance(there.described[name], TensorStorageMetadata) and not isinstance(old, torch.Tensor)
        value = _new_tensor(name, parameters[int(number)], there) if is_new else old
        state.setdefault(int(number), {})[inner[0]] = value
    return state


def _new_tensor(name: str, parameter: torch.Tensor, there: _Checkpoint) -> torch.Tensor:
    """Returns memory for a tensor of an optimizer's state, sharded as its parameter."""
    described = there.described[name]
    size, dtype = described.size, described.properties.dtype
    if size == parameter.size():
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and size.numel() > 1:
        message = f"{name} is {tuple(size)}, and its parameter {tuple(parameter.size())}: the sharding is not known"
        raise CheckpointError(f"{there.source}: {message}; run one optimizer step before the restore")
    return torch.zeros(size, dtype=dtype, device="cpu")
