"""fsspec file systems over `Store`, for S3 and GCS, and their registration.

Frameworks open `s3://` and `gs://` paths through fsspec: Lightning for checkpoints and logs,
`torch.distributed.checkpoint` for URLs. fsspec itself supports neither; s3fs and gcsfs do. Nothing is registered
without a call of `register`. Does not import torch.
"""

import itertools
import shutil
from datetime import datetime
from typing import Any

import fsspec as package  # type: ignore[import-untyped]

from torchobj.checkpoint.files import open_reader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.config.checks import check
from torchobj.exceptions import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeError,
    StoreError,
    UnsupportedError,
)
from torchobj.fsspec_files import TextFile, TransactionFile, file_entry, folder_entry
from torchobj.fsspec_instances import CachedByConfig
from torchobj.fsspec_registry import register_classes
from torchobj.store import Store

__all__ = ["GCSFileSystem", "ObjectFileSystem", "register"]

#: Folders that were created, by scheme and configuration. Stores have no folders; an empty one is known to this process
#: only.
_created_folders: dict[tuple[str, StoreConfig], dict[str, None]] = {}

#: Maximum number of remembered folders.
_MAX_REMEMBERED = 10_000

#: Configuration from `register`, for file systems without one. Not in fsspec's configuration, which s3fs also reads.
_default: StoreConfig | None = None


class _Cached(CachedByConfig):
    """Passes the default configuration as an argument, so that fsspec caches and pickles instances with it."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:  # noqa: N805  of a metaclass
        if not arguments and named.get("config") is None and _default is not None:
            named["config"] = _default
        return super().__call__(*arguments, **named)


class ObjectFileSystem(package.AbstractFileSystem, metaclass=_Cached):  # type: ignore[misc]
    """An fsspec file system for S3 buckets. Paths are `bucket/key` or `s3://bucket/key`; a folder is a prefix of keys.

    Listings are not cached. `info` and `ls` return `LastModified`, in UTC, and `ETag`. A written file appears whole on
    `close()`, or at the end of its transaction; it does not appear if the `with` block raises, also with `fsspec.open`
    and in text mode. Appending rewrites the whole object. Opening a file for reading sends no request, so that a
    missing file raises at the first read.

    Args:
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: Override those of `config`. GCS has no region.

    Raises:
        FileNotFoundError, FileExistsError, PermissionError: Raised as their subclasses in `torchobj.exceptions`.

    Example:
        ```python
        files = ObjectFileSystem(endpoint_url="http://localhost:9000")
        files.pipe("bucket/folder/a.txt", b"text")
        files.ls("s3://bucket/folder", detail=False)  # ["bucket/folder/a.txt"]
        ```
    """

    protocol: str | tuple[str, ...] = ("s3", "tobj+s3")
    _extra_tokenize_attributes = ("config_number",)

    def __init__(
        self,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        super().__init__()
        self._scheme = self.protocol if isinstance(self.protocol, str) else self.protocol[0]
        self._config = store_config(config, region, endpoint_url, url="gs://" if self._scheme == "gs" else None)
        self._stores: dict[str, Store] = {}
        self._created_folders = _created_folders.setdefault((self._scheme, self._config), {})

    def _locate(self, path: str) -> tuple[Store, str]:
        """The store of a path, and the key within it."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        if not bucket:
            raise UnsupportedError(f"path={path!r}: contains no bucket, and buckets cannot be listed")
        if bucket not in self._stores:
            self._stores[bucket] = Store(f"{self._scheme}://{bucket}", config=self._config)
        return self._stores[bucket], key

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path or URL, with the scheme of `Store`."""
        return f"{self._scheme}://{self._strip_protocol(name)}"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and type of an object or folder, by a HEAD request and, if that finds nothing, a listing.

        Raises:
            ObjectNotFoundError: Neither exists.
        """
        path = self._strip_protocol(path)
        if not path:
            return folder_entry(path)
        store, key = self._locate(path)
        error: Exception = ObjectNotFoundError(f"{self.unstrip_protocol(path)}: no object has this key or prefix")
        if key:
            try:
                return file_entry(path, store.head(key))
            except ObjectNotFoundError:
                pass
            except AccessDeniedError as denied:
                # Permission for a prefix does not include the key with the folder's name.
                error = denied
        if self.isdir(path):
            return folder_entry(path)
        raise error

    def exists(self, path: str, **_: Any) -> bool:
        """Whether an object or folder exists. Raises errors that prevent an answer."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isfile(self, path: str) -> bool:
        """Whether an object exists. Raises errors that prevent an answer."""
        if "/" not in self._strip_protocol(path):
            return False
        store, key = self._locate(path)
        try:
            store.head(key)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Whether objects exist below, or the folder was created here. Raises errors that prevent an answer."""
        path = self._strip_protocol(path)
        if not path or path in self._created_folders:
            return True
        store, key = self._locate(path)
        try:
            return any(store.list(f"{key}/" if key else "")) or not key
        except FileNotFoundError:
            return False

    def modified(self, path: str) -> datetime:
        """Time of the last modification of an object, in UTC."""
        time: datetime = self.info(path)["LastModified"]
        return time

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  fsspec's signature
        """The objects and folders directly below a folder, or the object with this name.

        Raises:
            ObjectNotFoundError: Neither exists.
        """
        path = self._strip_protocol(path)
        store, key = self._locate(path)
        prefix, base = f"{key}/" if key else "", path.partition("/")[0]
        found, is_folder = [], not key or path in self._created_folders
        for page in store.list(prefix, "/").pages():
            is_folder |= bool(page.objects or page.prefixes)
            found += [file_entry(f"{base}/{info.key}", info) for info in page.objects if info.key != prefix]
            # A folder without a name cannot be addressed by a path.
            found += [folder_entry(f"{base}/{name[:-1]}") for name in page.prefixes if not name.endswith("//")]
        if not is_folder:
            found = [self.info(path)]
        names = {entry["name"] for entry in found}
        found += [folder_entry(made) for made in self._created_folders.keys() - names if self._parent(made) == path]
        found.sort(key=lambda entry: str(entry["name"]))
        return found if detail else [entry["name"] for entry in found]

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        detail: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        *,
        prefix: str = "",
        **kwargs: Any,
    ) -> Any:
        """All objects below a folder, by one recursive listing; or the object with this name.

        Args:
            path: The folder.
            maxdepth: Maximum depth, listed level by level; None for all levels.
            withdirs: Whether to include folders.
            detail: Whether to return a dict from names to the results of `info`.
            prefix: Selects objects whose path after the folder starts with it, as in s3fs and gcsfs.

        Raises:
            ConfigError: `prefix` is combined with `maxdepth` or `withdirs`.
        """
        if prefix and (maxdepth is not None or withdirs):
            raise ConfigError(f"prefix={prefix!r}: cannot be combined with maxdepth or withdirs")
        if not self._strip_protocol(path) or maxdepth is not None or withdirs:
            return super().find(path, maxdepth, withdirs, detail, **kwargs)
        store, key = self._locate(path)
        base, below = self._strip_protocol(path).partition("/")[0], f"{key}/" if key else ""
        found = {}
        for info in store.list(below + prefix):
            # Empty path components and markers of folders cannot be addressed by a path.
            if all(info.key.removeprefix(below).split("/")):
                found[f"{base}/{info.key}"] = file_entry(f"{base}/{info.key}", info)
        if not found and not prefix and self.isfile(path):
            found = {f"{base}/{key}": self.info(path)}
        return found if detail else list(found)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002  fsspec's signature
        """Records a folder and its parents as created. Nothing is written; with `exist_ok` no request is sent.

        Raises:
            PreconditionFailedError: Without `exist_ok`: an object or folder with this name exists.
        """
        path = self._strip_protocol(path)
        if not exist_ok and self.exists(path):
            raise PreconditionFailedError(f"{self.unstrip_protocol(path)}: already exists")
        while "/" in path:
            self._created_folders.pop(path, None)
            self._created_folders[path] = None
            path = self._parent(path)
        while len(self._created_folders) > _MAX_REMEMBERED:
            del self._created_folders[next(iter(self._created_folders))]

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:  # noqa: ARG002, FBT001, FBT002  fsspec's
        """As `makedirs`."""
        self.makedirs(path)

    def rmdir(self, path: str) -> None:
        """Removes a created folder.

        Raises:
            StoreError: The folder is not empty.
        """
        path = self._strip_protocol(path)
        if self.ls(path):
            raise StoreError(f"{self.unstrip_protocol(path)}: is not empty")
        self._created_folders.pop(path, None)

    def rm_file(self, path: str) -> None:
        """Deletes an object. An object that does not exist is not an error."""
        store, key = self._locate(path)
        store.delete(key)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT001, FBT002
        """Deletes objects, a thousand per request; with `recursive` also everything below.

        Raises:
            UnsupportedError: A path is a whole bucket, which is never deleted or emptied; nothing is deleted then.
            BucketNotFoundError: The bucket does not exist.
            ObjectNotFoundError: With `recursive`: no object or folder with a given name exists.
        """
        for each in [path] if isinstance(path, str) else path:
            self._refuse_bucket(each)
        expanded = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        for bucket, paths in itertools.groupby(expanded, key=lambda each: each.partition("/")[0]):
            keys = [key for each in paths if (key := each.partition("/")[2])]
            # With a slash: empty objects with which other tools mark folders.
            self._locate(bucket)[0].delete([*keys, *(f"{key}/" for key in keys)] if recursive else keys)
        for each in expanded:
            self._created_folders.pop(each, None)

    def _refuse_bucket(self, path: str) -> None:
        store, key = self._locate(path)
        if not key:
            # A missing bucket is the more precise error.
            any(store.list())
            raise UnsupportedError(f"rm {store.url}: is a whole bucket; pass the folders and objects to delete")

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copies an object on the server."""
        store, key = self._locate(path2)
        try:
            store.copy(self.unstrip_protocol(path1), key)
        except ObjectNotFoundError:
            if not self.isdir(path1):
                raise
            self.makedirs(path2, exist_ok=True)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes `start:end` of an object, with the semantics of slices."""
        store, key = self._locate(path)
        if start is None and end is None:
            return bytes(store.get(key))
        if (end is not None and start is not None and start < 0) or (end is not None and end < 0):
            start, end, _step = slice(start, end).indices(store.head(key).size or 0)
        start = start or 0
        if end is not None and end <= start:
            return b""
        try:
            return bytes(store.get_range(key, start, end))
        except RangeError:
            return b""

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Writes an object. With `mode="create"` the store refuses to replace an existing one.

        Other arguments are those of `Store.put`, such as `overwrite`, `if_version` and `content_type`.
        """
        store, key = self._locate(path)
        store.put(key, value, if_none_match=mode == "create", **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """Opens an object: `rb`, `wb`, `xb`, `ab`, and the same modes without `b` for text.

        For writing, other arguments are those of `ObjectWriter`, such as `overwrite`, `if_version` and `content_type`.
        """
        if "b" in mode:
            return super().open(path, mode, **kwargs)
        text = {name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs}
        return TextFile(super().open(path, f"{mode.replace('t', '')}b", **kwargs), **text)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,  # noqa: ARG002  fsspec's hint
        autocommit: bool = True,  # noqa: FBT001, FBT002  fsspec's signature
        cache_options: dict[str, Any] | None = None,  # noqa: ARG002  fsspec's
        **kwargs: Any,
    ) -> Any:
        url = self.unstrip_protocol(path)
        if mode == "rb":
            return open_reader(url, self._locate(path)[0].config)
        if mode not in ("wb", "xb", "ab"):
            raise ConfigError(f"mode={mode!r} of {url}: must be rb, wb, xb or ab")
        if mode == "xb" and self.exists(path):
            raise PreconditionFailedError(f"{url}: already exists")
        file = TransactionFile(url, config=self._locate(path)[0].config, if_none_match=mode == "xb", **kwargs)
        file.is_deferred = not autocommit
        if mode == "ab" and self.isfile(path):
            with open_reader(url, self._locate(path)[0].config) as present:
                shutil.copyfileobj(present, file, self._config.part_bytes)
        return file


class GCSFileSystem(ObjectFileSystem):
    """An `ObjectFileSystem` for buckets of Google Cloud Storage: `gs://bucket/key`, or `gcs://bucket/key`."""

    protocol = ("gs", "gcs", "tobj+gs")


#: The classes that `register` registers, by scheme.
_CLASSES = {"s3": ObjectFileSystem, "gs": GCSFileSystem}


def register(
    *,
    config: StoreConfig | S3ClientConfig | None = None,
    region: str | None = None,
    endpoint_url: str | None = None,
    replace: bool = True,
    schemes: tuple[str, ...] = ("s3", "gs"),
) -> bool:
    """Makes fsspec open `s3://`, `gs://` and `gcs://` with torchobj in this process, and `tobj+s3://` and `tobj+gs://`.

    s3fs and gcsfs remain available by their own names.

    Args:
        config: Default for file systems that are created without a configuration. If neither this nor the next two are
            given, that of an earlier call is kept.
        region, endpoint_url: Override those of `config` for `s3://`.
        replace: Whether to replace other implementations that are registered or installed for a scheme.
        schemes: `s3`, or `gs`, or both; `gs` includes `gcs`.

    Returns:
        Whether torchobj now serves all `schemes`.

    Example:
        ```python
        import fsspec, torchobj.fsspec

        torchobj.fsspec.register(endpoint_url="http://localhost:9000")
        with fsspec.open("s3://bucket/metrics.csv", "r") as file:
            rows = list(csv.DictReader(file))
        ```
    """
    global _default  # noqa: PLW0603  state of the process
    ok = isinstance(schemes, tuple) and set(schemes) <= _CLASSES.keys()
    check("schemes", schemes, "a tuple of s3 and gs", ok=ok)
    served = register_classes(_CLASSES, schemes, replace=replace)
    if served and not (config is None and region is None and endpoint_url is None):
        _default = store_config(config, region, endpoint_url)
    return served == set(schemes)
