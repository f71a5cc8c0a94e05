"""Deletes the files of distributed saves that failed or were killed: those that no metadata names and that expired.

Considers only files with the names that `StorageWriter` creates, by `object_names`. A file is kept if metadata in its
checkpoint's folder contains its token. Names are untrusted: anyone with access to the folder may have created them.

Files of a running save look the same: only their age protects them. A save lists its files immediately before it writes
its metadata, so it fails if they were swept before. A save must not take longer than the age between the last file of
a rank and the metadata.
"""

import datetime
import logging
import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.object_names import METADATA, FileNames, FileOwner, is_metadata
from torchobj.checkpoint.leftovers import EXPIRED_AFTER, expired, running, under_way
from torchobj.checkpoint.server import time_of_store
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import ConfigError, StoreError
from torchobj.store import ObjectInfo, UnfinishedUpload

__all__ = ["discard", "sweep", "sweep_expired", "unnamed"]

logger = logging.getLogger("torchobj")


class _Found(NamedTuple):
    """A file, or an unfinished upload of one."""

    name: str
    modified: datetime.datetime | None
    """Time when it was written, or the upload began, by the store's clock."""
    upload: UnfinishedUpload | None = None

    @property
    def owner(self) -> FileOwner | None:
        return FileOwner.of_file(self.name)


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
    config: StoreConfig | S3ClientConfig | None = None,
    region: str | None = None,
    endpoint_url: str | None = None,
) -> list[str]:
    """Deletes the files of saves by `StorageWriter` that were killed, or whose cleanup failed.

    Deletes only files with names that `StorageWriter` creates and that no `.metadata` contains, and unfinished uploads
    of such files. For the steps of a `CheckpointManager`, use its own `sweep`.

    Args:
        url: Folder of a checkpoint, or of checkpoints in subfolders: `s3://bucket/run`.
        older_than_s: The files of a rank expire if it wrote none for this many seconds, by the store's clock. A running
            save fails if it is swept: use more than the time of a save, unless no save is running.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Override those of the configuration.

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
    folder = CheckpointDir(url, store_config(config, region, endpoint_url, url=url))
    if folder.url == "file://":
        raise ConfigError(f"url={url!r}: must be a folder, as file:///checkpoints")
    found = [_Found(info.key, info.last_modified) for info in folder.objects("")]
    found += [_Found(name, upload.begun, upload) for name, upload in folder.unfinished_uploads()]
    found = [item for item in found if item.owner is not None]
    if not found:
        return []
    probe = FileNames("")
    with under_way(probe.token):
        now = time_of_store(folder, probe.file(0), folder.delete)
    if now is None:
        return []
    owners = _expired(found, now, datetime.timedelta(seconds=older_than_s))
    return sorted(map(folder.url_of, _delete(folder, found, owners)))


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
    times = [info.last_modified for info in listed if info.key in own]
    newest = max((time for time in times if time is not None), default=None)
    if newest is None:
        return []
    found = [_Found(info.key, info.last_modified) for info in listed if info.key not in own]
    owners = _expired(found, newest, EXPIRED_AFTER)
    if not owners:
        return []
    return _delete(checkpoint, found, owners - {FileOwner.of_file(name) for name, _ in checkpoint.unfinished_uploads()})


def _expired(found: Iterable[_Found], now: datetime.datetime, age: datetime.timedelta) -> set[FileOwner]:
    """Returns the owners of files that are all of this age or older, and do not run in this process."""
    own = running()
    owners = expired(((item.owner, item.modified) for item in found), now, age)
    return {owner for owner in owners if owner is not None and owner.token not in own}


def _delete(checkpoint: CheckpointDir, found: Iterable[_Found], owners: Iterable[FileOwner | None]) -> list[str]:
    """Deletes files and aborts uploads of `owners` that no metadata names. Returns the names of the files."""
    free = unnamed(checkpoint, (owner for owner in owners if owner is not None))
    old = [item for item in found if item.owner in free]
    owned = set(checkpoint.owned(item.name for item in old))
    for item in old:
        if item.upload is not None and item.name in owned:
            checkpoint.store.abort_upload(item.upload)
    names = sorted(item.name for item in old if item.upload is None and item.name in owned)
    checkpoint.delete(names)
    return names


def unnamed(checkpoint: CheckpointDir, owners: Iterable[FileOwner]) -> set[FileOwner]:
    """Returns the owners whose token no metadata contains. Reads it now, so later than the files were listed."""
    found = set(owners)
    for folder in {owner.folder for owner in found}:
        listed = (info.key.removeprefix(folder) for info in checkpoint.objects(folder, "/"))
        for name in {METADATA, *filter(is_metadata, listed)}:
            # A token is ASCII, which a pickle contains unchanged.
            data = checkpoint.find(folder + name) or b""
            found = {owner for owner in found if owner.folder != folder or owner.token.encode() not in data}
    return found
