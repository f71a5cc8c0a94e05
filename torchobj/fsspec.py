"""Objects for whatever opens paths by fsspec: a file system over `Store`, and its registration for `s3://`.

Frameworks that take `s3://` paths ask fsspec for them: Lightning looks there for its checkpoints and writes its logs,
`torch.distributed.checkpoint` given a URL writes there. fsspec itself has no S3; s3fs, where it is installed, is one.
Nothing is registered before somebody asks. Never imports torch.
"""

import importlib.util
import itertools
import shutil
from datetime import datetime
from typing import Any

import fsspec as package  # type: ignore[import-untyped]
from fsspec.registry import known_implementations  # type: ignore[import-untyped]

from torchobj.checkpoint.files import open_reader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
    RangeError,
    StoreError,
    UnsupportedError,
)
from torchobj.fsspec_files import TextFile, TransactionFile
from torchobj.store import ObjectInfo, Store

__all__ = ["ObjectFileSystem", "register"]

#: Folders that were made, by configuration. A store has none: until there is an object below, only this process knows.
_made: dict[StoreConfig, dict[str, None]] = {}

#: So many are remembered, those that were made last.
_REMEMBERED = 10_000

#: What `register` was given, for file systems without a configuration. Not in fsspec's own: s3fs would get that too.
_default: StoreConfig | None = None


class _Cached(type(package.AbstractFileSystem)):  # type: ignore[misc]
    """Makes the default an argument, so that fsspec knows instances by it, and pickles them with it."""

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if not arguments and named.get("config") is None and _default is not None:
            named["config"] = _default
        return super().__call__(*arguments, **named)


class ObjectFileSystem(package.AbstractFileSystem, metaclass=_Cached):  # type: ignore[misc]
    """The buckets of S3 for fsspec. Paths are `bucket/key`, also behind `s3://`; a folder is what has keys below it.

    Listings are never cached. `LastModified`, in UTC, and `ETag` stand in what `info` and `ls` return. What is written
    appears whole by its `close()`, in a transaction by the end of that, and not at all where the `with` block raised,
    of `fsspec.open` and in text mode too, or what closes it handles an exception. Appending writes the whole object
    anew. A file that is opened to be read asks for nothing before it is read, so that a missing one raises there.

    Args:
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.

    Raises:
        FileNotFoundError, FileExistsError, PermissionError: As the classes of `torchobj.exceptions` that they are too.

    Example:
        ```python
        files = ObjectFileSystem(endpoint_url="http://localhost:9000")
        files.pipe("bucket/folder/a.txt", b"text")
        files.ls("s3://bucket/folder", detail=False)  # ["bucket/folder/a.txt"]
        ```
    """

    protocol = "s3"

    def __init__(
        self,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        super().__init__()
        self._config = store_config(config, region, endpoint_url)
        self._stores: dict[str, Store] = {}
        self._made = _made.setdefault(self._config, {})

    def _place(self, path: str) -> tuple[Store, str]:
        """The bucket of a path, and the key within it."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        if not bucket:
            raise UnsupportedError(f"path={path!r}: names no bucket, and buckets cannot be listed")
        if bucket not in self._stores:
            self._stores[bucket] = Store(f"{self.protocol}://{bucket}", config=self._config)
        return self._stores[bucket], key

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Name, size and kind of an object or folder: a HEAD, and where that finds nothing a listing.

        Raises:
            ObjectNotFoundError: There is neither.
        """
        path = self._strip_protocol(path)
        if not path:
            return _folder(path)
        store, key = self._place(path)
        error: Exception = ObjectNotFoundError(
            f"{self.unstrip_protocol(path)}: there is no such object, and none below it"
        )
        if key:
            try:
                return _file(path, store.head(key))
            except ObjectNotFoundError:
                pass
            except AccessDeniedError as denied:
                # A permission for what is below a folder is none for the key that is the folder's name.
                error = denied
        if self.isdir(path):
            return _folder(path)
        raise error

    def exists(self, path: str, **_: Any) -> bool:
        """Whether there is an object or folder. Raises what kept it from being known."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isfile(self, path: str) -> bool:
        """Whether there is an object. Raises what kept it from being known."""
        if "/" not in self._strip_protocol(path):
            return False
        store, key = self._place(path)
        try:
            store.head(key)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Whether there are objects below, or the folder was made here. Raises what kept it from being known."""
        path = self._strip_protocol(path)
        if not path or path in self._made:
            return True
        store, key = self._place(path)
        try:
            return any(store.list(f"{key}/" if key else "")) or not key
        except FileNotFoundError:
            return False

    def modified(self, path: str) -> datetime:
        """When an object was last written, in UTC."""
        time: datetime = self.info(path)["LastModified"]
        return time

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:  # noqa: FBT001, FBT002  fsspec's signature
        """The objects and folders right below a folder, or the object of this name itself.

        Raises:
            ObjectNotFoundError: There is neither.
        """
        path = self._strip_protocol(path)
        store, key = self._place(path)
        prefix, base = f"{key}/" if key else "", path.partition("/")[0]
        found, is_folder = [], not key or path in self._made
        for page in store.list(prefix, "/").pages():
            is_folder |= bool(page.objects or page.prefixes)
            found += [_file(f"{base}/{info.key}", info) for info in page.objects if info.key != prefix]
            # A folder without a name has no path here.
            found += [_folder(f"{base}/{name[:-1]}") for name in page.prefixes if not name.endswith("//")]
        if not is_folder:
            found = [self.info(path)]
        names = {entry["name"] for entry in found}
        found += [_folder(made) for made in self._made.keys() - names if self._parent(made) == path]
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
        """The objects below a folder, or the object of this name itself; by one listing of all that is below.

        Args:
            path: The folder.
            maxdepth: Levels of folders that are listed, one by one; None for all.
            withdirs: Also the folders.
            detail: Returns a dict of what `info` returns, by name.
            prefix: Only objects whose path behind the folder begins so, as s3fs and gcsfs have it.

        Raises:
            ConfigError: A `prefix` with `maxdepth` or `withdirs`.
        """
        if prefix and (maxdepth is not None or withdirs):
            raise ConfigError(f"prefix={prefix!r}: cannot be combined with maxdepth or withdirs")
        if not self._strip_protocol(path) or maxdepth is not None or withdirs:
            return super().find(path, maxdepth, withdirs, detail, **kwargs)
        store, key = self._place(path)
        base, below = self._strip_protocol(path).partition("/")[0], f"{key}/" if key else ""
        found = {}
        for info in store.list(below + prefix):
            # A component without a name has no path here, nor has the marker of a folder.
            if all(info.key.removeprefix(below).split("/")):
                found[f"{base}/{info.key}"] = _file(f"{base}/{info.key}", info)
        if not found and not prefix and self.isfile(path):
            found = {f"{base}/{key}": self.info(path)}
        return found if detail else list(found)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002  fsspec's signature
        """Notes a folder and those above it as made. Nothing is written, and with `exist_ok` nothing asked.

        Raises:
            PreconditionFailedError: Without `exist_ok`: there is an object or folder of this name.
        """
        path = self._strip_protocol(path)
        if not exist_ok and self.exists(path):
            raise PreconditionFailedError(f"{self.unstrip_protocol(path)}: exists")
        while "/" in path:
            self._made.pop(path, None)
            self._made[path] = None
            path = self._parent(path)
        while len(self._made) > _REMEMBERED:
            del self._made[next(iter(self._made))]

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:  # noqa: ARG002, FBT001, FBT002  fsspec's
        """As `makedirs`."""
        self.makedirs(path)

    def rmdir(self, path: str) -> None:
        """Forgets a folder that was made.

        Raises:
            StoreError: There are objects or folders in it.
        """
        path = self._strip_protocol(path)
        if self.ls(path):
            raise StoreError(f"{self.unstrip_protocol(path)}: is not empty")
        self._made.pop(path, None)

    def rm_file(self, path: str) -> None:
        """Deletes an object. One that does not exist is no error."""
        store, key = self._place(path)
        store.delete(key)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT001, FBT002
        """Deletes objects, a thousand by a request; with `recursive` also all that is below.

        Raises:
            UnsupportedError: A path is a whole bucket, which is never deleted or emptied; nothing was deleted then.
            BucketNotFoundError: There is no such bucket.
            ObjectNotFoundError: With `recursive`: there is neither an object nor a folder of a name.
        """
        for each in [path] if isinstance(path, str) else path:
            self._refuse_bucket(each)
        expanded = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        for bucket, paths in itertools.groupby(expanded, key=lambda each: each.partition("/")[0]):
            keys = [key for each in paths if (key := each.partition("/")[2])]
            # With a slash: the empty objects by which other tools mark a folder.
            self._place(bucket)[0].delete([*keys, *(f"{key}/" for key in keys)] if recursive else keys)
        for each in expanded:
            self._made.pop(each, None)

    def _refuse_bucket(self, path: str) -> None:
        store, key = self._place(path)
        if not key:
            # A missing bucket is the more precise error.
            any(store.list())
            raise UnsupportedError(f"rm {store.url}: is a whole bucket; name the folders and objects to delete")

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copies an object on the server."""
        store, key = self._place(path2)
        try:
            store.copy(self.unstrip_protocol(self._strip_protocol(path1)), key)
        except ObjectNotFoundError:
            if not self.isdir(path1):
                raise
            self.makedirs(path2, exist_ok=True)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Bytes of an object, by the rules of slices."""
        store, key = self._place(path)
        if start is None and end is None:
            return bytes(memoryview(store.get(key)))  # type: ignore[arg-type]
        if (end is not None and start is not None and start < 0) or (end is not None and end < 0):
            start, end, _step = slice(start, end).indices(store.head(key).size or 0)
        start = start or 0
        if end is not None and end <= start:
            return b""
        try:
            return bytes(memoryview(store.get_range(key, start, end)))  # type: ignore[arg-type]
        except RangeError:
            return b""

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Writes an object. `mode="create"`: only if there is none, which the store decides."""
        store, key = self._place(path)
        store.put(key, value, if_none_match=mode == "create", **kwargs)

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """Opens an object: `rb`, `wb`, `xb`, `ab`, and the same without `b` for text."""
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
            return open_reader(url, self._config)
        if mode not in ("wb", "xb", "ab"):
            raise ConfigError(f"mode={mode!r} of {url}: must be rb, wb, xb or ab")
        if mode == "xb" and self.exists(path):
            raise PreconditionFailedError(f"{url}: exists")
        file = TransactionFile(url, config=self._config, if_none_match=mode == "xb", **kwargs)
        file.is_deferred = not autocommit
        if mode == "ab" and self.isfile(path):
            with open_reader(url, self._config) as present:
                shutil.copyfileobj(present, file, self._config.part_bytes)
        return file


def _file(name: str, info: ObjectInfo) -> dict[str, Any]:
    return {
        "name": name,
        "size": info.size,
        "type": "file",
        "ETag": info.version,
        "LastModified": info.last_modified,
    }


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def register(
    *,
    config: StoreConfig | S3ClientConfig | None = None,
    region: str | None = None,
    endpoint_url: str | None = None,
    replace: bool = True,
) -> bool:
    """Makes torchobj what fsspec opens `s3://` by, in this process. s3fs is there still, by its own name.

    Args:
        config, region, endpoint_url: For every file system that is made without its own. Without any of them, what an
            earlier call set stays.
        replace: Also where something else serves `s3://` already, or s3fs is installed to.

    Returns:
        Whether `s3://` is torchobj's now.

    Example:
        ```python
        import fsspec, torchobj.fsspec

        torchobj.fsspec.register(endpoint_url="http://localhost:9000")
        with fsspec.open("s3://bucket/metrics.csv", "r") as file:
            rows = list(csv.DictReader(file))
        ```
    """
    if not replace and _is_served_by_another():
        return False
    global _default  # noqa: PLW0603  of this process
    if not (config is None and region is None and endpoint_url is None):
        _default = store_config(config, region, endpoint_url)
    package.register_implementation("s3", ObjectFileSystem, clobber=True)
    return True


def _is_served_by_another() -> bool:
    present = package.registry.get("s3")
    if present is not None:
        return present is not ObjectFileSystem
    return importlib.util.find_spec(known_implementations["s3"]["class"].partition(".")[0]) is not None
