"""The folder of a distributed checkpoint or of a manager: its URL, the keys of its objects, and their store.

Also checks keys that are used as paths.
"""

import contextlib
import datetime
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torchobj import _torchobj
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import BucketNotFoundError, ObjectNotFoundError, StoreError
from torchobj.files.links import without_links
from torchobj.store import ListPage, ObjectInfo, Store, UnfinishedUpload
from torchobj.urls import CLOUD_SCHEMES, parse_url

__all__ = ["CheckpointDir", "is_canonical", "was_refused"]


class CheckpointDir:
    """A folder of a store. Pickled as URL and configuration.

    Args:
        url: `s3://bucket/folder`, `gs://bucket/folder`, `file:///folder` or `memory://name/folder`, with or
            without a slash at the end.
        config: Configuration of the store.

    Raises:
        ConfigError: `url` is not a URL of a store.
    """

    def __init__(self, url: str, config: StoreConfig | None) -> None:
        parsed = parse_url(url)
        self.scheme = parsed.scheme
        self._config = resolve(url, config)
        folder = parsed.key.strip("/") if self.scheme == "file" else parsed.key.rstrip("/")
        #: URL of the folder.
        self.url = f"{parsed.base}/{folder}" if folder else parsed.base
        #: The folder of a file store, which does not delete empty folders; None for other stores.
        self.root = Path("/", folder) if self.scheme == "file" else None
        # A file store whose root is not the folder would search more than the folder for uploads.
        self._base, self._bucket = (parsed.base, parsed.bucket) if self.root is None else (self.url, folder)
        self._prefix = f"{folder}/" if folder and self.root is None else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self._config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @functools.cached_property
    def store(self) -> Store:
        """The store, for single objects."""
        return Store(self._base, config=self._config)

    @functools.cached_property
    def native(self) -> "_torchobj.NativeStore":
        """The native store, for bulk reads and writes."""
        return _torchobj.NativeStore(self.scheme, self._bucket, self._config)

    def key(self, name: str) -> str:
        """Returns the key of an object in the store."""
        return self._prefix + name

    def url_of(self, name: str) -> str:
        """Returns the URL of an object."""
        return f"{self.url}/{name}"

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

    def head(self, name: str) -> ObjectInfo | None:
        """Returns size and version of an object; None if it does not exist."""
        try:
            return self.store.head(self.key(name))
        except ObjectNotFoundError:
            return None

    def time(self, name: str) -> datetime.datetime | None:
        """Returns the time by the clock that sets the times of objects; None if listings have no times.

        The clock of this host may be fast, so that recent objects would seem old.

        Args:
            name: Name of a temporary object, which no other writer uses.

        Raises:
            StoreError: The object cannot be written, or the store cannot be listed.
        """
        self.store.put(self.key(name), b"")
        try:
            # A listing, as for the times it is compared with: the response to a HEAD may have no fractions of a second.
            return next((info.last_modified for info in self.objects(name)), None)
        finally:
            with contextlib.suppress(StoreError):
                self.delete([name])

    def objects(self, beginning: str, delimiter: str | None = None) -> list[ObjectInfo]:
        """Lists the objects whose names start with `beginning`, with names as keys; without those below a delimiter.

        Returns:
            The objects; nothing if the folder does not exist.

        Raises:
            BucketNotFoundError: The bucket does not exist.
        """
        listed = [info for page in self.pages(beginning, delimiter) for info in page.objects]
        named = (info for info in listed if info.key.startswith(self.key(beginning)))
        return [info._replace(key=info.key.removeprefix(self._prefix)) for info in named]

    def pages(self, beginning: str, delimiter: str | None = None) -> Iterator[ListPage]:
        """Yields the pages of a listing, as `objects` lists it, with the keys of the store.

        Raises:
            BucketNotFoundError: The bucket does not exist.
        """
        try:
            yield from self.store.list(self.key(beginning), delimiter).pages()
        except ObjectNotFoundError as error:
            if self.scheme in CLOUD_SCHEMES and isinstance(error, BucketNotFoundError):
                raise

    def unfinished_uploads(self, beginning: str = "") -> list[tuple[str, UnfinishedUpload]]:
        """Returns the unfinished uploads of objects whose names start with `beginning`, with the objects' names."""
        uploads = self.store.unfinished_uploads(self.key(beginning))
        return [(upload.key.removeprefix(self._prefix), upload) for upload in uploads]

    def delete(self, names: Iterable[str]) -> list[str]:
        """Deletes objects, except files behind a symbolic link. A missing object is not an error.

        Returns:
            The names of the deleted objects.
        """
        owned = self.owned(names)
        if owned:
            self.store.delete([self.key(name) for name in owned])
        return owned

    def owned(self, names: Iterable[str]) -> list[str]:
        """Returns the names without those that a symbolic link leads to."""
        return without_links(self.root, names)


def was_refused(error: StoreError) -> bool:
    """Returns whether the store refused a write, so that it will never take effect.

    After a lost response, a timeout or a status of 500 and above, an attempt may still take effect later, even if a
    later attempt of the same operation was refused.
    """
    return error.attempts == 1 and error.status is not None and 400 <= error.status < 500


@functools.lru_cache(maxsize=1024)
def is_canonical(path: str) -> bool:
    """Returns whether a path stays below its folder, whichever store interprets it."""
    try:
        # JSON can contain a lone surrogate, which has no UTF-8 encoding.
        path.encode()
    except UnicodeEncodeError:
        return False
    return not {"", ".", ".."} & set(path.split("/")) and "\\" not in path and "\0" not in path
