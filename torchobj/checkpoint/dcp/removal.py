"""Deletes files of distributed checkpoints: of those that are removed or replaced, and of saves that failed.

A checkpoint has the files that its metadata names. Nothing is deleted by prefix: a folder may contain objects of
others.

A save that failed or was killed left the files that no metadata names. They are recognised by the names that
`StorageWriter` creates (`object_names`), and kept if metadata in their checkpoint's folder contains their token. Names
are untrusted: anyone with access to the folder may have created them. Files of a running save look the same: only their
age protects them. A save lists its files immediately before it writes its metadata, so it fails if they were swept
before. A save must not take longer than the age between the last file of a rank and the metadata.
"""

import contextlib
import datetime
import itertools
import logging
import math
from collections.abc import Collection, Iterable

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.checkpoint.dcp.object_names import METADATA, FileNames, FileOwner, is_item_file, is_metadata, ranked
from torchobj.checkpoint.leftovers import EXPIRED_AFTER, expired_owners, idle_owners, owners_of_age, running
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError, StoreError
from torchobj.store import ObjectInfo, Store, UnfinishedUpload
from torchobj.urls import Url

__all__ = ["discard", "files_of", "remove", "sweep", "sweep_expired"]

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
    old = owners_of_age(((owners[name], time) for name, time in times.items()), written, datetime.datetime.resolution)
    replaced = _unnamed(checkpoint, (owner for owner in old if owner is not None and not owner.folder))
    return {name for name, owner in owners.items() if owner in replaced}


def remove(url: Url, config: StoreConfig | None) -> None:
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
        with contextlib.suppress(ObjectNotFoundError):
            store.head(url.key)
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


def discard(checkpoint: CheckpointDir, names: Iterable[str]) -> None:
    """Deletes the files of a save that failed. A failure is only logged."""
    try:
        checkpoint.delete(names)
    except StoreError as error:
        message = "%s: could not delete the files of a failed save; sweep() deletes them later: %s"
        logger.warning(message, checkpoint.url, error)


def sweep(
    url: str,
    *,
    older_than_s: float = EXPIRED_AFTER.total_seconds(),
    config: StoreConfig | None = None,
) -> list[str]:
    """Deletes the files of saves by `StorageWriter` that were killed, or whose cleanup failed.

    Deletes only files with names that `StorageWriter` creates and that no `.metadata` contains, and unfinished uploads
    of such files. For the steps of a `CheckpointManager`, use its own `sweep`.

    Args:
        url: Folder of a checkpoint, or of checkpoints in subfolders: `s3://bucket/run`.
        older_than_s: The files of a rank expire if it wrote none for this many seconds, by the store's clock. A running
            save fails if it is swept: use more than the time of a save, unless no save is running.
        config: Settings of the store.

    Returns:
        The URLs of the deleted objects.

    Raises:
        ConfigError: `url` is not the URL of a folder, or `older_than_s` is not a finite number of 0 or more.
        StoreError: A request failed.

    Example:
        >>> sweep("memory://example/run")
        []
    """
    if isinstance(older_than_s, bool) or not isinstance(older_than_s, int | float) or not 0 <= older_than_s < math.inf:
        raise ConfigError(f"older_than_s={older_than_s!r}: must be a number of seconds, 0 or more")
    folder = CheckpointDir(url, config)
    if folder.url == "file://":
        raise ConfigError(f"url={url!r}: must be a folder, as file:///checkpoints")
    listed, uploads = folder.objects(""), folder.unfinished_uploads()
    found = [(info.key, info.last_modified) for info in listed] + [(name, upload.begun) for name, upload in uploads]
    times = [(owner, time) for name, time in found if (owner := FileOwner.of_file(name)) is not None]
    probe = FileNames("")
    owners = idle_owners(folder, times, older_than_s, (probe.file(0), probe.token))
    return sorted(map(folder.url_of, _delete(folder, listed, uploads, owners)))


def sweep_expired(checkpoint: CheckpointDir, listed: Collection[ObjectInfo], own: Collection[str]) -> list[str]:
    """Deletes expired files after a save. They are a day older than the newest file of the save.

    Both times are those of the listing. Files whose rank also has an unfinished upload are kept: the times of its parts
    are not known, and it may be of a slow save.

    Args:
        checkpoint: Folder of the checkpoint that was saved.
        listed: Its objects.
        own: Names of the files of the save.

    Returns:
        The names of the deleted files.

    Raises:
        StoreError: A request failed.
    """
    owners = expired_owners(listed, own, FileOwner.of_file)
    if not owners:
        return []
    uploading = {FileOwner.of_file(name) for name, _ in checkpoint.unfinished_uploads()}
    return _delete(checkpoint, listed, (), owners - uploading)


def _delete(
    checkpoint: CheckpointDir,
    listed: Iterable[ObjectInfo],
    uploads: Iterable[tuple[str, UnfinishedUpload]],
    owners: Iterable[FileOwner],
) -> list[str]:
    """Deletes files and aborts uploads of `owners` that no metadata names, and that do not run in this process.

    Returns the names of the files.
    """
    own = running()
    free = _unnamed(checkpoint, (owner for owner in owners if owner.token not in own))
    for name, upload in uploads:
        if FileOwner.of_file(name) in free and checkpoint.owned([name]):
            checkpoint.store.abort_upload(upload)
    return checkpoint.delete(sorted(info.key for info in listed if FileOwner.of_file(info.key) in free))


def _unnamed(checkpoint: CheckpointDir, owners: Iterable[FileOwner]) -> set[FileOwner]:
    """Returns the owners whose token no metadata contains. Reads it now, so later than the files were listed."""
    found = set(owners)
    for folder in {owner.folder for owner in found}:
        listed = (info.key.removeprefix(folder) for info in checkpoint.objects(folder, "/"))
        for name in {METADATA, *filter(is_metadata, listed)}:
            # A token is ASCII, which a pickle contains unchanged.
            data = checkpoint.find(folder + name) or b""
            found = {owner for owner in found if owner.folder != folder or owner.token.encode() not in data}
    return found
