"""Deletes what distributed saves that were killed have left: the files of expired records that no metadata names.

What a record says is not trusted. It names files by a token that only torchobj's writer puts into names, below the
record's own folder; and a file stays if metadata, or another record, in any folder between them names its token.
"""

import dataclasses
import datetime
import logging
import math
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torchobj.checkpoint.clock import time_of_store
from torchobj.checkpoint.dcp.attempt import RECORDS, Record, is_running, record_of_file
from torchobj.checkpoint.dcp.manifest import Manifest
from torchobj.checkpoint.dcp.place import MANIFEST, METADATA, Place
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import CheckpointError, ConfigError, PreconditionFailedError
from torchobj.store import ObjectInfo

__all__ = ["sweep", "sweep_expired"]

logger = logging.getLogger("torchobj")

#: A record that was not renewed for this long has expired. A save renews its records every hour.
EXPIRED_AFTER_S = 86_400.0

#: Records are marked one request after the other, on this many threads.
_MARKED_AT_ONCE = 16

#: A record is smaller.
_LARGEST_RECORD_BYTES = 8192

#: The names of metadata and manifests, of all ranks together and of one rank.
_METADATA = re.compile(rf"(?:__[0-9]+)?{re.escape(METADATA)}")
_MANIFEST = re.compile(rf"(?:__[0-9]+)?{re.escape(MANIFEST)}")


def sweep(
    url: str,
    *,
    older_than_s: float = EXPIRED_AFTER_S,
    config: StoreConfig | S3ClientConfig | None = None,
    region: str | None = None,
    endpoint_url: str | None = None,
) -> list[str]:
    """Deletes what saves by `StorageWriter` left behind that were killed, or whose cleanup failed.

    Deletes only files that the record of an expired save names and that no `.metadata` names, unfinished uploads of
    such files, and the records. A save renews its records every hour while it runs. Steps of a `CheckpointManager` have
    their own `sweep`.

    Args:
        url: The folder of a checkpoint, or one with checkpoints in its subfolders: `s3://bucket/run`.
        older_than_s: A save has expired when its record was not renewed for this many seconds, by the store's clock. A
            save that is still running fails if it is swept: give more than two hours, unless no save is running.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.

    Returns:
        The URLs of what was deleted.

    Raises:
        ConfigError: `url` is not the URL of a folder, or the age is not a number of 0 or more.
        StoreError: The store cannot be listed, or does not delete.

    Example:
        >>> sweep("memory://example/run")
        []
    """
    if isinstance(older_than_s, bool) or not isinstance(older_than_s, int | float) or not 0 <= older_than_s < math.inf:
        raise ConfigError(f"older_than_s={older_than_s!r}: must be a number of seconds, 0 or more")
    folder = Place(url, store_config(config, region, endpoint_url))
    if folder.url == "file://":
        raise ConfigError(f"url={url!r}: must be a folder, as file:///checkpoints")
    records = [info for info in folder.objects("") if info.key.rpartition("/")[2].startswith(RECORDS)]
    if not records:
        return []
    owned = set(folder.owned(info.key for info in records))
    records = [info for info in records if info.key in owned]
    probe = Record.new("")
    now = time_of_store(folder, probe.name, probe.dump(), folder.delete)
    by_folder: dict[str, list[ObjectInfo]] = {}
    for info in records:
        parent = _parent(info.key)
        by_folder.setdefault(parent, []).append(dataclasses.replace(info, key=info.key.removeprefix(parent)))
    deleted: list[str] = []
    for parent, own in by_folder.items():
        place = folder.below(parent)
        deleted += map(place.url_of, sweep_expired(place, own, now, older_than_s))
    return sorted(deleted)


def sweep_expired(
    place: Place, records: Iterable[ObjectInfo], now: datetime.datetime | None, older_than_s: float = EXPIRED_AFTER_S
) -> list[str]:
    """Deletes what the expired among some records name, and these records.

    Args:
        place: The folder of the records.
        records: The records, as listed.
        now: The time by the store's clock; None where it does not say, and then nothing has expired.
        older_than_s: How old an expired record is at least.

    Returns:
        The names of what was deleted.

    Raises:
        StoreError: The store cannot be listed, or does not delete.
    """
    age = datetime.timedelta(seconds=older_than_s)
    expired = [
        info
        for info in records
        if now is not None and info.last_modified is not None and now - info.last_modified >= age
    ]
    if not expired:
        return []
    with ThreadPoolExecutor(_MARKED_AT_ONCE) as threads:
        marked = list(threads.map(lambda info: _marked(place, info), expired))
    swept = [record for record in marked if record is not None]
    return _remove(place, swept) if swept else []


def _marked(place: Place, info: ObjectInfo) -> Record | None:
    """The record, marked as swept; None where it cannot be read, was renewed meanwhile, or is of a running save."""
    # What is too large, or of an unknown size, is not read: it is refused as an empty record is.
    is_read = info.size is not None and info.size <= _LARGEST_RECORD_BYTES
    data = place.find(info.key) if is_read else b""
    if data is None or is_running(info.key):
        return None
    try:
        record = Record.load(data, info.key, place.url_of(info.key))
    except CheckpointError as error:
        logger.warning("%s; nothing is deleted for it", error)
        return None
    marked = record._replace(is_swept=True)
    try:
        place.put(record.name, marked.dump(), if_match=info.version)
    except PreconditionFailedError:
        return None
    return marked


def _remove(place: Place, swept: list[Record]) -> list[str]:
    """Deletes what is left of saves whose records are marked, and then the records."""
    folder = _Folder(place)
    leftovers: set[str] = set()
    for record in swept:
        if folder.keeps(record, of_sweep=True):
            continue
        leftovers.update(name for name in folder.names(_parent(record.beginning)) if record.owns(name))
        place.abort_uploads(record.beginning, record.owns)
    tokens = {record.token for record in swept}
    for name in [name for name in folder.names("") if _MANIFEST.fullmatch(name)]:
        leftovers |= _left_by_manifest(folder, name, tokens)
    leftovers = set(place.owned(sorted(leftovers)))
    place.delete(sorted(leftovers))
    # Last: a sweep that is killed before is done again.
    records = [record.name for record in swept]
    place.delete(records)
    return sorted([*leftovers, *records])


class _Folder:
    """What is in a checkpoint's folder. Lists each directory once."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._names: dict[str, set[str]] = {}
        self._metadata: dict[str, list[bytes]] = {}

    def names(self, directory: str) -> set[str]:
        """The objects directly in a directory."""
        if directory not in self._names:
            self._names[directory] = {info.key for info in self.place.objects(directory, "/")}
        return self._names[directory]

    def keeps(self, record: Record, *, of_sweep: bool) -> bool:
        """Whether the files of a record are of a checkpoint, or of another save that may be running.

        Args:
            record: The record.
            of_sweep: Whether the folder's own record of this token is marked by this sweep.
        """
        for directory in _directories(record.beginning):
            if f"{directory}{record.name}" in self.names(directory) and (directory or not of_sweep):
                return True
            if self.is_named(record.token, directory):
                return True
        return False

    def is_named(self, word: str, directory: str) -> bool:
        """Whether metadata in a directory names files with this in their names, or a save of this id."""
        if directory not in self._metadata:
            names = [name for name in self.names(directory) if _METADATA.fullmatch(name.removeprefix(directory))]
            self._metadata[directory] = [self.place.find(name) or b"" for name in names]
        # A pickle has names and ids as they are: they are ASCII here.
        return any(word.encode() in data for data in self._metadata[directory])


def _directories(name: str) -> Iterator[str]:
    """The directories above a file, each with its slash, from the checkpoint's folder on."""
    yield ""
    for end, character in enumerate(name, 1):
        if character == "/":
            yield name[:end]


def _parent(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _left_by_manifest(folder: _Folder, name: str, tokens: set[str]) -> set[str]:
    """What of a manifest, and of the files that it names, has no more use, where a swept save wrote it."""
    try:
        manifest = Manifest.load(folder.place.find(name) or b"", folder.place.url_of(name))
    except CheckpointError:
        return set()
    written = [record_of_file(file.name) for file in manifest.files]
    if not any(record.token in tokens for record in written if record is not None):
        return set()
    if not folder.is_named(manifest.save_id, ""):
        return {name}
    # The save was committed, and killed before it deleted the files of the checkpoint that it had replaced.
    replaced = [(file, record_of_file(file)) for file in manifest.replaced]
    return {
        file
        for file, record in replaced
        if record is not None and not folder.keeps(record, of_sweep=False) and file in folder.names(_parent(file))
    }
