"""States of which every rank writes and reads its own part, by `torch.distributed.checkpoint`. Commits nothing."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchobj.checkpoint.dcp.manifest import Manifest
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Place
from torchobj.checkpoint.dcp.reader import StorageReader
from torchobj.checkpoint.dcp.writer import StorageWriter
from torchobj.checkpoint.restoring import fill
from torchobj.checkpoint.snapshot import state_of
from torchobj.config import StoreConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["checksums", "restored", "saving"]


def saving(
    state: Mapping[str, Any], folder: str, config: StoreConfig, group: "ProcessGroup | None", *, copied: bool
) -> Callable[[], None]:
    """What writes the state to a folder when all ranks call it.

    Args:
        state: As given to `CheckpointManager.save`.
        folder: URL of the folder.
        config: How its store is reached.
        group: The ranks, on the CPU; None for one rank alone.
        copied: Tensors are copied to the CPU now, and may change afterwards.
    """
    taken = state_of(state)
    if copied:
        taken = BlockingAsyncStager().stage(taken)

    def write() -> None:
        try:
            save(taken, storage_writer=StorageWriter(folder, config=config), process_group=group)
        except CheckpointException as error:
            raise _real(error) from error

    return write


def restored(
    into: dict[str, Any], folder: str, config: StoreConfig, group: "ProcessGroup | None", source: str
) -> dict[str, Any]:
    """Fills a state from a folder when all ranks call it, and returns it.

    Raises:
        CheckpointError: What was read does not fit.
        Exception: What kept a rank from reading.
    """
    # Tensors of the state itself: they are filled where they are.
    taken = state_of(into)
    try:
        load(taken, storage_reader=StorageReader(folder, config=config), process_group=group)
    except CheckpointException as error:
        raise _real(error) from error
    fill(into, taken, source)
    return into


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
