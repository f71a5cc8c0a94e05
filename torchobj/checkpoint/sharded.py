"""States of which every rank writes and reads its own part, by `torch.distributed.checkpoint`. Commits nothing."""

import io
import pickle
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchobj.checkpoint.admission import warn_of_refused
from torchobj.checkpoint.dcp.manifest import Manifest
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Place
from torchobj.checkpoint.dcp.reader import StorageReader
from torchobj.checkpoint.dcp.writer import StorageWriter
from torchobj.checkpoint.divided import copied, with_containers
from torchobj.checkpoint.matching import match
from torchobj.checkpoint.rank_states import own, placed
from torchobj.checkpoint.ranks import Ranks
from torchobj.checkpoint.restoring import check, fill
from torchobj.checkpoint.snapshot import Snapshots, state_of
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, TorchobjError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["checksums", "restored", "saving"]


def saving(
    taken: Mapping[str, Any],
    folder: str,
    config: StoreConfig,
    group: "ProcessGroup | None",
    snapshots: Snapshots | None = None,
) -> Callable[[], None]:
    """What writes the state to a folder when all ranks call it.

    Args:
        taken: The state, with states in the places of objects, as `rank_states.gathered` returns it.
        folder: URL of the folder.
        config: How its store is reached.
        group: The ranks, on the CPU; None for one rank alone.
        snapshots: Where given, they copy the state now, and it may change afterwards.
    """
    warn_of_refused(taken)
    if snapshots is not None:
        taken = copied(taken, snapshots)

    def write() -> None:
        try:
            save(taken, storage_writer=StorageWriter(folder, config=config), process_group=group)
        except CheckpointException as error:
            raise _real(error) from error

    return write


def restored(
    into: MutableMapping[str, Any], folder: str, config: StoreConfig, ranks: Ranks, source: str, *, weights_only: bool
) -> MutableMapping[str, Any]:
    """Fills a state from a folder when all ranks call it, and returns it.

    First the names, shapes and dtypes are compared with the checkpoint's, then values are read, and tensors last.

    Raises:
        CheckpointError: It does not fit, or `weights_only` refuses a value: no tensor was changed then.
        Exception: What kept a rank from reading.
    """
    reader = _Reader(folder, config=config)

    def matched() -> dict[str, Any]:
        metadata = reader.read_metadata()
        # Of its own: an object may have given the containers that it works with.
        taken: dict[str, Any] = with_containers(state_of(into), lambda value: value)
        taken = placed(into, taken, metadata, source)
        match(into, taken, metadata, source)
        return taken

    taken = ranks.together(matched)
    values = _Planner(LoadItemType.BYTE_IO, source, weights_only=weights_only)
    _load(taken, reader, values, ranks, source)
    # Containers of its own: the names in `taken` are those of the checkpoint, by which tensors are read.
    mine = ranks.together(lambda: own(with_containers(taken, lambda value: value), ranks, source))
    ranks.together(lambda: check(into, mine, source))
    _load(taken, reader, _Planner(LoadItemType.TENSOR, source, weights_only=weights_only), ranks, source)
    ranks.together(lambda: fill(into, mine, source))
    return into


def _load(taken: dict[str, Any], reader: StorageReader, planner: "_Planner", ranks: Ranks, source: str) -> None:
    """Tensors of the state itself are filled where they are."""
    try:
        load(taken, storage_reader=reader, planner=planner, process_group=ranks.group)
    except CheckpointException as error:
        real = _real(error)
        if isinstance(real, RuntimeError | ValueError) and not isinstance(real, TorchobjError):
            raise CheckpointError(f"{source}: {real}") from error
        raise real from error


class _Reader(StorageReader):
    """Reads the metadata once."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Reads what is of one kind, tensors or values, and of values only what `weights_only` allows."""

    def __init__(self, kind: LoadItemType, source: str, *, weights_only: bool) -> None:
        super().__init__()
        self._kind, self._source, self._weights_only = kind, source, weights_only

    def create_local_plan(self) -> LoadPlan:
        """The items of the kind."""
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if item.type is self._kind])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value where it belongs.

        Raises:
            CheckpointError: It is refused, or damaged.
        """
        name = read_item.dest_index.fqn
        stock: Any = torch.load
        try:
            loaded = stock(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            hint = "; weights_only=False reads it, and runs what it names: only for a checkpoint that you trust"
            raise CheckpointError(f"{self._source}: {name}: {error}{hint if self._weights_only else ''}") from error
        *outer, last = self.mappings[name]
        place: Any = self.original_state_dict
        for key in outer:
            place = place[_key(place, key)]
        place[_key(place, last)] = loaded


def _key(place: Any, key: Any) -> Any:
    """A key as it is; torch makes strings of those of mappings."""
    if isinstance(place, Mapping) and key not in place:
        return next((found for found in place if str(found) == key), key)
    return key


def checksums(folder: str, config: StoreConfig) -> dict[str, int | None]:
    """The objects that a save wrote to a folder, by their names in it, with the CRC-32 of those that have one.

    Raises:
        CheckpointError: The folder's manifest is none.
        ObjectNotFoundError: It has no manifest.
    """
    place = Place(folder, config)
    manifest = Manifest.load(place.get(MANIFEST), place.url_of(MANIFEST))
    return {file.name: file.crc32 for file in manifest.files} | {MANIFEST: None, METADATA: None}


def _real(error: CheckpointException) -> BaseException:
    """What the first rank that failed met; torch wraps it in what is no Exception."""
    return next((met for met, _ in error.failures.values()), error)
