"""Metadata of objects, listings and unfinished uploads."""

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from torchobj import _torchobj

__all__ = ["ListPage", "Listing", "ObjectInfo", "UnfinishedUpload", "time_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing, or the result of `Store.head`.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://info")
        >>> version = store.put("a.txt", b"text", content_type="text/plain")
        >>> info = store.head("a.txt")
        >>> info.key, info.size, info.version == version, info.content_type
        ('a.txt', 4, True, 'text/plain')
    """

    key: str
    """The whole key."""
    size: int | None
    """Size in bytes; None if a listing omits it."""
    version: str | None = None
    """The version of the object: on S3 the ETag, with its quotes; on GCS the generation."""
    last_modified: datetime | None = None
    """Time of the last write, in UTC; None if the store returns none, or a year above 9999."""
    storage_class: str | None = None
    """Storage class as named by the store; None if it is not returned."""
    content_type: str | None = None
    """Content type; like the fields below, from `head` only."""
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """User-defined metadata: names in lower case, and values."""


class ListPage(NamedTuple):
    """A page of a listing, from `Store.list(...).pages()`.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://pages")
        >>> for key in ("a", "folder/b", "folder/c"):
        ...     _ = store.put(key, b"")
        >>> [page] = store.list(delimiter="/").pages()
        >>> [info.key for info in page.objects], page.prefixes
        (['a'], ['folder/'])
    """

    objects: list[ObjectInfo]
    """Objects in key order, or as S3 Express lists them."""
    prefixes: list[str]
    """Common prefixes, if the listing has a delimiter."""


class UnfinishedUpload(NamedTuple):
    """An upload in parts that was neither committed nor aborted. Its parts are stored and billed.

    Example:
        ```python
        for upload in store.unfinished_uploads("checkpoints/"):
            store.abort_upload(upload)
        ```
    """

    key: str
    """Key of the object."""
    upload_id: str
    """Upload id of the store."""
    begun: datetime | None
    """Start of the upload, in UTC. A recent upload may belong to a running writer."""


def time_of(modified_ms: int | None) -> datetime | None:
    """Converts milliseconds since 1970 to a datetime in UTC. None if a datetime cannot represent them."""
    try:
        return None if modified_ms is None else datetime.fromtimestamp(modified_ms / 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return None


class Listing:
    """Iterates over the objects under a prefix. The next page is fetched while a page is used."""

    def __init__(
        self, native: "_torchobj.NativeStore", prefix: str, delimiter: str | None, start_after: str | None
    ) -> None:
        self._native, self._arguments = native, (prefix, delimiter, start_after)

    def __repr__(self) -> str:
        prefix, delimiter, start_after = self._arguments
        return f"<Listing of prefix={prefix!r}, delimiter={delimiter!r}, start_after={start_after!r}>"

    def pages(self) -> Iterator[ListPage]:
        """Iterates over the pages of the listing, with common prefixes."""
        for entries, prefixes in self._native.list(*self._arguments):
            objects = [ObjectInfo(key, size, version, time_of(ms), kind) for key, size, version, ms, kind in entries]
            yield ListPage(objects, list(prefixes))

    def __iter__(self) -> Iterator[ObjectInfo]:
        for page in self.pages():
            yield from page.objects
