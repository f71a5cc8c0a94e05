"""Moves files and objects: copies them, verifies the copies, and deletes the sources that did not change."""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from torchobj.checkpoint.checkpoint_dir import without_links
from torchobj.cli.errors import CommandError
from torchobj.cli.progress import Report
from torchobj.cli.transfer_plan import PlannedTransfer, items
from torchobj.cli.transfer_run import Failure, Options, Outcome, concurrently, run_all
from torchobj.config import StoreConfig
from torchobj.exceptions import ObjectNotFoundError, PreconditionFailedError, UnsupportedError
from torchobj.store import Store
from torchobj.urls import Url

__all__ = ["MovedSource", "move_all", "sources_to_move"]


class MovedSource(NamedTuple):
    """A source before its transfer."""

    transfer: PlannedTransfer
    name: str
    """Its path below a tree; empty for a single file or object."""
    size: int | None
    version: str | None
    """Version of an object, or state of a file."""

    @property
    def shown(self) -> str:
        """URL or path."""
        source = self.transfer.source
        return source.child(self.name).shown if self.name else source.shown


def move_all(transfers: list[PlannedTransfer], sources: list[MovedSource], options: Options, report: Report) -> Outcome:
    """Moves files and objects, given what `sources_to_move` returns for the transfers.

    A source is deleted if its transfer succeeded, it has not changed, and its copy has its size, and the version that
    was written if it is known. These are not looked up for objects of trees that the server copied.

    The transfers verify the checksums of what they write.
    """
    outcome = run_all(transfers, dataclasses.replace(options, names_copies=True), report)
    copied = [source for source in sources if _is_copied(source, outcome)]
    for source, _, failure in concurrently(
        copied, lambda source: _delete(source, options.config, outcome), lambda source: source.shown
    ):
        if failure is not None:
            outcome.failures.append(Failure(source.shown, failure.error))
    return outcome


def _is_copied(source: MovedSource, outcome: Outcome) -> bool:
    transfer = source.transfer
    if not transfer.is_tree:
        return transfer in outcome.versions
    missing = outcome.trees.get(transfer)
    if missing is None:
        return False
    if transfer.source.is_local and any(source.name.startswith(f"{name}/") for name in missing):
        # In a folder that could not be read.
        return False
    return source.name not in missing


def sources_to_move(transfer: PlannedTransfer, config: StoreConfig) -> list[MovedSource]:
    """The files or objects of a transfer, and their states before it."""
    source = transfer.source
    if transfer.is_tree:
        found = items(source, config, transfer.glob)
        if source.is_local:
            # A file behind a link is outside of the tree, and is kept.
            names = without_links(source.path, [item.name for item in found])
            return [_of_file(transfer, name, source.path / name) for name in names]
        return [MovedSource(transfer, item.name, item.size, item.version) for item in found]
    if source.is_local:
        return [_of_file(transfer, "", source.path)]
    info = Store(source.url.base, config=config).head(source.url.key)
    return [MovedSource(transfer, "", info.size, info.version)]


def _of_file(transfer: PlannedTransfer, name: str, path: Path) -> MovedSource:
    state = path.stat()
    return MovedSource(transfer, name, state.st_size, _state(state))


def _state(state: os.stat_result) -> str:
    return f"{state.st_dev}-{state.st_ino}-{state.st_size}-{state.st_mtime_ns}"


def _delete(source: MovedSource, config: StoreConfig, outcome: Outcome) -> None:
    """Deletes a source.

    Raises:
        CommandError: Its copy is missing, or has another size or version, or the source changed; it is kept.
    """
    transfer = source.transfer
    if source.name not in outcome.copies.get(transfer, ()):
        _check_copy(source, config, outcome)
    changed = CommandError(f"{source.shown}: kept, because it changed while it was copied")
    if transfer.source.is_local:
        path = transfer.source.path / source.name if source.name else transfer.source.path
        if _state(path.stat()) != source.version:
            raise changed
        path.unlink()
        return
    url = transfer.source.url
    key, store = f"{url.key}{source.name}", Store(url.base, config=config)
    # Some servers with the interface of S3 ignore the condition of the delete.
    if (url.scheme != "gs" or source.version is None) and store.head(key).version != source.version:
        raise changed
    try:
        store.delete(key, if_version=source.version)
    except PreconditionFailedError as error:
        raise changed from error
    except UnsupportedError:
        store.delete(key)


def _check_copy(source: MovedSource, config: StoreConfig, outcome: Outcome) -> None:
    """Raises CommandError if the copy is missing, or has another size or version."""
    transfer = source.transfer
    copy = transfer.destination.child(source.name) if source.name else transfer.destination
    size, version = (copy.path.stat().st_size, None) if copy.is_local else _state_of_object(copy.url, config)
    if size != source.size:
        raise CommandError(f"{source.shown}: kept, because {copy.shown} has {size} bytes instead of {source.size}")
    written = outcome.versions.get(transfer)
    if written is not None and version != written:
        raise CommandError(f"{source.shown}: kept, because another writer replaced {copy.shown}")


def _state_of_object(url: Url, config: StoreConfig) -> tuple[int | None, str | None]:
    """Size and version of an object; None if it is missing."""
    try:
        info = Store(url.base, config=config).head(url.key)
    except ObjectNotFoundError:
        return None, None
    return info.size, info.version
