"""Saves and restores sharded states: each rank writes and reads its state shard by `torch.distributed.checkpoint`.

Commits nothing. torch reads only the names that it is asked for, and ignores all others, so a restore first compares
names, shapes and dtypes with the checkpoint's metadata.
"""

import io
import pickle
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from torchobj.checkpoint.dcp.storage import StorageReader, StorageWriter
from torchobj.checkpoint.entries import Path, listed, wrapper_remedy
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
        tree = with_rank_states(_copy_containers(take_state(into, sharded=True).tree), metadata)
        _Checkpoint(metadata, source).match(into, tree)
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
        #: The keys that lead to an entry; strings, except for indices of lists.
        self._paths: dict[str, Path] = {name: paths.get(name) or tuple(name.split(".")) for name in self._described}

    def match(self, into: Mapping[Any, Any], tree: dict[Any, Any]) -> None:
        """Gives optimizers in `tree` the entries that the checkpoint has for them, and compares all entries.

        An optimizer without a state gets memory for the saved one.

        Args:
            into: The objects to restore.
            tree: Their state, with containers of its own.

        Raises:
            CheckpointError: Entries are missing or unknown, or differ in shape or dtype.
        """
        self._fit_optimizers(into, tree, ())
        try:
            existing = flatten_state_dict(tree)[0]
        except ValueError as error:
            raise CheckpointError(f"{self._source}: two entries of into have the same name: {error}") from error
        tops, given = {path[0] for path in self._paths.values()}, list(map(str, tree))
        for top in given:
            if top not in tops and any(name == top or name.startswith(f"{top}.") for name in existing):
                raise CheckpointError(f"{self._source}: has no {top}; it has {', '.join(sorted(map(str, tops)))}")
        missing = sorted(existing.keys() - self._described.keys())
        unknown = [name for name, path in self._paths.items() if path[0] in given and name not in existing]
        differences = [f"{name} is not in the checkpoint" for name in missing]
        differences += [f"{name} is only in the checkpoint" for name in unknown]
        direct = {id(tensor) for tensor in _direct_tensors(into)}
        for name, value in existing.items():
            if name in self._described:
                difference = _difference(value, self._described[name], is_direct=id(value) in direct)
                differences += [f"{name} is {difference}"] if difference else []
        if differences:
            remedy = wrapper_remedy(missing, unknown)
            raise CheckpointError(f"{self._source}: does not match: {listed(differences)}{remedy}")

    def _fit_optimizers(self, into: Mapping[Any, Any], tree: Any, outer: Path) -> None:
        for key, value in into.items():
            path = (*outer, str(key))
            if isinstance(value, torch.optim.Optimizer):
                existing = tree[key].get("state")
                if isinstance(existing, dict):
                    tree[key]["state"] = self._optimizer_state(value, existing, (*path, "state"))
            elif isinstance(value, Mapping) and not is_stateful(value):
                self._fit_optimizers(value, tree[key], path)

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


def _difference(value: Any, described: Any, *, is_direct: bool) -> str:
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
