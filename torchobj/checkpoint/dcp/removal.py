"""Deletes files of distributed checkpoints: of those that are removed or replaced, and of saves that failed.

A checkpoint has the files that its metadata names. A save that failed or was killed left the files that no metadata
names. They are recognised by the names that `StorageWriter` creates (`object_names`), and kept if metadata in their
checkpoint's folder contains their token; `checkpoint.leftovers` sweeps them. A save must not take longer than their age
between the last file of a rank and the metadata.
"""

import contextlib
import datetime
import itertools
import logging
import math
from collections.abc import Iterable

from torchobj.checkpoint.dcp.metadata import load_metadata
from torchobj.checkpoint.dcp.object_names import METADATA, FileNames, attempt_of, is_item_file, is_metadata, ranked
from torchobj.checkpoint.leftovers import EXPIRED_AFTER, Attempt, AttemptsDir, of_age
from torchobj.config import StoreConfig
from torchobj.exceptions import CheckpointError, ConfigError, ObjectNotFoundError, StoreError
from torchobj.store import Store
from torchobj.urls import Url

__all__ = ["DistributedDir", "remove", "sweep"]

logger = logging.getLogger("torchobj")


class DistributedDir(AttemptsDir[str]):
    """The folder of a distributed checkpoint, or one with several in its subfolders."""

    def attempt_of(self, name: str) -> Attempt[str] | None:
        """Returns the attempt that wrote a file of items."""
        return attempt_of(name)

    def probe(self) -> tuple[Attempt[str], str]:
        """Returns a new attempt, and the name of a file of it."""
        names = FileNames("")
        return names.attempt, names.file(0)

    def uncommitted(self, attempts: set[Attempt[str]]) -> set[Attempt[str]]:
        """Returns the attempts whose token no metadata contains."""
        found = set(attempts)
        for folder in {attempt.checkpoint for attempt in attempts}:
            listed = (info.key.removeprefix(folder) for info in self.objects(folder, "/"))
            for name in {METADATA, *filter(is_metadata, listed)}:
                # A token is ASCII, which a pickle contains unchanged.
                data = self.find(folder + name) or b""
                found = {each for each in found if each.checkpoint != folder or each.nonce.encode() not in data}
        return found

    def files_of(self, metadata: str) -> set[str] | None:
        """Returns the names of the files that are deleted when a checkpoint is removed or replaced.

        These are the files that the metadata names. If another program wrote all of them, these are also the older
        files of `StorageWriter`: the other program has replaced their checkpoint.

        Args:
            metadata: Name of the checkpoint's metadata.

        Returns:
            The names, relative to the folder; None if the metadata does not exist.

        Raises:
            CheckpointError: The metadata cannot be read.
            StoreError: A request failed.
        """
        data, url = self.find(metadata), self.url_of(metadata)
        if data is None:
            return None
        try:
            named = {info.relative_path for info in load_metadata(data, url).storage_data.values()}
        except (AttributeError, TypeError) as error:
            raise CheckpointError(f"{url}: cannot be read: {error!r}") from error
        files = {name for name in named if is_item_file(name)}
        if files != named:
            others = ", ".join(sorted(map(repr, named - files)))
            logger.warning("%s names objects that are not files of a checkpoint; not deleted: %s", self.url, others)
        if files and not any(map(attempt_of, files)):
            files |= self._older_files(metadata)
        return files

    def _older_files(self, metadata: str) -> set[str]:
        """Returns the files of `StorageWriter` that are older than the metadata, and that no metadata names."""
        listed = self.objects("")
        time = next((info.last_modified for info in listed if info.key == metadata), None)
        if time is None:
            return set()
        files = [each for each in self.of_attempts(listed) if not each.attempt.checkpoint]
        replaced = self.uncommitted(of_age(files, time, datetime.datetime.resolution))
        return {each.key for each in files if each.attempt in replaced}

    def discard(self, names: Iterable[str]) -> None:
        """Deletes the files of a save that failed. A failure is only logged."""
        try:
            self.delete(names)
        except StoreError as error:
            message = "%s: could not delete the files of a failed save; sweep() deletes them later: %s"
            logger.warning(message, self.url, error)


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
    checkpoint, store = DistributedDir(str(url), config), Store(url.base, config=config)
    if not url.key.endswith("/"):
        with contextlib.suppress(ObjectNotFoundError):
            store.head(url.key)
            return store.delete(url.key)
    is_found = False
    # First the metadata of all ranks, then the metadata of each rank.
    for rank in itertools.chain([None], itertools.count()):
        metadata = ranked(METADATA, rank)
        files = checkpoint.files_of(metadata)
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
    folder = DistributedDir(url, config)
    if folder.url == "file://":
        raise ConfigError(f"url={url!r}: must be a folder, as file:///checkpoints")
    return sorted(folder.url_of(each.key) for each in folder.sweep_idle(older_than_s) if each.upload is None)
