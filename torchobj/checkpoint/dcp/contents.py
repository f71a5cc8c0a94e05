"""Which files belong to the checkpoint in a folder, by its metadata and its manifest. Deletes nothing."""

import logging
from typing import NamedTuple

from torchobj.checkpoint.dcp.attempt import RECORDS, record_of_file
from torchobj.checkpoint.dcp.manifest import Manifest
from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Place, is_item_file, ranked
from torchobj.exceptions import CheckpointError

__all__ = ["Contents", "files_of"]

logger = logging.getLogger("torchobj")


class Contents(NamedTuple):
    """What is deleted when a checkpoint is removed or replaced."""

    files: set[str]
    """Names of its files, relative to the folder, without metadata and manifest."""
    has_metadata: bool
    """Whether there is metadata."""
    has_manifest: bool
    """Whether there is a manifest, other than that of a save that may be running."""
    is_listed: bool
    """Whether that manifest names all the files."""


def files_of(place: Place, rank: int | None) -> Contents:
    """The files of a checkpoint.

    The manifest is believed where its save wrote the metadata as well. Otherwise another writer has replaced the
    metadata, or the manifest's save was not committed: then the files that either of them names count, but for those
    that an attempt record in the folder protects, as their save may be running.

    Args:
        place: The folder.
        rank: The rank that wrote its own metadata; None where all ranks wrote it together.

    Raises:
        CheckpointError: The metadata, or without metadata the manifest, cannot be read.
        StoreError: What persists after the retries.
    """
    described, listed = place.find(ranked(METADATA, rank)), place.find(ranked(MANIFEST, rank))
    manifest = None if listed is None else _manifest(place, rank, listed, is_needed=described is None)
    listed_names = set() if manifest is None else manifest.names()
    if manifest is not None and described is not None and manifest.save_id.encode() in described:
        return Contents(_files(place, listed_names), has_metadata=True, has_manifest=True, is_listed=True)
    named = set() if described is None else _named_by(described, place.url_of(ranked(METADATA, rank)))
    # Listed last: a save puts its records before its manifest.
    protected = _protected(place, listed_names)
    has_manifest = listed is not None and not protected
    files = _files(place, named | (listed_names - protected))
    return Contents(files, described is not None, has_manifest, is_listed=has_manifest and files <= listed_names)


def _manifest(place: Place, rank: int | None, data: bytes, *, is_needed: bool) -> Manifest | None:
    try:
        return Manifest.load(data, place.url_of(ranked(MANIFEST, rank)))
    except CheckpointError as error:
        if is_needed:
            raise
        logger.warning("%s; the metadata is read instead", error)
        return None


def _named_by(data: bytes, url: str) -> set[str]:
    try:
        return {info.relative_path for info in load_metadata(data, url).storage_data.values()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{url}: cannot be read: {error!r}") from error


def _protected(place: Place, names: set[str]) -> set[str]:
    """The names of files whose save has a record in the folder."""
    owners = {name: record_of_file(name) for name in names if is_item_file(name)}
    records = {info.key for info in place.objects(RECORDS)} if owners else set()
    return {name for name, owner in owners.items() if owner is not None and owner.name in records}


def _files(place: Place, names: set[str]) -> set[str]:
    files = {name for name in names if is_item_file(name)}
    if files != names:
        others = ", ".join(sorted(map(repr, names - files)))
        logger.warning("%s names what is no file of a checkpoint; it is kept: %s", place.url, others)
    return files
