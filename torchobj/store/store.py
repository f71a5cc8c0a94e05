"""Reads, writes and lists a bucket or folder. Does not import torch."""

import errno
import operator
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from torchobj import _torchobj
from torchobj._torchobj import Buffer, ObjectReader, ObjectRef
from torchobj.config import StoreConfig, resolve, store_config
from torchobj.exceptions import ConfigError, ObjectNotFoundError
from torchobj.store.attributes import ObjectAttributes, native_attributes
from torchobj.store.buffers import contiguous
from torchobj.store.conditions import check_condition
from torchobj.store.file_objects import ObjectWriter, OpenOptions, TextFile, WriteConditions
from torchobj.store.file_objects import open as open_object
from torchobj.store.object_info import Listing, ObjectInfo, Scan, UnfinishedUpload, info_of, time_of
from torchobj.store.reads import checked_list, read_jobs
from torchobj.store.transfers import FilePath, ProgressOption, Transfer, counters_to, make_folders
from torchobj.urls import SCHEMES, canonical_url, parse_url

__all__ = ["Store", "list_buckets"]

#: Larger than any object; twice this value fits a signed 64-bit integer.
_MAX_OFFSET = 1 << 62


class Store:
    """A bucket or folder.

    Thread-safe. Ctrl-C interrupts any call. It can be used in a forked child after its parent used it, and is pickled
    as its URL and configuration, without credentials.

    Args:
        url: `s3://bucket`, `gs://bucket`, `file:///folder` or `memory://name`. Keys are the full keys of the bucket, or
            paths below the folder. With a prefix, as in `s3://bucket/prefix/`, keys are relative to it, as if it were a
            folder; the slash may be omitted. A `memory://` store exists as long as the process.
        config: Settings of the store.
        region: Overrides that of `config`.
        endpoint_url: Overrides that of `config`.

    Raises:
        ConfigError: The URL has another scheme, or no bucket.

    Example:
        >>> store = Store("memory://example")
        >>> store.put("greeting", b"hello") and bytes(store.get("greeting"))
        b'hello'
    """

    def __init__(
        self,
        url: str,
        *,
        config: StoreConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        parsed = parse_url(url)
        name, prefix = parsed.bucket, parsed.key.removesuffix("/")
        if parsed.scheme == "file":
            name, prefix = parsed.key.strip("/"), ""
            self._url = f"file:///{name}".rstrip("/") if name else "file://"
        else:
            self._url = f"{parsed.base}/{prefix}" if prefix else parsed.base
        self._config = resolve(self._url, store_config(config, region, endpoint_url, parsed.scheme))
        self._native = _torchobj.NativeStore(parsed.scheme, name, self._config, prefix and f"{prefix}/")
        # Keys of references are whole keys; those of files start at the root.
        self._root = _torchobj.NativeStore(parsed.scheme, parsed.bucket, self._config)

    @property
    def url(self) -> str:
        """The URL of the bucket, folder or prefix, without a trailing slash."""
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

        Small objects take one request, large ones are read as parallel ranges of 8 MiB. No HEAD request is sent.

        Args:
            key: The object.
            version: The version to read, as of `put` and `head`; on Google Cloud Storage also a noncurrent generation.

        Returns:
            The bytes, in memory that lives as long as the buffer and its views.

        Raises:
            ObjectNotFoundError: The object does not exist.
            ObjectChangedError: The object is not of this version, or changed during the read.
            StoreError: Errors that persist after the retries.
        """
        return self._native.get(key, version=version)

    @overload
    def get_many(
        self, keys: Iterable[str | ObjectRef], into: None = None, *, return_errors: Literal[False] = False
    ) -> list[Buffer]: ...
    @overload
    def get_many(
        self, keys: Iterable[str | ObjectRef], into: Sequence[Any], *, return_errors: Literal[False] = False
    ) -> list[int]: ...
    @overload
    def get_many(
        self, keys: Iterable[str | ObjectRef], into: Sequence[Any] | None = None, *, return_errors: bool
    ) -> list[Buffer | int | Exception]: ...

    def get_many(
        self, keys: Iterable[str | ObjectRef], into: Sequence[Any] | None = None, *, return_errors: bool = False
    ) -> Any:
        """Reads objects, or ranges of them, concurrently, up to `max_in_flight`, in one call without the GIL.

        Args:
            keys: The objects: keys, or `ObjectRef`s of this store with the range or version to read.
            into: A writable, contiguous buffer per object, which may be larger: bytearray, numpy array, CPU tensor.
            return_errors: Whether to return exceptions in place of objects that cannot be read.

        Returns:
            A `Buffer` per key, in order, as `get` returns it; with `into` the number of bytes written to each buffer.

        Raises:
            StoreError: The first error that persists after its retries; the other reads are aborted.
            ConfigError: A buffer is too small for its object; `keys` is a str; or an `ObjectRef` is of another store.
            ValueError: A buffer is read-only, or the number of buffers differs from that of the keys.
        """
        jobs = [self._job_of(key) for key in checked_list("keys", keys)]
        return read_jobs(jobs, into, return_errors=return_errors)

    def _job_of(self, key: str | ObjectRef) -> tuple["_torchobj.NativeStore", str | ObjectRef]:
        if not isinstance(key, ObjectRef):
            return self._native, key
        if not key.url.startswith(f"{self._url}/"):
            raise ConfigError(
                f"{key!r}: must be an object of {self._url}; torchobj.get_many reads objects of any store"
            )
        return self._root, key

    def get_range(self, key: str, start: int, end: int | None = None) -> Buffer:
        """Reads bytes `start..end`, end excluded.

        Args:
            key: The object.
            start: The first byte. Negative: counted from the end of the object, without `end`.
            end: The byte after the last one; truncated to the size of the object. If it equals `start`, an empty buffer
                is returned without a request, even if the object does not exist.

        Raises:
            RangeError: The range starts after the end of the object.
            ConfigError: The end is before the start, or is given with a negative start.
        """
        return self._native.get(key, *_range(start, end))

    def get_ranges(self, key: str, ranges: Iterable[tuple[int, int | None]]) -> list[Buffer]:
        """Reads ranges of one object concurrently.

        Args:
            key: The object.
            ranges: Start and end of each, as for `get_range`.

        Returns:
            A `Buffer` per range, in order.

        Raises:
            RangeError: A range starts after the end of the object.
        """
        return self._native.get_ranges([(key, *_range(start, end)) for start, end in ranges])

    def put(
        self,
        key: str,
        data: Any,
        *,
        overwrite: bool = True,
        if_version: str | None = None,
        **attributes: Unpack[ObjectAttributes],
    ) -> str:
        """Writes an object in one request, or in parallel parts without a copy. It appears whole or not at all.

        Args:
            key: The object.
            data: Any contiguous buffer, including CPU tensors. It must not be changed until this returns.
            overwrite: Whether an existing object may be replaced.
            if_version: Replaces only this version of the object, as returned by `put` and `head`.
            attributes: Headers of the object, `content_type`, `content_encoding`, `content_disposition`,
                `content_language` and `cache_control`; `storage_class`, which overrides that of the configuration; and
                `metadata`, user-defined names and printable ASCII values.

        Returns:
            The version of the object.

        Raises:
            PreconditionFailedError: The condition is not met. It is also a `FileExistsError`.
            ConfigError: The conditions exclude each other.
            InvalidKeyError: The store cannot hold this key.
            UnsupportedError: The store does not support headers or conditions.
        """
        check_condition(overwrite, if_version)
        return self._native.put(key, contiguous(data), native_attributes(attributes), overwrite, if_version)

    def head(self, key: str) -> ObjectInfo:
        """Returns size, version, headers and metadata of an object.

        Args:
            key: The object.

        Raises:
            ObjectNotFoundError: The object does not exist.
        """
        return info_of((key, *self._native.head(key), None))

    @overload
    def head_many(
        self, keys: Iterable[str], *, checksum: bool = False, return_errors: Literal[False] = False
    ) -> list[ObjectInfo]: ...
    @overload
    def head_many(
        self, keys: Iterable[str], *, checksum: bool = False, return_errors: bool
    ) -> list[ObjectInfo | Exception]: ...

    def head_many(self, keys: Iterable[str], *, checksum: bool = False, return_errors: bool = False) -> Any:
        """Returns size, version, headers and metadata of objects, by concurrent requests, up to `max_in_flight`.

        Args:
            keys: The objects.
            checksum: Whether to request the checksum of each object. It is None if the store has none of all bytes, or
                without the permission to decrypt the object.
            return_errors: Whether to return exceptions in place of objects whose request fails.

        Returns:
            An `ObjectInfo` per key, in order.

        Raises:
            StoreError: The first error that persists after its retries; the other requests are aborted.
            ConfigError: `keys` is a str.
        """
        heads = _torchobj.heads(self._native, list(checked_list("keys", keys)), return_errors, checksum)
        return [head if isinstance(head, Exception) else info_of(head) for head in heads]

    def exists(self, key: str) -> bool:
        """Returns whether an object exists, by a HEAD request.

        Args:
            key: The object. A prefix of keys is no object.

        Raises:
            StoreError: The request failed: the bucket does not exist, or access is denied.
        """
        try:
            self._native.head(key)
        except ObjectNotFoundError:
            return False
        return True

    def list(
        self,
        prefix: str = "",
        delimiter: str | None = None,
        *,
        start_after: str | None = None,
        glob: str | None = None,
        ordered: bool = True,
    ) -> Listing:
        """Lists objects whose keys start with `prefix`, in key order; S3 Express lists without an order.

        The first page is one request. After it, ranges of keys are requested concurrently, up to 32, so that millions
        of keys take seconds. Memory stays below about 50 MB.

        Args:
            prefix: Compared as a string: `train` also selects `training/x`.
            delimiter: Keys that contain it after the prefix are grouped into the common prefixes of `Listing.pages()`.
            start_after: Lists keys after this one.
            glob: Selects keys whose part after `prefix` matches: `*` and `?` match within a component, `**` across
                components. Directory markers (empty objects whose keys end in `/`) are not selected.
            ordered: Whether objects are returned in key order, rather than as they arrive, which is faster.

        Raises:
            StoreError: The listing repeats a key or page, or is not ordered; or an error persists after the retries.
            ConfigError: `glob` is not a pattern, or is combined with `delimiter`.
        """
        if glob is not None and delimiter is not None:
            raise ConfigError(f"glob={glob!r}: cannot be combined with delimiter={delimiter!r}")
        return Listing(
            self._native, prefix=prefix, delimiter=delimiter, start_after=start_after, glob=glob, ordered=ordered
        )

    def scan(self, prefix: str = "", *, glob: str | None = None, has_metadata: str | bool | None = None) -> Scan:
        """Lists objects with their headers and user metadata: HEAD requests are sent while the listing goes on.

        Args:
            prefix, glob: Select keys, as for `list`.
            has_metadata: Selects objects that have user metadata of this name, or any, if True.

        Returns:
            An iterable of `ObjectInfo`, in no order. Objects that are deleted meanwhile are omitted.

        Raises:
            StoreError: An error of the listing or of a HEAD request persists after the retries.
            ConfigError: `glob` is not a pattern.
        """
        named = "" if has_metadata is True else has_metadata or None
        return Scan(self._native, prefix=prefix, glob=glob, has_metadata=named)

    def copy(self, source: str, key: str) -> str:
        """Copies an object on the server, with its attributes. Returns the version of the copy.

        Args:
            source: A key of this store, or a URL of the same scheme and account, which starts with `s3://`, `gs://`,
                `file://` or `memory://`.
            key: Key of the copy.
        """
        is_url = canonical_url(source).startswith(tuple(f"{scheme}://" for scheme in SCHEMES))
        return self._native.copy(canonical_url(source) if is_url else self._native.url(source), key)

    def delete(self, keys: str | Iterable[str], *, if_version: str | None = None) -> None:
        """Deletes one or more objects. An object that does not exist is not an error.

        On `file://` the folders above a deleted file are kept.

        Args:
            keys: The object or objects.
            if_version: Deletes only this version of a single object. AWS and GCS check it; other servers may not.

        Raises:
            PreconditionFailedError: The object is of another version.
            ConfigError: A version is given with several keys.
            UnsupportedError: The store does not support conditional deletes.
        """
        names = [keys] if isinstance(keys, str) else list(keys)
        check_condition(overwrite=True, if_version=if_version)
        if if_version is None:
            self._native.delete(names)
        elif len(names) == 1:
            self._native.delete_if(names[0], if_version)
        else:
            raise ConfigError(f"if_version={if_version!r}: requires a single key, got {len(names)}")

    @overload
    def open(self, key: str, mode: Literal["rb"] = "rb") -> ObjectReader: ...
    @overload
    def open(self, key: str, mode: Literal["wb", "xb"], **conditions: Unpack[WriteConditions]) -> ObjectWriter: ...
    @overload
    def open(
        self, key: str, mode: Literal["r", "rt", "w", "wt", "x", "xt"], **options: Unpack[OpenOptions]
    ) -> TextFile: ...
    @overload
    def open(self, key: str, mode: str, **options: Unpack[OpenOptions]) -> ObjectReader | ObjectWriter | TextFile: ...

    def open(
        self, key: str, mode: str = "rb", **options: Unpack[OpenOptions]
    ) -> ObjectReader | ObjectWriter | TextFile:
        """Opens an object as a file, as `torchobj.open`.

        Args:
            key: The object.
            mode: `rb`, `wb` or `xb`; `r`, `w` or `x` for text.
            options: `overwrite` and `if_version`; for text also `encoding`, `errors` and `newline`.

        Raises:
            ConfigError: The mode is unknown, or does not take an argument.
            PreconditionFailedError: From `close()` of a file for writing: the condition does not hold.
        """
        return open_object(f"{self._url}/{key}", mode, config=self._config, **options)

    def upload_file(
        self,
        key: str,
        path: FilePath,
        *,
        overwrite: bool = True,
        if_version: str | None = None,
        skip_unchanged: bool = False,
        progress: ProgressOption = None,
        **attributes: Unpack[ObjectAttributes],
    ) -> Transfer:
        """Uploads a file, as `torchobj.files.upload_file`.

        Args:
            key: The object.
            path: A regular file, which must not change meanwhile, or a FIFO, or a symbolic link to one of them.
            overwrite: Whether an existing object may be replaced.
            if_version: Replaces only this version of the object.
            skip_unchanged: Whether to keep an object that is equal to the file.
            progress: Receives a `Progress` about every 0.1 s and at the end.
            attributes: `content_type`, `metadata`, `storage_class` and the other attributes of `put`.

        Raises:
            ObjectChangedError: The file changed while it was uploaded. Nothing is written.
            PreconditionFailedError: The condition is not met.
        """
        file, given = Path(path), native_attributes(attributes)
        check_condition(overwrite, if_version)
        size, version, skipped, state = _torchobj.upload_file(
            self._native, file, key, given, overwrite, if_version, skip_unchanged, counters_to(progress)
        )
        return Transfer(self._native.url(key), file, size, version, skipped, state)

    def download_file(
        self,
        key: str,
        path: FilePath,
        *,
        version: str | None = None,
        skip_unchanged: bool = False,
        progress: ProgressOption = None,
    ) -> Transfer:
        """Downloads an object to a file, as `torchobj.files.download_file`.

        Args:
            key: The object.
            path: The file, which appears complete or not at all. An existing one is replaced; a device, a FIFO or a
                descriptor, such as `/dev/stdout`, is written as the object arrives.
            version: The version to read.
            skip_unchanged: Whether to keep a file that is equal to the object.
            progress: Receives a `Progress` about every 0.1 s and at the end.

        Raises:
            ObjectNotFoundError: The object does not exist.
            IntegrityError: The bytes do not have the checksum of the object. The file does not appear.
        """
        file = Path(path)
        if os.fspath(path).endswith("/") or file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder; pass the path of a file", os.fspath(path))
        make_folders(file.parent)
        size, found, skipped, state = _torchobj.download_file(
            self._native, key, file.parent, file.name, version, skip_unchanged, counters_to(progress)
        )
        return Transfer(self._native.url(key), file, size, found, skipped, state)

    def unfinished_uploads(self, prefix: str = "") -> Sequence[UnfinishedUpload]:
        """Returns uploads in parts of writers that were killed. Other failed uploads are aborted immediately. Resumable
        uploads to Google Cloud Storage are not listed; the store deletes them after a week.

        Args:
            prefix: Selects uploads of keys that start with it.
        """
        return [UnfinishedUpload(key, name, time_of(begun_ms)) for key, name, begun_ms in self._native.uploads(prefix)]

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Aborts an unfinished upload and deletes its parts. An upload that does not exist is not an error.

        Args:
            upload: One of `unfinished_uploads`.
        """
        self._native.abort_upload(upload.key, upload.upload_id)


def list_buckets(
    scheme: Literal["s3", "gs"], *, config: StoreConfig, project: str | None = None
) -> list[tuple[str, datetime | None]]:
    """Returns the names of the buckets of an account, and their times of creation.

    Args:
        scheme: The provider.
        config: The configuration.
        project: The project of the buckets, on Google Cloud Storage. An emulator needs none.

    Raises:
        StoreError: Access is denied, or an error persists after the retries.
    """
    native = _torchobj.NativeStore(scheme, "", resolve(f"{scheme}://", config))
    return [(name, time_of(created_ms)) for name, created_ms in native.buckets(project)]


def _open_store(url: str, config: StoreConfig) -> Store:
    return Store(url, config=config)


def _range(start: int, end: int | None) -> tuple[int, int | None]:
    """The range, limited to `_MAX_OFFSET`, which is after the end of any object."""
    start = operator.index(start)
    first = max(-_MAX_OFFSET, min(start, _MAX_OFFSET))
    if end is None:
        return first, None
    length = operator.index(end) - start
    if start < 0 or length < 0:
        raise ConfigError(f"range {start}..{end}: must have 0 <= start <= end, or a negative start alone")
    return first, first + min(length, _MAX_OFFSET)
