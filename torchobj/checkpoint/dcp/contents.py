"""Finds the files of the checkpoint in a folder, by its metadata and its manifest, and removes them.

Never deletes by prefix: a folder may contain objects of others.
"""

import itertools
import logging
from typing import NamedTuple

from torchobj.checkpoint.dcp.attempt import RECORDS, record_of_file
from torchobj.checkpoint.dcp.checkpoint_dir import MANIFEST, METADATA, CheckpointDir, is_item_file, ranked
from torchobj.checkpoint.dcp.manifest import Manifest
from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError
from torchobj.urls import Url

__all__ = ["Contents", "files_of", "remove"]

logger = logging.getLogger("torchobj")


class Contents(NamedTuple):
    """The objects that are deleted when a checkpoint is removed or replaced."""

    files: set[str]
    """Names of the files, relative to the folder, without metadata and manifest."""
    has_metadata: bool
    """Whether the metadata exists."""
    has_manifest: bool
    """Whether a manifest exists that is not of a save that may be running."""
    is_listed: bool
    """Whether that manifest names all files."""


def files_of(checkpoint: CheckpointDir, rank: int | None) -> Contents:
    """Returns the files of a checkpoint.

    If the save of the manifest also wrote the metadata, these are the files of the manifest. Otherwise another writer
    replaced the metadata, or the save of the manifest was not committed. Then they are the files that either names,
    except those of a save with an attempt record in the folder, which may be running.

    Args:
        checkpoint: Folder of the checkpoint.
        rank: Rank that wrote its own metadata; None for metadata of all ranks.

    Raises:
        CheckpointError: The metadata, or without metadata the manifest, cannot be read.
        StoreError: A request failed.
    """
    described, listed = checkpoint.find(ranked(METADATA, rank)), checkpoint.find(ranked(MANIFEST, rank))
    manifest = None if listed is None else _manifest(checkpoint, rank, listed, is_needed=described is None)
    listed_names = set() if manifest is None else manifest.names()
    if manifest is not None and described is not None and manifest.save_id.encode() in described:
        return Contents(_files(checkpoint, listed_names), has_metadata=True, has_manifest=True, is_listed=True)
    named = set() if described is None else _named_by(described, checkpoint.url_of(ranked(METADATA, rank)))
    # Listed last: a save writes its records before its manifest.
    protected = _protected(checkpoint, listed_names)
    has_manifest = listed is not None and not protected
    files = _files(checkpoint, named | (listed_names - protected))
    return Contents(files, described is not None, has_manifest, is_listed=has_manifest and files <= listed_names)


def _manifest(checkpoint: CheckpointDir, rank: int | None, data: bytes, *, is_needed: bool) -> Manifest | None:
    try:
        return Manifest.load(data, checkpoint.url_of(ranked(MANIFEST, rank)))
    except CheckpointError as error:
        if is_needed:
            raise
        logger.warning("%s; reading the metadata instead", error)
        return None


def _named_by(data: bytes, url: str) -> set[str]:
    try:
        return {info.relative_path for info in load_metadata(data, url).storage_data.values()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{url}: cannot be read: {error!r}") from error


def _protected(checkpoint: CheckpointDir, names: set[str]) -> set[str]:
    """Returns the names of files whose save has a record in the folder."""
    owners = {name: record_of_file(name) for name in names if is_item_file(name)}
    records = {info.key for info in checkpoint.objects(RECORDS)} if owners else set()
    return {name for name, owner in owners.items() if owner is not None and owner.name in records}


def _files(checkpoint: CheckpointDir, names: set[str]) -> set[str]:
    files = {name for name in names if is_item_file(name)}
    if files != names:
        others = ", ".join(sorted(map(repr, names - files)))
        logger.warning("%s names objects that are not files of a checkpoint; not deleted: %s", checkpoint.url, others)
    return files


def remove(url: Url, config: StoreConfig) -> None:
    """Deletes a checkpoint. A missing checkpoint is not an error.

    Args:
        url: URL of an object, or of the folder of a distributed checkpoint, with or without a slash at the end.
        config: Configuration of the store.

    Raises:
        ConfigError: `url` is a whole bucket, or the root of the file system.
        CheckpointError: The metadata of the checkpoint cannot be read. Nothing was deleted.
        StoreError: A request failed.
    """
    if not url.key.strip("/"):
        raise ConfigError(f"path={str(url)!r}: names no object, expected {url.base}/key")
    checkpoint = CheckpointDir(str(url), config)
    if not url.key.endswith("/"):
        try:
            checkpoint.store.head(url.key)
        except ObjectNotFoundError:
            pass
        else:
            return checkpoint.store.delete(url.key)
    is_found = False
    # First the metadata of all ranks, then the metadata of each rank.
    for rank in itertools.chain([None], itertools.count()):
        if _remove_of(checkpoint, rank):
            is_found = True
        elif rank is not None:
            break
    if not is_found and any(True for _ in checkpoint.store.list(checkpoint.key(""))):
        logger.warning("%s is not a checkpoint: none of the objects below it was deleted", checkpoint.url)
    return None


def _remove_of(checkpoint: CheckpointDir, rank: int | None) -> bool:
    """Deletes one metadata object and the files that it names. Returns whether it exists."""
    metadata, manifest = ranked(METADATA, rank), ranked(MANIFEST, rank)
    found = files_of(checkpoint, rank)
    if not found.has_metadata and not found.has_manifest:
        return False
    files = sorted(found.files)
    # The object that names the files is deleted last, so an interrupted call can be repeated.
    batches = [[metadata], files] if found.is_listed else [files, [metadata]]
    for batch in [*batches, [manifest] if found.has_manifest else []]:
        checkpoint.delete(batch)
    return True
