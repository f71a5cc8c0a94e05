"""The folder of a distributed checkpoint: its URL, the keys of its objects, and their store."""

import dataclasses
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from torchobj import _torchobj
from torchobj.checkpoint.keys import without_links
from torchobj.config import S3ClientConfig, StoreConfig, resolved, store_config
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.store import ObjectInfo, Store, UnfinishedUpload
from torchobj.urls import CLOUD_SCHEMES, SCHEMES, parse_url

__all__ = ["CheckpointDir", "CheckpointStorage"]


class CheckpointDir:
    """The folder of a checkpoint. Pickled as URL and configuration.

    Args:
        url: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder` or `memory://name/folder`, with or
            without a slash at the end.
        config: Configuration of the store.

    Raises:
        ConfigError: `url` is not a URL of a store.
    """

    def __init__(self, url: str | os.PathLike[str], config: StoreConfig) -> None:
        if not isinstance(url, str):
            raise ConfigError(f"checkpoint_id={url!r}: must be a URL as a str; a path would lose one of its slashes")
        self._parsed = parse_url(url)
        self._config = resolved(url, config)
        self._folder = self._parsed.key.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointDir, (self.url, self._config)

    def __repr__(self) -> str:
        return f"CheckpointDir({self.url!r})"

    @property
    def url(self) -> str:
        """The URL of the folder."""
        return f"{self._parsed.base}/{self._folder}" if self._folder else self._parsed.base

    @functools.cached_property
    def store(self) -> Store:
        """The store, for single objects."""
        return Store(self._parsed.base, config=self._config)

    @functools.cached_property
    def native(self) -> "_torchobj.NativeStore":
        """The native store, for bulk reads and writes."""
        return _torchobj.NativeStore(self._parsed.scheme, self._parsed.bucket, self._config)

    def key(self, name: str) -> str:
        """Returns the key of an object of the folder."""
        return f"{self._folder}/{name}" if self._folder else name

    def url_of(self, name: str) -> str:
        """Returns the URL of an object of the folder."""
        return f"{self._parsed.base}/{self.key(name)}"

    def get(self, name: str) -> bytes:
        """Returns the bytes of an object.

        Raises:
            ObjectNotFoundError: The object does not exist.
        """
        return bytes(self.store.get(self.key(name))[:])

    def find(self, name: str) -> bytes | None:
        """Returns the bytes of an object; None if it does not exist."""
        try:
            return self.get(name)
        except ObjectNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Returns whether an object exists."""
        try:
            self.store.head(self.key(name))
        except ObjectNotFoundError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects, except files behind a symbolic link. A missing object is not an error."""
        keys = [self.key(name) for name in self.owned(names)]
        if keys:
            self.store.delete(keys)

    def owned(self, names: Iterable[str]) -> list[str]:
        """Returns the names without those that a symbolic link leads to."""
        return without_links(Path("/", self._folder) if self._parsed.scheme == "file" else None, names)

    def unfinished_uploads(self) -> list[tuple[str, UnfinishedUpload]]:
        """Returns the unfinished uploads of objects of the folder, with the objects' names."""
        store, folder = self._store_of_uploads
        uploads = store.unfinished_uploads(folder)
        return [(upload.key.removeprefix(folder), upload) for upload in uploads]

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Aborts an upload that `unfinished_uploads` returned, and deletes its parts."""
        self._store_of_uploads[0].abort_upload(upload)

    @functools.cached_property
    def _store_of_uploads(self) -> tuple[Store, str]:
        """The store whose uploads are listed, and the folder in it."""
        # A file store searches its whole root for uploads.
        is_file = self._parsed.scheme == "file"
        return (Store(self.url, config=self._config), "") if is_file else (self.store, self.key(""))

    def objects(self, beginning: str, delimiter: str | None = None) -> list[ObjectInfo]:
        """Lists the objects whose names start with `beginning`, with names as keys; without those below a delimiter.

        Raises:
            BucketNotFoundError: The bucket does not exist.
        """
        folder = self.key("")
        try:
            listed = list(self.store.list(folder + beginning, delimiter))
        except ObjectNotFoundError:
            # A folder that does not exist is empty; a bucket that does not exist is an error.
            if self._parsed.scheme in CLOUD_SCHEMES:
                raise
            return []
        return [dataclasses.replace(info, key=info.key.removeprefix(folder)) for info in listed]


class CheckpointStorage:
    """Base of the storage reader and the storage writer, before torch's base: their folder and configuration.

    Args:
        url: Folder of the checkpoint.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Override those of the configuration.

    Raises:
        ConfigError: `url` is not a URL of a store, or `config` is not a configuration.
    """

    #: Schemes of the URLs that it accepts.
    _schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(
        self,
        url: str,
        config: StoreConfig | S3ClientConfig | None,
        region: str | None,
        endpoint_url: str | None,
    ) -> None:
        super().__init__()
        self._config = store_config(config, region, endpoint_url, url=url)
        self._checkpoint = CheckpointDir(url, self._config)

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint."""
        return self._checkpoint.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether `checkpoint_id` is a URL of a store."""
        try:
            return isinstance(checkpoint_id, str) and bool(parse_url(checkpoint_id, cls._schemes))
        except ConfigError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts a new save or load, at `checkpoint_id` if given.

        Raises:
            ConfigError: `checkpoint_id` is not a URL of a store.
        """
        if checkpoint_id:
            self._checkpoint = CheckpointDir(checkpoint_id, self._config)
