"""The classes `ObjectFileSystem` and `GCSFileSystem`: paths, folders, listings and files. Does not import torch."""

import io
import logging
import shutil
from datetime import datetime
from glob import has_magic
from typing import Any

from fsspec.compression import compr  # type: ignore[import-untyped]
from fsspec.core import get_compression  # type: ignore[import-untyped]

from torchobj.config import StoreConfig, store_config
from torchobj.exceptions import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    UnsupportedError,
)
from torchobj.fsspec.deletes import delete_with_markers
from torchobj.fsspec.files import (
    BlockFile,
    CompressedFile,
    TransactionFile,
    entries_by_name,
    file_entry,
    folder_entry,
)
from torchobj.fsspec.instances import CachedByConfig
from torchobj.fsspec.many_objects import ManyObjects
from torchobj.fsspec.options import (
    GCSFS_OPTIONS,
    S3FS_OPTIONS,
    check_copied,
    check_current,
    gcsfs_config,
    s3fs_config,
    written_attributes,
)
from torchobj.store import ObjectInfo, Store
from torchobj.store.concurrency import concurrently
from torchobj.store.file_objects import TextFile, open_reader

__all__ = ["GCSFileSystem", "ObjectFileSystem"]

logger = logging.getLogger("torchobj")

#: Folders that were created, by scheme and configuration. Stores have no folders; an empty one is known to this process
#: only.
_created_folders: dict[tuple[str, StoreConfig], dict[str, None]] = {}

#: Arguments of `open` about caches that torchobj does not have.
_HINTS = ("cache_type", "fill_cache", "size")

#: Maximum number of remembered folders.
_MAX_REMEMBERED = 10_000


class ObjectFileSystem(ManyObjects, metaclass=CachedByConfig):
    """An fsspec file system for S3 buckets. Paths are `bucket/key` or `s3://bucket/key`; a folder is a prefix of keys.

    Listings are not cached. `info` and `ls` return `LastModified`, in UTC, and `ETag`. A written file appears whole on
    `close()`, or at the end of its transaction; it does not appear if the `with` block raises, also with `fsspec.open`
    and in text mode. Appending rewrites the whole object, unless it changed meanwhile. Opening a file for reading sends
    no request, so that a missing file raises at the first read. Methods for many objects send their requests
    concurrently.

    Args:
        config: Settings of the store.
        region, endpoint_url: Override those of `config`. GCS has no region.
        options: Options of s3fs, on `GCSFileSystem` of gcsfs, which override fields of `config`: `anon`, `key`,
            `secret`, `token`, `profile`, `requester_pays`, `client_kwargs`, `config_kwargs`, `s3_additional_kwargs`;
            `token`, `project`, `requester_pays`, `requests_timeout`. Those without effect, such as `block_size`,
            are logged once. Keys and tokens are in no pickle: another process than a forked child takes the same keys
            from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, and raises a `CredentialsError` without them.

    Raises:
        TypeError: An option is unknown.
        ConfigError: The value of an option is not allowed.
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
    _strip_tokenize_options = tuple(sorted(S3FS_OPTIONS))
    _translate = staticmethod(s3fs_config)

    def __init__(
        self,
        config: StoreConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        **options: Any,
    ) -> None:
        # The metaclass has translated the known ones.
        if unknown := sorted(options.keys() - set(self._strip_tokenize_options)):
            raise TypeError(f"{type(self).__name__}: unknown options: {', '.join(unknown)}")
        super().__init__()
        self._scheme = self.protocol if isinstance(self.protocol, str) else self.protocol[0]
        self._config = store_config(config, region, endpoint_url, "gs" if self._scheme == "gs" else "s3")
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

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Name, size and type of an object or folder, by a HEAD request and, if that finds nothing, a listing.

        Raises:
            ObjectNotFoundError: Neither exists.
        """
        check_current(kwargs)
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
        return "/" in self._strip_protocol(path) and _head(*self._locate(path)) is not None

    def isdir(self, path: str) -> bool:
        """Whether objects exist below, or this process created the folder. Raises errors that prevent an answer."""
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
        if len(self._created_folders) > _MAX_REMEMBERED:
            for oldest in list(self._created_folders)[:-_MAX_REMEMBERED]:
                self._created_folders.pop(oldest, None)

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

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  fsspec's signature
        """The objects and folders directly below a folder, or the object with this name.

        A folder without a name, as that of the key `a//b`, has no path and is left out with a warning; `find` returns
        its objects.

        Raises:
            ObjectNotFoundError: Neither exists.
        """
        path = self._strip_protocol(path)
        found = self._children(path)
        if found is None:
            found = [self.info(path)]
        named = [entry for entry in found if not entry["name"].endswith("/")]
        if len(named) < len(found):
            logger.warning("%s/: ls omits a folder without a name; find returns its objects", path)
        return named if detail else [entry["name"] for entry in named]

    def _children(self, path: str) -> list[dict[str, Any]] | None:
        """The entries directly below a folder, by name; None if it is not a folder.

        The name of a folder without one ends with a slash.
        """
        base, slash, key = path.partition("/")
        store, prefix = self._locate(base)[0], f"{key}/" if slash else ""
        found, is_folder = [], not slash or path in self._created_folders
        for page in store.list(prefix, "/").pages():
            is_folder |= bool(page.objects or page.prefixes)
            found += [file_entry(f"{base}/{info.key}", info) for info in page.objects if info.key != prefix]
            found += [folder_entry(f"{base}/{name[:-1]}") for name in page.prefixes]
        if not is_folder:
            return None
        names = {entry["name"] for entry in found}
        found += [folder_entry(made) for made in set(self._created_folders) - names if self._parent(made) == path]
        return sorted(found, key=lambda entry: str(entry["name"]))

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """The objects and folders that match a pattern, as fsspec's; with a slash at its end, the folders only."""
        if path.endswith("/") and has_magic(path):
            # An object with the name of a folder would hide it.
            kwargs["_shows_folders"] = True
        return super().glob(path, maxdepth=maxdepth, **kwargs)

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        detail: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        *,
        prefix: str = "",
        _shows_folders: bool = False,
        **kwargs: Any,
    ) -> Any:
        """All objects below a folder, by one recursive listing; or the object with this name.

        Args:
            path: The folder.
            maxdepth: Maximum depth; each level is listed concurrently. None for all levels.
            withdirs: Whether to include folders, also `path` itself.
            detail: Whether to return a dict from names to the results of `info`.
            prefix: Selects objects whose path after the folder starts with it, as in s3fs and gcsfs.

        Raises:
            ConfigError: `prefix` is combined with `maxdepth` or `withdirs`.
        """
        if prefix and (maxdepth is not None or withdirs):
            raise ConfigError(f"prefix={prefix!r}: cannot be combined with maxdepth or withdirs")
        path = self._strip_protocol(path)
        if not path:
            return super().find(path, maxdepth, withdirs, detail, **kwargs)
        entries = self._all_below(path, prefix) if maxdepth is None else self._levels_below(path, maxdepth)
        if withdirs and (entries or self.isdir(path)):
            entries[path] = folder_entry(path)
        if not entries and not prefix and self.isfile(path):
            entries = {path: self.info(path)}
        if _shows_folders:
            entries |= {name: folder_entry(name) for name, entry in entries.items() if "is_folder" in entry}
        found = {name: entries[name] for name in sorted(entries) if withdirs or entries[name]["type"] != "directory"}
        return found if detail else list(found)

    def _all_below(self, path: str, prefix: str) -> dict[str, dict[str, Any]]:
        """The objects at all depths, and their folders."""
        store, key = self._locate(path)
        base, below = path.partition("/")[0], f"{key}/" if key else ""
        files, folders = {}, {made for made in list(self._created_folders) if made.startswith(f"{path}/")}
        folder = ""
        for info in store.list(below + prefix):
            *parents, name = info.key.removeprefix(below).split("/")
            # Markers of folders cannot be addressed by a path.
            if name:
                files[f"{base}/{info.key}"] = file_entry(f"{base}/{info.key}", info)
            if (above := "/".join(parents)) != folder:
                folder = above
                folders |= {"/".join((path, *parents[: depth + 1])) for depth, parent in enumerate(parents) if parent}
        return entries_by_name([*files.values(), *map(folder_entry, folders)])

    def _levels_below(self, path: str, maxdepth: int) -> dict[str, dict[str, Any]]:
        """The objects and folders down to a depth, level by level."""
        found: dict[str, dict[str, Any]] = {}
        level = [path]
        for _ in range(maxdepth):
            entries = []
            for _, children in concurrently(self._children, level):
                if isinstance(children, Exception) and not isinstance(children, ObjectNotFoundError):
                    raise children
                entries += children if isinstance(children, list) else []
            found |= entries_by_name(entries)
            level = [entry["name"] for entry in entries if entry["type"] == "directory"]
        return {name: entry for name, entry in found.items() if not name.endswith("/")}

    def du(
        self,
        path: str,
        total: bool = True,  # noqa: FBT001, FBT002  fsspec's signature
        maxdepth: int | None = None,
        withdirs: bool = False,  # noqa: FBT001, FBT002  fsspec's signature
        **kwargs: Any,
    ) -> Any:
        """The size of all objects below a folder, from their listing; with `total=False` a dict of names and sizes."""
        entries = self.find(path, maxdepth, withdirs, detail=True, **kwargs)
        sizes = {name: entry["size"] for name, entry in entries.items()}
        return sum(size or 0 for size in sizes.values()) if total else sizes

    def rm_file(self, path: str) -> None:
        """Deletes an object. An object that does not exist is not an error."""
        store, key = self._locate(path)
        store.delete(key)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT001, FBT002
        """Deletes objects, a thousand per request; with `recursive` also all keys below.

        Raises:
            UnsupportedError: A path is a whole bucket, which is never deleted or emptied; nothing is deleted then.
            BucketNotFoundError: The bucket does not exist.
            ObjectNotFoundError: With `recursive`: no object or folder with a given name exists.
        """
        for each in [path] if isinstance(path, str) else path:
            self._refuse_bucket(each)
        is_whole = recursive and maxdepth is None
        selected = self.expand_path(path, recursive=recursive and not is_whole, maxdepth=maxdepth)
        if is_whole:
            keys = {each: self._keys_below(each) for each in selected}
        else:
            # With a slash: empty objects with which other tools mark folders.
            named = {each: self._locate(each)[1] for each in selected}
            keys = {each: [key, f"{key}/"] if recursive else [key] for each, key in named.items()}
        if not any(keys.values()):
            raise ObjectNotFoundError(f"rm {path!r}: no object or folder has this name")
        for store, paths in self._by_store(selected).items():
            delete_with_markers(store, list(dict.fromkeys(key for each in paths for key in keys[each])))
        for each in selected:
            for made in [made for made in list(self._created_folders) if f"{made}/".startswith(f"{each}/")]:
                self._created_folders.pop(made, None)

    def _keys_below(self, path: str) -> list[str]:
        """The key of a path and all keys below, also those that no path names; none if nothing exists there."""
        store, key = self._locate(path)
        below = [info.key for info in store.list(f"{key}/")]
        return [key, *below] if below or path in self._created_folders or self.isfile(path) else []

    def _refuse_bucket(self, path: str) -> None:
        store, key = self._locate(path)
        if not key:
            # A missing bucket is the more precise error.
            any(store.list())
            raise UnsupportedError(f"rm {store.url}: is a whole bucket; pass the folders and objects to delete")

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> str | None:
        """Copies an object on the server, with its attributes. Returns the version of the copy; None for a folder.

        Raises:
            ConfigError: An attribute is given.
        """
        check_copied(kwargs)
        store, key = self._locate(path2)
        try:
            return store.copy(self.unstrip_protocol(path1), key)
        except ObjectNotFoundError:
            if not self.isdir(path1):
                raise
            self.makedirs(path2, exist_ok=True)
            return None

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Writes an object. With `mode="create"` the store refuses to replace an existing one.

        Other arguments are those of `Store.put`, such as `overwrite`, `if_version` and `content_type`, also by the
        names of s3fs, such as `ContentType`.
        """
        store, key = self._locate(path)
        created = {"overwrite": False} if mode == "create" else {}
        store.put(key, value, **{**written_attributes(kwargs), **created})

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """Opens an object: `rb`, `wb`, `xb`, `ab`, and the same modes without `b` for text.

        Appending writes the whole object again, on the condition that it has not changed meanwhile: the writer that
        closes last raises a `PreconditionFailedError`. Pass `if_version=None` for a store without conditional writes.
        For writing, other arguments are those of `ObjectWriter`, such as `overwrite`, `if_version` and `content_type`,
        also by the names of s3fs, such as `ContentType`.
        With `compression`, such as `gzip` or `infer`, the object has the compressed content.
        """
        text = {
            name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if "b" not in mode and name in kwargs
        }
        compression = get_compression(path, kwargs.pop("compression", None))
        binary = mode if "b" in mode else f"{mode.replace('t', '')}b"
        file = super().open(path, binary, **{name: value for name, value in kwargs.items() if name not in _HINTS})
        is_appended = binary == "ab" and file.tell() > 0
        if compression is not None:
            compressed = compr[compression](file, mode=binary[0])
            file = CompressedFile(compressed, file) if isinstance(file, TransactionFile) else compressed
        if "b" in mode:
            return file
        if binary == "rb":
            return io.TextIOWrapper(file, **text)
        return TextFile(file, is_appended=is_appended, **text)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,  # noqa: FBT001, FBT002  fsspec's signature
        cache_options: dict[str, Any] | None = None,  # noqa: ARG002  fsspec's
        **kwargs: Any,
    ) -> Any:
        url = self.unstrip_protocol(path)
        if mode == "rb":
            check_current(kwargs)
            if kwargs.get("cache_type") == "none":
                # Only from a caching file system: `open` omits it.
                path, size = self._strip_protocol(path), kwargs.get("size")
                return BlockFile(self, path, "rb", block_size, cache_type="none", size=size)
            return open_reader(url, self._locate(path)[0].config)
        if mode not in ("wb", "xb", "ab"):
            raise ConfigError(f"mode={mode!r} of {url}: must be rb, wb, xb or ab")
        if mode == "xb" and self.exists(path):
            raise PreconditionFailedError(f"{url}: already exists")
        kwargs = written_attributes({name: value for name, value in kwargs.items() if name not in _HINTS})
        store, key = self._locate(path)
        present = _head(store, key) if mode == "ab" else None
        if mode == "ab" and "if_version" not in kwargs:
            kwargs |= {"overwrite": False} if present is None else {"if_version": present.version}
        if mode == "xb":
            kwargs |= {"overwrite": False}
        file = TransactionFile(url, config=store.config, **kwargs)
        file.is_deferred = not autocommit
        if present is not None:
            with open_reader(url, store.config, version=present.version) as reader:
                shutil.copyfileobj(reader, file, self._config.part_bytes)
        return file


def _head(store: Store, key: str) -> ObjectInfo | None:
    """Size and version of an object; None if it does not exist."""
    try:
        return store.head(key)
    except ObjectNotFoundError:
        return None


class GCSFileSystem(ObjectFileSystem):
    """An `ObjectFileSystem` for buckets of Google Cloud Storage: `gs://bucket/key`, or `gcs://bucket/key`."""

    protocol = ("gs", "gcs", "tobj+gs")
    _strip_tokenize_options = tuple(sorted(GCSFS_OPTIONS))
    _translate = staticmethod(gcsfs_config)
