"""Deletes a checkpoint at a URL: one object, or what the metadata of a distributed checkpoint names.

Nothing is deleted because it lies below a prefix: a folder may hold what others wrote.
"""

import itertools
import logging

from torchobj.checkpoint.dcp.contents import files_of
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Place, ranked
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.urls import Url

__all__ = ["remove"]

logger = logging.getLogger("torchobj")


def remove(url: Url, config: StoreConfig) -> None:
    """Deletes a checkpoint. One that does not exist is no error.

    Args:
        url: Of an object; or the folder of a distributed checkpoint, with or without a slash at its end.
        config: How its store is reached.

    Raises:
        ConfigError: `url` is a whole bucket, or the root of the file system.
        CheckpointError: It is the folder of a checkpoint whose metadata cannot be read: nothing was deleted.
        StoreError: What persists after the retries.
    """
    if not url.key.strip("/"):
        raise ConfigError(f"path={str(url)!r}: names no object, expected {url.base}/key")
    place = Place(str(url), config)
    if not url.key.endswith("/"):
        try:
            place.store.head(url.key)
        except ObjectNotFoundError:
            pass
        else:
            return place.store.delete(url.key)
    is_found = False
    # First what all ranks wrote together, then what each rank wrote alone.
    for rank in itertools.chain([None], itertools.count()):
        if _remove_of(place, rank):
            is_found = True
        elif rank is not None:
            break
    if not is_found and any(True for _ in place.store.list(place.key(""))):
        logger.warning("%s is no checkpoint: nothing was deleted of what lies below it", place.url)
    return None


def _remove_of(place: Place, rank: int | None) -> bool:
    """Deletes what one metadata names, and it; returns whether there is such a checkpoint."""
    metadata, manifest = ranked(METADATA, rank), ranked(MANIFEST, rank)
    found = files_of(place, rank)
    if not found.has_metadata and not found.has_manifest:
        return False
    files = sorted(found.files)
    # What names the files goes last: an interrupted call can be repeated.
    batches = [[metadata], files] if found.is_listed else [files, [metadata]]
    for batch in [*batches, [manifest] if found.has_manifest else []]:
        place.delete(batch)
    return True
