"""Finds the files that belong to a checkpoint, by its metadata, and removes a checkpoint.

Never deletes by prefix: a folder may contain objects of others.
"""

import datetime
import itertools
import logging

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.leftovers import unnamed
from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.checkpoint.dcp.object_names import METADATA, FileOwner, is_item_file, ranked
from torchobj.checkpoint.leftovers import expired
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError
from torchobj.store import Store
from torchobj.urls import Url

__all__ = ["files_of", "remove"]

logger = logging.getLogger("torchobj")


def files_of(checkpoint: CheckpointDir, metadata: str) -> set[str] | None:
    """Returns the names of the files that are deleted when a checkpoint is removed or replaced.

    These are the files that the metadata names. If another program wrote all of them, these are also the older files of
    `StorageWriter`: the other program has replaced their checkpoint.

    Args:
        checkpoint: Folder of the checkpoint.
        metadata: Name of its metadata.

    Returns:
        The names, relative to the folder; None if the metadata does not exist.

    Raises:
        CheckpointError: The metadata cannot be read.
        StoreError: A request failed.
    """
    data, url = checkpoint.find(metadata), checkpoint.url_of(metadata)
    if data is None:
        return None
    try:
        named = {info.relative_path for info in load_metadata(data, url).storage_data.values()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{url}: cannot be read: {error!r}") from error
    files = {name for name in named if is_item_file(name)}
    if files != named:
        others = ", ".join(sorted(map(repr, named - files)))
        logger.warning("%s names objects that are not files of a checkpoint; not deleted: %s", checkpoint.url, others)
    if files and not any(map(FileOwner.of_file, files)):
        files |= _older_files(checkpoint, metadata)
    return files


def _older_files(checkpoint: CheckpointDir, metadata: str) -> set[str]:
    """Returns the files of saves by `StorageWriter` that are older than the metadata, and that no metadata names."""
    times = {info.key: info.last_modified for info in checkpoint.objects("")}
    written = times.get(metadata)
    if written is None:
        return set()
    owners = {name: FileOwner.of_file(name) for name in times}
    old = expired(((owners[name], time) for name, time in times.items()), written, datetime.datetime.resolution)
    replaced = unnamed(checkpoint, (owner for owner in old if owner is not None and not owner.folder))
    return {name for name, owner in owners.items() if owner in replaced}


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
    checkpoint, store = CheckpointDir(str(url), config), Store(url.base, config=config)
    if not url.key.endswith("/"):
        try:
            store.head(url.key)
        except ObjectNotFoundError:
            pass
        else:
            return store.delete(url.key)
    is_found = False
    # First the metadata of all ranks, then the metadata of each rank.
    for rank in itertools.chain([None], itertools.count()):
        metadata = ranked(METADATA, rank)
        files = files_of(checkpoint, metadata)
        if files is not None:
            is_found = True
            checkpoint.delete(sorted(files))
            # Last, because it names the files: so an interrupted call can be repeated.
            checkpoint.delete([metadata])
        elif rank is not None:
            break
    if not is_found and any(True for _ in store.list(f"{url.key.rstrip('/')}/")):
        logger.warning("%s is not a checkpoint: none of the objects below it was deleted", checkpoint.url)
    return None
