"""Metadata of objects, listings and unfinished uploads."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from torchobj import _torchobj
from torchobj.exceptions import ConfigError

__all__ = ["ListPage", "Listing", "ObjectInfo", "Scan", "UnfinishedUpload", "info_of", "time_of"]


class ObjectInfo(NamedTuple):
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
    """The key, as methods of the store take it."""
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
    metadata: Mapping[str, str] = {}
    """User-defined metadata: names in lower case, and values."""
    checksum: str | None = None
    """From `head_many(checksum=True)`: algorithm and hexadecimal digits of that of all bytes, as `crc32c:e3069283`."""

    def __hash__(self) -> int:
        # A mapping has no hash; equal objects have equal hashes without it.
        return hash((*self[:10], self.checksum))


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


class _ObjectStream:
    """The objects of a listing or scan. Each use lists again."""

    def __init__(self, native: "_torchobj.NativeStore", **arguments: Any) -> None:
        self._native, self._arguments = native, arguments

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items())
        return f"<{type(self).__name__} of {given}>"

    def _start(self) -> Any:
        """The native iterator over pages."""
        raise NotImplementedError

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Lists, and exports the objects by the Arrow PyCapsule interface. The columns are those of `to_arrow`."""
        return self._start().__arrow_c_stream__(requested_schema)

    def to_arrow(self) -> Any:
        """Lists into record batches of 16,384 rows or more.

        Returns:
            A `pyarrow.RecordBatchReader` with the columns key (string), size (uint64), version (string), last_modified
            (timestamp in ms, UTC) and storage_class (dictionary of strings); for a scan also content_type (string) and
            metadata (map of strings). It raises OSError with the message of the `StoreError` if a request fails.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        try:
            import pyarrow as package  # type: ignore[import-untyped]  # noqa: PLC0415  optional
        except ImportError as error:
            raise ConfigError(
                "to_arrow() returns objects of pyarrow, which is not installed: pip install pyarrow"
            ) from error
        return package.RecordBatchReader.from_stream(self)


class Listing(_ObjectStream):
    """Iterates over the objects under a prefix. Each iteration lists again.

    Libraries of Arrow read it without a Python object per key: `pyarrow.table(listing)`, `polars.DataFrame(listing)`.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://listing")
        >>> for key in ("a.txt", "b.jpg", "c.jpg"):
        ...     _ = store.put(key, b"1234")
        >>> [info.key for info in store.list(glob="*.jpg")]
        ['b.jpg', 'c.jpg']
        >>> store.list().to_arrow().read_all()["size"].to_pylist()
        [4, 4, 4]
    """

    def _start(self) -> "_torchobj.ListPages":
        return self._native.list(**self._arguments)

    def pages(self) -> Iterator[ListPage]:
        """Iterates over the pages of the listing, with common prefixes."""
        for entries, prefixes in self._start():
            yield ListPage(_objects(entries), list(prefixes))

    def __iter__(self) -> Iterator[ObjectInfo]:
        for page in self.pages():
            yield from page.objects


class Scan(_ObjectStream):
    """Iterates over the objects under a prefix with their headers and user metadata, in no order. Each iteration lists
    again.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://scan")
        >>> _ = store.put("a", b"", metadata={"label": "cat"}), store.put("b", b"")
        >>> [(info.key, info.metadata) for info in store.scan(has_metadata="label")]
        [('a', {'label': 'cat'})]
    """

    def _start(self) -> "_torchobj.ScanPages":
        return _torchobj.ScanPages(self._native, **self._arguments)

    def __iter__(self) -> Iterator[ObjectInfo]:
        for page in self._start():
            yield from map(info_of, page)


def _objects(entries: "Sequence[_torchobj._Entry]") -> list[ObjectInfo]:
    # `tuple.__new__` takes half of the time of `ObjectInfo`, and `time_of` a tenth of that of a listing.
    new, kind, at, none = tuple.__new__, ObjectInfo, datetime.fromtimestamp, (None,) * 5
    try:
        return [
            new(kind, (key, size, version, None if ms is None else at(ms / 1000, UTC), storage_class, *none, {}, None))
            for key, size, version, ms, storage_class in entries
        ]
    except (ValueError, OverflowError, OSError):
        return [
            ObjectInfo(key, size, version, time_of(ms), storage_class, metadata={})
            for key, size, version, ms, storage_class in entries
        ]


def info_of(head: "_torchobj._Head") -> ObjectInfo:
    """Converts the result of a HEAD request."""
    key, size, version, modified_ms, attributes, checksum = head
    return ObjectInfo(key, size, version, time_of(modified_ms), checksum=checksum, **attributes)
