"""Deletes the files of distributed saves that were killed: files of expired records that no metadata names.

Records are untrusted. A record identifies files by a token that only torchobj's writer puts into names, below the
record's own folder. A file is not deleted if metadata or another record, in any folder between them, names its token.
"""

import dataclasses
import datetime
import logging
import math
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torchobj.checkpoint.dcp.attempt import RECORDS, Record, is_running, record_of_file
from torchobj.checkpoint.dcp.checkpoint_dir import MANIFEST, METADATA, CheckpointDir
from torchobj.checkpoint.dcp.manifest import Manifest
from torchobj.checkpoint.server import time_of_store
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import CheckpointError, ConfigError, PreconditionFailedError
from torchobj.store import ObjectInfo

__all__ = ["sweep", "sweep_expired"]

logger = logging.getLogger("torchobj")

#: Age at which a record expires. A save renews its records every hour.
EXPIRED_AFTER_S = 86_400.0

#: Number of threads that mark records, one request at a time each.
_MARK_THREADS = 16

#: Maximum size of a record that is read.
_MAX_RECORD_BYTES = 8192

#: Names of metadata and manifests, of all ranks or of one rank.
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
    """Deletes the files of saves by `StorageWriter` that were killed, or whose cleanup failed.

    Deletes only files that the record of an expired save names and no `.metadata` names, unfinished uploads of such
    files, and the records. A running save renews its records every hour. For the steps of a `CheckpointManager`, use
    its own `sweep`.

    Args:
        url: Folder of a checkpoint, or of checkpoints in subfolders: `s3://bucket/run`.
        older_than_s: A save expires if its record was not renewed for this many seconds, by the store's clock. A
            running save fails if it is swept: use more than two hours, unless no save is running.
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
        checkpoint = folder.below(parent)
        deleted += map(checkpoint.url_of, sweep_expired(checkpoint, own, now, older_than_s))
    return sorted(deleted)


def sweep_expired(
    checkpoint: CheckpointDir,
    records: Iterable[ObjectInfo],
    now: datetime.datetime | None,
    older_than_s: float = EXPIRED_AFTER_S,
) -> list[str]:
    """Deletes the files of expired records, and these records.

    Args:
        checkpoint: Folder of the records.
        records: Records, as listed.
        now: Time by the store's clock; None if it is unknown: no record expires then.
        older_than_s: Age at which a record expires.

    Returns:
        The names of the deleted objects.

    Raises:
        StoreError: A request failed.
    """
    age = datetime.timedelta(seconds=older_than_s)
    expired = [
        info
        for info in records
        if now is not None and info.last_modified is not None and now - info.last_modified >= age
    ]
    if not expired:
        return []
    with ThreadPoolExecutor(_MARK_THREADS) as threads:
        marked = list(threads.map(lambda info: _marked(checkpoint, info), expired))
    swept = [record for record in marked if record is not None]
    return _remove(checkpoint, swept) if swept else []


def _marked(checkpoint: CheckpointDir, info: ObjectInfo) -> Record | None:
    """Marks a record as swept. Returns None if it is invalid, was renewed since, or belongs to a running save."""
    # An object that is too large, or of unknown size, is not read, and rejected like an empty one.
    is_read = info.size is not None and info.size <= _MAX_RECORD_BYTES
    data = checkpoint.find(info.key) if is_read else b""
    if data is None or is_running(info.key):
        return None
    try:
        record = Record.load(data, info.key, checkpoint.url_of(info.key))
    except CheckpointError as error:
        logger.warning("%s; none of its files is deleted", error)
        return None
    marked = record._replace(is_swept=True)
    try:
        checkpoint.put(record.name, marked.dump(), if_version=info.version)
    except PreconditionFailedError:
        return None
    return marked


def _remove(checkpoint: CheckpointDir, swept: list[Record]) -> list[str]:
    """Deletes the remaining files of saves whose records are marked, and then the records."""
    folder = _Folder(checkpoint)
    leftovers: set[str] = set()
    for record in swept:
        if folder.keeps(record, of_sweep=True):
            continue
        leftovers.update(name for name in folder.names(_parent(record.beginning)) if record.owns(name))
        checkpoint.abort_uploads(record.beginning, record.owns)
    tokens = {record.token for record in swept}
    for name in [name for name in folder.names("") if _MANIFEST.fullmatch(name)]:
        leftovers |= _left_by_manifest(folder, name, tokens)
    leftovers = set(checkpoint.owned(sorted(leftovers)))
    checkpoint.delete(sorted(leftovers))
    # Last, so a sweep that is killed can be repeated.
    records = [record.name for record in swept]
    checkpoint.delete(records)
    return sorted([*leftovers, *records])


class _Folder:
    """The objects in a checkpoint's folder. Lists each directory once."""

    def __init__(self, checkpoint: CheckpointDir) -> None:
        self.checkpoint = checkpoint
        self._names: dict[str, set[str]] = {}
        self._metadata: dict[str, list[bytes]] = {}

    def names(self, directory: str) -> set[str]:
        """Returns the objects directly in a directory."""
        if directory not in self._names:
            self._names[directory] = {info.key for info in self.checkpoint.objects(directory, "/")}
        return self._names[directory]

    def keeps(self, record: Record, *, of_sweep: bool) -> bool:
        """Returns whether the files of a record belong to a checkpoint, or to another save that may be running.

        Args:
            record: The record.
            of_sweep: Whether this sweep marked the folder's own record with this token.
        """
        for directory in _directories(record.beginning):
            if f"{directory}{record.name}" in self.names(directory) and (directory or not of_sweep):
                return True
            if self.is_named(record.token, directory):
                return True
        return False

    def is_named(self, word: str, directory: str) -> bool:
        """Returns whether metadata in a directory contains `word`, a token of files or the id of a save."""
        if directory not in self._metadata:
            names = [name for name in self.names(directory) if _METADATA.fullmatch(name.removeprefix(directory))]
            self._metadata[directory] = [self.checkpoint.find(name) or b"" for name in names]
        # Tokens and ids are ASCII, which a pickle contains unchanged.
        return any(word.encode() in data for data in self._metadata[directory])


def _directories(name: str) -> Iterator[str]:
    """Yields the directories above a file, each with its slash, starting with the checkpoint's folder."""
    yield ""
    for end, character in enumerate(name, 1):
        if character == "/":
            yield name[:end]


def _parent(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _left_by_manifest(folder: _Folder, name: str, tokens: set[str]) -> set[str]:
    """Returns the unused files that a manifest of a swept save names, or the manifest itself."""
    try:
        manifest = Manifest.load(folder.checkpoint.find(name) or b"", folder.checkpoint.url_of(name))
    except CheckpointError:
        return set()
    written = [record_of_file(file.name) for file in manifest.files]
    if not any(record.token in tokens for record in written if record is not None):
        return set()
    if not folder.is_named(manifest.save_id, ""):
        return {name}
    # The save was committed, but killed before it deleted the files that it replaced.
    replaced = [(file, record_of_file(file)) for file in manifest.replaced]
    return {
        file
        for file, record in replaced
        if record is not None and not folder.keeps(record, of_sweep=False) and file in folder.names(_parent(file))
    }
