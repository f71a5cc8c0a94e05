"""Deletes a checkpoint at a URL: one object, or what the metadata of a distributed checkpoint names.

Nothing is deleted because it lies below a prefix: a folder may hold what others wrote.
"""

import itertools
import logging

from torchobj.checkpoint.dcp.manifest import Manifest
from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Place, is_item_file, ranked
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError
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
    described, listed = place.find(metadata), place.find(manifest)
    if described is None and listed is None:
        return False
    names = set() if listed is None else Manifest.load(listed, place.url_of(manifest)).names()
    if listed is None and described is not None:
        names = _named_by(described, place.url_of(metadata))
    files = sorted(name for name in names if is_item_file(name))
    if len(files) < len(names):
        logger.warning("%s names what is no file of a checkpoint, which stays", place.url)
    # The checkpoint ends with its metadata. What names the files goes last: an interrupted call can be repeated.
    batches = [[metadata], files, [manifest]] if listed is not None else [files, [metadata]]
    for batch in batches:
        if batch:
            place.delete(batch)
    return True


def _named_by(data: bytes, url: str) -> set[str]:
    try:
        return {info.relative_path for info in load_metadata(data, url).storage_data.values()}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{url}: cannot be read, and nothing was deleted: {error!r}") from error
