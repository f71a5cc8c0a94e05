"""Where a distributed checkpoint lies: its URL, the keys of its objects, and the store that holds them."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from torchobj import _torchobj
from torchobj.checkpoint.keys import is_canonical, without_links
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import ConfigError, ObjectNotFoundError, UnsupportedError
from torchobj.store import ObjectInfo, Store
from torchobj.urls import SCHEMES, parse_url

__all__ = ["MANIFEST", "METADATA", "Place", "Placed", "is_item_file", "ranked"]

#: The object that makes a checkpoint: torch's own name for it.
METADATA = ".metadata"
#: What lists the objects of a checkpoint.
MANIFEST = "_torchobj_manifest.json"


def ranked(name: str, rank: int | None) -> str:
    """The name of an object, as each rank writes its own without collectives; as torch has it for `.metadata`."""
    return name if rank is None else f"__{rank}{name}"


def is_item_file(name: Any) -> bool:
    """Whether a name that a checkpoint gives, as anybody may have written it, is of a file of items in its folder."""
    return isinstance(name, str) and name.endswith(DEFAULT_SUFFIX) and is_canonical(name)


class Place:
    """The folder of a checkpoint. Is pickled as URL and configuration.

    Args:
        url: `s3://bucket/folder`, `file:///folder` or `memory://name/folder`; a slash at its end is dropped.
        config: How to reach it.

    Raises:
        ConfigError: No URL.
    """

    def __init__(self, url: str | os.PathLike[str], config: StoreConfig) -> None:
        if not isinstance(url, str):
            raise ConfigError(f"checkpoint_id={url!r}: must be a URL as a str; a path would lose one of its slashes")
        self._parsed = parse_url(url)
        self._config = config
        self._folder = self._parsed.key.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (self.url, self._config)

    def __repr__(self) -> str:
        return f"Place({self.url!r})"

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
        """The store, for what gathers and scatters."""
        return _torchobj.NativeStore(self._parsed.scheme, self._parsed.bucket, self._config)

    def below(self, directory: str) -> "Place":
        """A folder in this one; itself where the name is empty."""
        return Place(self.url_of(directory), self._config)

    def key(self, name: str) -> str:
        """The key of an object of the folder."""
        return f"{self._folder}/{name}" if self._folder else name

    def url_of(self, name: str) -> str:
        """The URL of an object of the folder."""
        return f"{self._parsed.base}/{self.key(name)}"

    def get(self, name: str) -> bytes:
        """An object's bytes.

        Raises:
            ObjectNotFoundError: There is none.
        """
        return bytes(self.store.get(self.key(name))[:])

    def find(self, name: str) -> bytes | None:
        """An object's bytes; None where there is no such object."""
        try:
            return self.get(name)
        except ObjectNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Whether there is such an object."""
        return self.head(name) is not None

    def head(self, name: str) -> ObjectInfo | None:
        """An object's size and version; None where there is no such object."""
        try:
            return self.store.head(self.key(name))
        except ObjectNotFoundError:
            return None

    def put(self, name: str, data: bytes, if_match: str | None = None) -> None:
        """Writes an object; with a version, only over the object of this version, where the store can.

        Raises:
            PreconditionFailedError: The object has another version.
        """
        try:
            self.store.put(self.key(name), data, if_match=if_match)
        except UnsupportedError:
            self.store.put(self.key(name), data)

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects. One that does not exist is no error; files behind a symbolic link stay."""
        keys = [self.key(name) for name in self.owned(names)]
        if keys:
            self.store.delete(keys)

    def owned(self, names: Iterable[str]) -> list[str]:
        """The names without those of files that a symbolic link leads to from the folder."""
        return without_links(Path("/", self._folder) if self._parsed.scheme == "file" else None, names)

    def abort_uploads(self, beginning: str, owns: Callable[[str], bool]) -> None:
        """Aborts unfinished uploads of objects whose names begin like this, of those names that are owned."""
        # A store of files looks for uploads in all of its root.
        is_file = self._parsed.scheme == "file"
        store, folder = (Store(self.url, config=self._config), "") if is_file else (self.store, self.key(""))
        for upload in store.unfinished_uploads(folder + beginning):
            name = upload.key.removeprefix(folder)
            if owns(name) and self.owned([name]):
                store.abort_upload(upload)

    def objects(self, beginning: str, delimiter: str | None = None) -> list[ObjectInfo]:
        """The objects whose names begin like this, with their names as keys; with a delimiter, those before one.

        Raises:
            BucketNotFoundError: There is no such bucket.
        """
        folder = self.key("")
        try:
            listed = list(self.store.list(folder + beginning, delimiter))
        except ObjectNotFoundError:
            # A folder that does not exist holds nothing; a bucket that does not exist is an error.
            if self._parsed.scheme == "s3":
                raise
            return []
        return [dataclasses.replace(info, key=info.key.removeprefix(folder)) for info in listed]


class Placed:
    """What torch gives a checkpoint to, or takes it from, at a URL. The first base, before torch's.

    Args:
        url: The checkpoint's folder.
        config: How to reach it; also s3torchconnector's.
        region, endpoint_url: In place of the configuration's.

    Raises:
        ConfigError: No URL, or no configuration.
    """

    #: The schemes of the checkpoints that it takes.
    _schemes: ClassVar[tuple[str, ...]] = SCHEMES

    def __init__(
        self,
        url: str,
        config: StoreConfig | S3ClientConfig | None,
        region: str | None,
        endpoint_url: str | None,
    ) -> None:
        super().__init__()
        self._config = store_config(config, region, endpoint_url)
        self._place = Place(url, self._config)

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URL."""
        return self._place.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.checkpoint_id!r})"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a URL where a checkpoint can lie."""
        try:
            return isinstance(checkpoint_id, str) and bool(parse_url(checkpoint_id, cls._schemes))
        except ConfigError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save or load begins, at another URL where one is given.

        Raises:
            ConfigError: It is no URL.
        """
        if checkpoint_id:
            self._place = Place(checkpoint_id, self._config)
