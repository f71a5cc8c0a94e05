"""A bucket or folder for Python: read, write, list. Never imports torch."""

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, overload

from torchobj import _torchobj
from torchobj._torchobj import Buffer
from torchobj.buffers import contiguous
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import ConfigError
from torchobj.urls import SCHEMES, parse_url

__all__ = ["ListPage", "Listing", "ObjectInfo", "Store", "UnfinishedUpload", "get_many"]


#: Behind the end of any object; twice as much is still a number of 64 bits with a sign.
_FAR = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing, or the answer to `Store.head`."""

    key: str
    """The whole key."""
    size: int | None
    """Size in bytes; None where a listing does not say it."""
    version: str | None = None
    """What the store calls its version: on S3 the ETag, in its quotes."""
    last_modified: datetime | None = None
    """When it was last written, in UTC."""
    storage_class: str | None = None
    """The store's word for its storage class, where it says one."""
    content_type: str | None = None
    """From `head` only, as all below."""
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The user's own names, in lower case, and values."""


class ListPage(NamedTuple):
    """One page of a listing."""

    objects: list[ObjectInfo]
    """Objects in key order, or as S3 Express lists them."""
    prefixes: list[str]
    """Common prefixes, where the listing has a delimiter."""


class UnfinishedUpload(NamedTuple):
    """An upload in parts that was neither committed nor aborted; its parts are stored, and billed."""

    key: str
    """The object that it would have become."""
    upload_id: str
    """The store's name for it."""
    begun: datetime | None
    """When it began, in UTC. One that began a moment ago may be another writer's."""


def _time(modified_ms: int | None) -> datetime | None:
    return None if modified_ms is None else datetime.fromtimestamp(modified_ms / 1000, tz=UTC)


class Listing:
    """Objects under a prefix, one after the other; pages are fetched while they are used."""

    def __init__(
        self, native: "_torchobj.NativeStore", prefix: str, delimiter: str | None, start_after: str | None
    ) -> None:
        self._native, self._arguments = native, (prefix, delimiter, start_after)

    def pages(self) -> Iterator[ListPage]:
        """The listing by pages, with the common prefixes."""
        for entries, prefixes in self._native.list(*self._arguments):
            objects = [ObjectInfo(key, size, version, _time(ms), kind) for key, size, version, ms, kind in entries]
            yield ListPage(objects, list(prefixes))

    def __iter__(self) -> Iterator[ObjectInfo]:
        for page in self.pages():
            yield from page.objects


class Store:
    """A bucket or folder.

    Safe to use from many threads at once. Ctrl-C interrupts any call. Works in a forked child after its parent used
    it, and is pickled as its URL and configuration, without credentials.

    Args:
        url: `s3://bucket`, `file:///folder` or `memory://name`. Keys are whole keys of the bucket, or paths below the
            folder. `memory://` lives as long as the process.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region: In place of the configuration's.
        endpoint_url: In place of the configuration's.

    Raises:
        ConfigError: The URL has another scheme, no bucket, or a key.

    Example:
        >>> store = Store("memory://example")
        >>> store.put("greeting", b"hello") and bytes(store.get("greeting"))
        b'hello'
    """

    def __init__(
        self,
        url: str,
        *,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        parsed = parse_url(url)
        if parsed.scheme == "file":
            place = parsed.key.strip("/")
            self._url = f"file:///{place}".rstrip("/") if place else "file://"
        else:
            if parsed.key:
                raise ConfigError(
                    f"url={url!r}: a Store is a whole bucket, as {parsed.base!r}; give keys to its methods"
                )
            place, self._url = parsed.bucket, parsed.base
        self._config = store_config(config, region, endpoint_url)
        self._native = _torchobj.NativeStore(parsed.scheme, place, self._config)

    @property
    def url(self) -> str:
        """The URL, without a slash at its end."""
        return self._url

    @property
    def config(self) -> StoreConfig:
        """The configuration."""
        return self._config

    def __repr__(self) -> str:
        return f"Store({self._url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_store, (self._url, self._config)

    def get(self, key: str, *, version: str | None = None) -> Buffer:
        """Reads an object.

        One request where it is small, 8 MiB ranges in parallel where it is large; no HEAD.

        Args:
            key: The object.
            version: The version that must answer.

        Returns:
            Its bytes, in memory of torchobj's that lives as long as the buffer and its views.

        Raises:
            ObjectNotFoundError: There is none.
            ObjectChangedError: It is not, or no longer, of this version.
            StoreError: What persists after the retries.
        """
        return self._native.get(key, version=version)

    @overload
    def get_many(
        self, keys: Iterable[str], into: None = None, *, return_errors: Literal[False] = False
    ) -> list[Buffer]: ...
    @overload
    def get_many(
        self, keys: Iterable[str], into: Sequence[Any], *, return_errors: Literal[False] = False
    ) -> list[int]: ...
    @overload
    def get_many(
        self, keys: Iterable[str], into: Sequence[Any] | None = None, *, return_errors: bool
    ) -> list[Buffer | int | Exception]: ...

    def get_many(self, keys: Iterable[str], into: Sequence[Any] | None = None, *, return_errors: bool = False) -> Any:
        """Reads objects, as many at a time as `max_in_flight` says, in one call without the GIL.

        Args:
            keys: The objects.
            into: A writable, contiguous buffer for each: bytearray, numpy array, CPU tensor, memoryview. It may be
                larger than the object.
            return_errors: An exception stands in the list for each object that could not be read.

        Returns:
            A `Buffer` for each key, in order; with `into` the number of bytes written to each buffer.

        Raises:
            StoreError: The first that persists after its retries; the other reads are given up.
            ConfigError: A buffer is too small for its object; or `keys` is one str.
            ValueError: A buffer is read-only, or there are not as many as keys.
        """
        jobs = [(self._native, key) for key in _several("keys", keys)]
        return _get_jobs(jobs, into, return_errors=return_errors)

    def get_range(self, key: str, start: int, end: int | None = None) -> Buffer:
        """Reads bytes `start..end`, the end excluded.

        Args:
            key: The object.
            start: The first byte; a negative one counts from the end of the object, and takes no `end`.
            end: One behind the last byte; an end behind the object's is cut. An end that is the start is an empty
                buffer without a request: even of an object that does not exist.

        Raises:
            RangeError: The range begins behind the end of the object.
            ConfigError: The end is before the start, or there is one with a negative start.
        """
        return self._native.get(key, *_range(start, end))

    def get_ranges(self, key: str, ranges: Iterable[tuple[int, int | None]]) -> list[Buffer]:
        """Reads ranges of one object, in parallel. Each is as for `get_range`.

        Raises:
            RangeError: A range begins behind the end of the object.
        """
        return self._native.get_ranges([(key, *_range(start, end)) for start, end in ranges])

    def put(
        self,
        key: str,
        data: Any,
        *,
        content_type: str | None = None,
        content_encoding: str | None = None,
        content_disposition: str | None = None,
        content_language: str | None = None,
        cache_control: str | None = None,
        storage_class: str | None = None,
        metadata: Mapping[str, str] | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Writes an object: in one request, or in parts cut from `data` without a copy. It appears whole or not at all.

        Args:
            key: The object.
            data: Any contiguous buffer, CPU tensors included. Not to be changed before this returns.
            content_type, content_encoding, content_disposition, content_language, cache_control: Headers of the object.
            storage_class: In place of the configuration's.
            metadata: Names and printable ASCII values of your own.
            if_none_match: Only if there is no such object.
            if_match: Only if the object is of this version.

        Returns:
            The version of the object.

        Raises:
            PreconditionFailedError: The condition does not hold.
            InvalidKeyError: The store cannot hold this key.
            UnsupportedError: The store keeps no headers, or no conditions.
        """
        headers = (content_type, content_encoding, content_disposition, content_language, cache_control, storage_class)
        attributes = (*headers, sorted((metadata or {}).items()))
        return self._native.put(key, contiguous(data), attributes, if_none_match, if_match)

    def head(self, key: str) -> ObjectInfo:
        """Size, version, headers and metadata of an object.

        Raises:
            ObjectNotFoundError: There is none.
        """
        size, version, modified_ms, described = self._native.head(key)
        kind, encoding, disposition, language, cache, storage, metadata = described
        headers = (storage, kind, encoding, disposition, language, cache)
        return ObjectInfo(key, size, version, _time(modified_ms), *headers, dict(metadata))

    def list(self, prefix: str = "", delimiter: str | None = None, *, start_after: str | None = None) -> Listing:
        """Lists objects whose keys begin with `prefix`, in key order; in no order where S3 Express lists them.

        Args:
            prefix: Raw: `train` also selects `training/x`.
            delimiter: Keys with it behind the prefix are folded into the common prefixes of `Listing.pages()`.
            start_after: Only keys that sort behind this.

        Raises:
            StoreError: The listing names a key twice or out of order, or repeats a page; or what persists after the
                retries.
        """
        return Listing(self._native, prefix, delimiter, start_after)

    def copy(self, source: str, key: str) -> str:
        """Copies an object on the server, with its attributes, and returns the version of the copy.

        Args:
            source: A key of this store, or a URL of the same scheme and account: what begins with `s3://`, `file://`
                or `memory://`.
            key: The copy.
        """
        is_url = source.startswith(tuple(f"{scheme}://" for scheme in SCHEMES))
        return self._native.copy(source if is_url else self._native.url(source), key)

    def delete(self, keys: str | Iterable[str], *, if_match: str | None = None) -> None:
        """Deletes one object or many. One that does not exist is no error.

        On `file://` the folders above a deleted file stay.

        Args:
            keys: The object, or objects.
            if_match: Only if the one object is of this version. AWS checks it; other servers may ignore it and delete.

        Raises:
            PreconditionFailedError: The object is of another version.
            ConfigError: `if_match` with several keys.
            UnsupportedError: The store has no conditional deletes.
        """
        several = [keys] if isinstance(keys, str) else list(keys)
        if if_match is None:
            self._native.delete(several)
        elif len(several) == 1:
            self._native.delete_if(several[0], if_match)
        else:
            raise ConfigError(f"if_match={if_match!r}: goes with one key, not with {len(several)}")

    def unfinished_uploads(self, prefix: str = "") -> Sequence[UnfinishedUpload]:
        """Uploads that writers left behind which were killed; what fails otherwise is aborted by itself."""
        return [UnfinishedUpload(key, name, _time(begun_ms)) for key, name, begun_ms in self._native.uploads(prefix)]

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Forgets an unfinished upload and its parts. One that is gone is no error."""
        self._native.abort_upload(upload.key, upload.upload_id)


def _open_store(url: str, config: StoreConfig) -> Store:
    return Store(url, config=config)


def _range(start: int, end: int | None) -> tuple[int, int | None]:
    """The range as numbers that a store takes: what is behind `_FAR` is behind the end of any object."""
    start = operator.index(start)
    first = max(-_FAR, min(start, _FAR))
    if end is None:
        return first, None
    length = operator.index(end) - start
    if start < 0 or length < 0:
        raise ConfigError(f"range {start}..{end}: must have 0 <= start <= end, or a negative start alone")
    return first, first + min(length, _FAR)


def _several(name: str, given: Iterable[str]) -> Iterable[str]:
    if isinstance(given, str):
        raise ConfigError(f"{name}={given!r}: must be a list, as [{given!r}]; a str would be read letter by letter")
    return given


def _get_jobs(
    jobs: Sequence[tuple["_torchobj.NativeStore", str]], into: Sequence[Any] | None, *, return_errors: bool
) -> Any:
    if into is None:
        return _torchobj.get_many(jobs, return_errors=return_errors)
    if len(into) != len(jobs):
        raise ConfigError(f"into has {len(into)} buffers for {len(jobs)} objects")
    return _torchobj.get_many(jobs, [contiguous(buffer) for buffer in into], return_errors=return_errors)


def get_many(
    urls: Iterable[str],
    into: Sequence[Any] | None = None,
    *,
    config: StoreConfig | S3ClientConfig | None = None,
    return_errors: bool = False,
) -> Any:
    """Reads objects of any buckets and schemes in one call: `Store.get_many` by URLs.

    Raises:
        ConfigError: `urls` is one str, or one of them is no URL; otherwise as there.

    Example:
        >>> Store("memory://a").put("x", b"1") and Store("memory://b").put("y", b"2") and None
        >>> [bytes(data) for data in get_many(["memory://a/x", "memory://b/y"])]
        [b'1', b'2']
    """
    config = store_config(config)
    stores: dict[str, _torchobj.NativeStore] = {}
    jobs = []
    for url in _several("urls", urls):
        parsed = parse_url(url)
        store = stores.get(parsed.base)
        if store is None:
            store = stores[parsed.base] = _torchobj.NativeStore(parsed.scheme, parsed.bucket, config)
        jobs.append((store, parsed.key))
    return _get_jobs(jobs, into, return_errors=return_errors)
