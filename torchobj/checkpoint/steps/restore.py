"""Restores objects from a file or from state shards: checks everything first, then reads tensors, and then copies.

Without objects, the state itself is read, with states in their place and whole tensors.

Each rank reads its state shard by `torch.distributed.checkpoint`. torch reads only the names that it is asked for, and
ignores all others, so a restore first compares names, shapes and dtypes with the checkpoint's metadata.
"""

import io
import logging
import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.futures import Future

from torchobj.checkpoint.archive.load import load_counted
from torchobj.checkpoint.dcp.object_names import METADATA
from torchobj.checkpoint.dcp.storage import StorageReader
from torchobj.checkpoint.matching import Accepts, Pair, Part, Skipped, assign, match
from torchobj.checkpoint.state.parts import PARAM_GROUPS, is_optimizer
from torchobj.checkpoint.state.rank_states import key_in, own_state, with_rank_states
from torchobj.checkpoint.state.staging import with_containers
from torchobj.checkpoint.state.taken import take_state
from torchobj.checkpoint.steps.commit import STATE_FILE
from torchobj.checkpoint.steps.local import LocalFiles
from torchobj.checkpoint.steps.prefixes import PrefixMap, wrapper_prefixes
from torchobj.checkpoint.steps.saved_entries import SavedEntries, adopts, checked
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, TorchobjError
from torchobj.ranks.meeting import Ranks
from torchobj.ranks.shared_read.reads import Peers, read_with
from torchobj.stateful import is_stateful
from torchobj.store.transfers import ByteProgress

__all__ = ["SavedState", "read_file", "read_shards", "restore_file", "restore_shards"]

logger = logging.getLogger("torchobj")

_LOAD_MODULE = torch.nn.Module.load_state_dict


class SavedState(NamedTuple):
    """A committed state, and how it is restored. The functions that read it are collective."""

    folder: str
    """URL of the folder of its data, with the slash."""
    config: StoreConfig | None
    local: LocalFiles
    """Files of it that are on the local disk too, and are read there."""
    ranks: Ranks
    source: str
    """The checkpoint, for errors."""
    weights_only: bool
    peers: Peers
    """The ranks of this machine, which read the same ranges of a file together."""
    counted: ByteProgress
    """Counts the bytes that this rank reads."""
    prefixes: PrefixMap
    """Renames its entries."""
    skipped: Skipped | None
    """Gets the names that only `into` or the state has; None if these are errors."""

    def load(self, map_location: Any, keys: Sequence[str] | None = None, into: Any = None) -> Any:
        """Loads the state from its file, with the names that it was saved with."""
        is_local = STATE_FILE in self.local.names
        folder, config = (self.local.folder, None) if is_local else (self.folder, self.config)
        url = folder + STATE_FILE
        return load_counted(
            url,
            map_location,
            weights_only=self.weights_only,
            keys=keys,
            into=into,
            config=config,
            counted=self.counted,
            reads=read_with(self.peers, url, config),
        )

    def log_skipped(self) -> None:
        """Logs the names that were skipped: the first ones as a warning, and all of them as information."""
        if self.skipped is not None and any(self.skipped):
            prefixes = wrapper_prefixes(*self.skipped)
            remedy = f"; prefix_map={prefixes!r} restores those that differ by wrappers" if prefixes else ""
            logger.warning("%s: strict=False: %s%s", self.source, self.skipped, remedy)
            logger.info("%s: not in the checkpoint: %s; only there: %s", self.source, *self.skipped)


def read_file(saved: SavedState, map_location: Any) -> Any:
    """Returns the state of a file, with states in place of objects."""
    with saved.ranks.meeting():
        own = own_state(saved.load(map_location), saved.ranks, saved.source)
        return saved.prefixes.state(own, saved.source)


def restore_file(into: MutableMapping[str, Any], saved: SavedState) -> None:
    """Restores objects from a file, of which only the entries of `into` are read.

    Tensors and modules are read directly into their memory, unless entries have other names there. The states of other
    objects, such as optimizers, which may not have a state yet, are read into new memory.

    Raises:
        CheckpointError: As for `_matched`, before anything is changed, and for `_fill`.
        ConfigError: A tensor of `into` is sharded among ranks.
        Exception: A rank could not read. Every error is raised on all ranks.
    """
    with saved.ranks.meeting():
        taken = take_state(into, sharded=False)
        # Names that are not strings cannot be selected: then the whole file is loaded.
        has_names = all(isinstance(name, str) for name in into) and not saved.prefixes
        in_place = {name: value for name, value in into.items() if has_names and _is_memory(value)}
        others = {name: value for name, value in into.items() if name not in in_place}
        loaded, pairs = _matching_entries(others, taken.tree, saved)
        if in_place:
            memory: Any = {name: taken.tree[name] for name in in_place}
            try:
                saved.load(None, list(in_place), memory)
            except ConfigError as error:
                # A module casts values of another dtype, and ranks may have tensors of their own; other differences
                # are found now.
                logger.debug("%s: not read in place: %s", saved.source, error)
                memory, more = _matching_entries(in_place, taken.tree, saved)
                pairs += more
            loaded |= memory
        _fill(into, loaded, pairs, saved)


def _matching_entries(
    into: Mapping[Any, Any], existing: Mapping[Any, Any], saved: SavedState
) -> tuple[Any, list[Pair]]:
    """Loads the entries of a file that objects are restored from, with their tensors on the CPU.

    Raises:
        CheckpointError: They do not match.
    """
    if not into:
        return {}, []
    names = sorted(into) if all(isinstance(name, str) for name in into) else None
    may_differ = names is not None and (saved.prefixes or saved.skipped is not None)
    if may_differ and isinstance(outline := saved.load("meta"), dict):
        tops = saved.prefixes.tops(outline)
        if saved.skipped is None:
            _matched(dict.fromkeys(into), dict.fromkeys(tops.values()), saved)
        names = [name for name, new in tops.items() if new in into]
    try:
        loaded = saved.load("cpu", names)
    except ConfigError:
        # Raises if one of them is missing.
        _matched(dict.fromkeys(into), saved.load("meta"), saved)
        raise
    if isinstance(loaded, dict):
        # Without entries that are not asked for, which may be of another number of ranks.
        loaded = {name: loaded[name] for name, new in saved.prefixes.tops(loaded).items() if new in into}
    loaded = saved.prefixes.state(own_state(loaded, saved.ranks, saved.source, existing), saved.source)
    return loaded, _matched(into, loaded, saved)


def _is_memory(value: Any) -> bool:
    """Returns whether a value consists of tensors that exist already."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    # An empty dict may adopt entries.
    return (
        isinstance(value, Mapping) and not is_stateful(value) and bool(value) and all(map(_is_memory, value.values()))
    )


def _matched(into: Mapping[Any, Any], loaded: Any, saved: SavedState) -> list[Pair]:
    """Returns the tensors of the objects to restore that belong to no object, with the saved ones.

    Args:
        into: A dict as passed to `CheckpointManager.restore`, or a part of it.
        loaded: The saved state, which may have more entries at the top.
        saved: How it is restored.

    Raises:
        CheckpointError: The state does not match.
    """
    # The top is entered, as by a save, also if it is an object.
    return checked(match(Part(_to_fill(dict(into))), loaded, saved.skipped), saved.source)


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
        return {key: Part() if adopts(value, inner) else _to_fill(inner) for key, inner in value.items()}
    return value if isinstance(value, torch.Tensor) else Accepts()


def _fill(into: MutableMapping[Any, Any], loaded: Mapping[Any, Any], pairs: Sequence[Pair], saved: SavedState) -> None:
    """Restores objects from a saved state that matches.

    Tensors are copied into existing tensors, objects with `load_state_dict` load their state, mappings are entered,
    empty ones get all entries, and other values are replaced.

    Raises:
        CheckpointError: The `load_state_dict` of an object fails.
    """
    with torch.no_grad():
        for pair in pairs:
            # The same tensor if it was read in place.
            if pair.target is not pair.source:
                pair.target.copy_(pair.source)
    _adopt(into, loaded)
    assign(into, loaded, source=saved.source, strict=saved.skipped is None)


def _adopt(into: Any, loaded: Any) -> None:
    """Gives the empty mappings in a mapping the entries that were loaded."""
    for key in [key for key in into if key in loaded]:
        value = into[key]
        if adopts(into, value):
            value.update(loaded[key])
        elif isinstance(value, Mapping) and not is_stateful(value):
            _adopt(value, loaded[key])


def read_shards(saved: SavedState) -> dict[str, Any]:
    """Returns the state of a folder, with whole tensors on the CPU of each rank, and states in place of objects.

    Keys of dicts are strings, except for the numbers of an optimizer's parameters. A folder has no empty dicts.

    Raises:
        CheckpointError: `weights_only` refuses a value, a tensor does not fit into memory, or ranks have their own
            values and there were more or fewer of them.
        Exception: A rank could not read. Every error is raised on all ranks.
    """
    reader = _Reader(saved)
    with saved.ranks.meeting():
        tree = SavedEntries(reader.read_metadata(), saved.source).whole(saved.ranks)
    _load_items(tree, reader, LoadItemType.BYTE_IO, saved)
    with saved.ranks.meeting():
        # Copied: torch removes values of other types than its own from `tree` when it reads the tensors.
        own: dict[str, Any] = own_state(_copy_containers(tree, saved.source), saved.ranks, saved.source)
        _number_parameters(own)
    _load_items(tree, reader, LoadItemType.TENSOR, saved)
    return own


def _number_parameters(tree: dict[Any, Any]) -> None:
    """Gives the states of optimizers the numbers of their parameters as keys again, which were saved as strings.

    An empty state, which was not saved, is added.
    """
    stack = [tree]
    while stack:
        value = stack.pop()
        stack += (inner for inner in value.values() if isinstance(inner, dict))
        state = value.get("state", {})
        if isinstance(state, dict) and is_optimizer({**value, "state": state}):
            parameters = [each for group in value[PARAM_GROUPS] if isinstance(each := group["params"], list)]
            numbers = {str(number): number for each in parameters for number in each if isinstance(number, int)}
            value["state"] = {numbers.get(key, key): inner for key, inner in state.items()}


def restore_shards(into: MutableMapping[str, Any], saved: SavedState) -> None:
    """Restores objects from a folder.

    Names, shapes and dtypes are compared with the checkpoint's first, then values are read, and tensors last.

    Raises:
        CheckpointError: The state does not match, or `weights_only` refuses a value; no tensor was changed.
        Exception: A rank could not read.
    """
    reader, ranks, source = _Reader(saved), saved.ranks, saved.source
    with ranks.meeting() as meeting:
        metadata = reader.read_metadata()
        own_tree = take_state(into, sharded=True).tree
        # Only memory can differ.
        _matched(into, own_tree, saved)
        # Copied, because `state_dict` may return containers that the object uses.
        existing = _copy_containers(own_tree, source)
        tree = with_rank_states(existing, metadata, ranks, source)
        saved_entries = SavedEntries(metadata, source)
        entries = saved_entries.fit(into, tree)
        # A rank that has a part of the state does not have the entries of other parts.
        of_all = meeting.gather(saved_entries.contained(entries))
        if of_all is not None:
            meeting.result = numpy.bitwise_or.reduce(of_all)
    with ranks.meeting():
        saved_entries.match(into, tree, entries, meeting.result, saved.skipped)
    _load_items(tree, reader, LoadItemType.BYTE_IO, saved)
    with ranks.meeting():
        # Copied: tensors are read by the checkpoint's names, which `tree` has.
        own = own_state(_copy_containers(tree, source), ranks, source, existing)
        # Differences in names are in `skipped` already.
        pairs = _matched(into, own, saved._replace(skipped=None if saved.skipped is None else Skipped([], [])))
    _load_items(tree, reader, LoadItemType.TENSOR, saved)
    with ranks.meeting():
        # An empty dict may have adopted the state of an optimizer.
        _number_parameters(own)
        _fill(into, own, pairs, saved)


def _copy_containers(tree: Any, source: str) -> Any:
    try:
        return with_containers(tree, lambda value: value)
    except RecursionError:
        raise CheckpointError(f"{source}: a value contains itself, or nests too deep") from None


def _load_items(tree: dict[str, Any], reader: StorageReader, kind: LoadItemType, saved: SavedState) -> None:
    try:
        with saved.ranks.collective():
            load_shards(tree, storage_reader=reader, planner=_Planner(kind, saved), process_group=saved.ranks.group)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, TorchobjError):
            raise
        raise CheckpointError(f"{saved.source}: {error}") from error


class _Reader(StorageReader):
    """Reads the metadata once, renames its entries, and counts the bytes of several loads.

    Reads from the local disk what is there.
    """

    def __init__(self, saved: SavedState) -> None:
        super().__init__(saved.folder, config=saved.config)
        self._counted, self._saved = saved.counted, saved
        self._known: Metadata | None = None
        self._local = StorageReader(saved.local.folder) if saved.local.names else None
        if self._local is not None:
            self._local._counted = saved.counted

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata of the checkpoint."""
        if self._known is None:
            is_local = self._local is not None and METADATA in self._saved.local.names
            read = self._local.read_metadata if self._local is not None and is_local else super().read_metadata
            self._known = self._saved.prefixes.metadata(read(*args, **kwargs), self._saved.source)
        return self._known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Loads the items of one kind."""
        if self._local is None or self._metadata is None:
            return self._load(plan, planner)
        self._local.set_up_storage_reader(self._metadata, is_coordinator=False)
        infos = [self._metadata.storage_data.get(item.storage_index) for item in plan.items]
        is_near = [str(getattr(info, "relative_path", None)) in self._saved.local.names for info in infos]
        near = [item for item, here in zip(plan.items, is_near, strict=True) if here]
        far = {at: number for number, at in enumerate(at for at, here in enumerate(is_near) if not here)}
        # Other ranks of the machine read the same of what is far; what is near each reads for itself.
        groups = plan.storage_data if isinstance(plan.storage_data, list) else []
        shared = [group._replace(items=[far[at] for at in group.items if at in far]) for group in groups]
        self._local._load(replace(plan, items=near, storage_data=None), planner)
        return self._load(replace(plan, items=[plan.items[at] for at in far], storage_data=shared), planner)


class _Planner(DefaultLoadPlanner):
    """Reads items of one kind, tensors or values; of values only those that `weights_only` allows."""

    def __init__(self, kind: LoadItemType, saved: SavedState) -> None:
        super().__init__(allow_partial_load=saved.skipped is not None)
        self._kind, self._saved = kind, saved

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
            loaded = torch_load(value, weights_only=self._saved.weights_only)
        except pickle.UnpicklingError as error:
            hint = "; weights_only=False reads it and runs code that it names: use it for trusted checkpoints only"
            hint = hint if self._saved.weights_only else ""
            raise CheckpointError(f"{self._saved.source}: {name}: {error}{hint}") from error
        *outer, last = self.mappings[name]
        if PARAM_GROUPS in outer:
            loaded = self._saved.prefixes.groups(loaded)
        inner: Any = self.original_state_dict
        for key in outer:
            inner = inner[key_in(inner, key)]
        inner[key_in(inner, last)] = loaded
