"""Reads objects of any buckets and schemes in one call. Does not import torch."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

from torchobj import _torchobj
from torchobj._torchobj import Buffer, ObjectRef
from torchobj.config import Prefix, StoreConfig, file_for, resolve, store_config
from torchobj.exceptions import ConfigError
from torchobj.store.buffers import contiguous
from torchobj.urls import parse_object_url, parse_url

__all__ = ["checked_list", "get", "get_many", "read_jobs"]

_Target = TypeVar("_Target", bound=str | ObjectRef)


def checked_list(name: str, values: Iterable[_Target]) -> Iterable[_Target]:
    """Raises ConfigError if `values`, the argument `name`, is a single string; otherwise returns it."""
    if isinstance(values, str):
        raise ConfigError(f"{name}={values!r}: must be a list, such as [{values!r}]")
    return values


def read_jobs(
    jobs: Sequence[tuple["_torchobj.NativeStore", str | ObjectRef]], into: Sequence[Any] | None, *, return_errors: bool
) -> Any:
    """Reads objects as `get_many`, given a native store with each key or `ObjectRef`."""
    if into is None:
        return _torchobj.get_many(jobs, return_errors=return_errors)
    if len(into) != len(jobs):
        raise ConfigError(f"into has {len(into)} buffers for {len(jobs)} objects")
    return _torchobj.get_many(jobs, [contiguous(buffer) for buffer in into], return_errors=return_errors)


def get(url: str, *, version: str | None = None, config: StoreConfig | None = None) -> Buffer:
    """Reads an object, as `Store.get`.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`.
        version: The version to read.
        config: Settings of the store.

    Raises:
        ConfigError: The URL does not name an object.
        ObjectNotFoundError: The object does not exist.
        StoreError: Errors that persist after the retries.

    Example:
        >>> import torchobj
        >>> _ = torchobj.Store("memory://a").put("x.txt", b"text")
        >>> get("memory://a/x.txt").decode()
        'text'
    """
    parsed = parse_object_url(url)
    store = _torchobj.NativeStore(parsed.scheme, parsed.bucket, resolve(str(parsed), config))
    return store.get(parsed.key, version=version)


@overload
def get_many(
    urls: Iterable[str | ObjectRef],
    into: None = None,
    *,
    config: StoreConfig | None = None,
    return_errors: Literal[False] = False,
) -> list[Buffer]: ...
@overload
def get_many(
    urls: Iterable[str | ObjectRef],
    into: Sequence[Any],
    *,
    config: StoreConfig | None = None,
    return_errors: Literal[False] = False,
) -> list[int]: ...
@overload
def get_many(
    urls: Iterable[str | ObjectRef],
    into: Sequence[Any] | None = None,
    *,
    config: StoreConfig | None = None,
    return_errors: bool,
) -> list[Buffer | int | Exception]: ...


def get_many(
    urls: Iterable[str | ObjectRef],
    into: Sequence[Any] | None = None,
    *,
    config: StoreConfig | None = None,
    return_errors: bool = False,
) -> Any:
    """Reads objects of any buckets and schemes, or ranges of them, in one call.

    Args:
        urls: The objects: URLs, or `ObjectRef`s with the range or version to read.
        into: A writable, contiguous buffer per object, as for `Store.get_many`.
        config: Settings of the store.
        return_errors: Whether to return exceptions in place of objects that cannot be read.

    Returns:
        A `Buffer` per URL, in order, as `Store.get` returns it; with `into` the number of bytes written to each buffer.

    Raises:
        StoreError: The first error that persists after its retries; the other reads are aborted.
        ConfigError: `urls` is a str, or contains an invalid URL; or a buffer is too small for its object.
        ValueError: A buffer is read-only, or the number of buffers differs from that of the URLs.

    Example:
        >>> import torchobj
        >>> _ = torchobj.Store("memory://a").put("x", b"1"), torchobj.Store("memory://b").put("y", b"234")
        >>> [bytes(data) for data in get_many(["memory://a/x", ObjectRef("memory://b/y", start=1)])]
        [b'1', b'34']
    """
    config = store_config(config)
    file = file_for(config)
    stores: dict[tuple[str, Prefix | None], _torchobj.NativeStore] = {}
    jobs: list[tuple[_torchobj.NativeStore, str | ObjectRef]] = []
    for target in checked_list("urls", urls):
        url = target.url if isinstance(target, ObjectRef) else target
        parsed = parse_url(url)
        configured = (parsed.base, file.longest(url))
        store = stores.get(configured)
        if store is None:
            store = stores[configured] = _torchobj.NativeStore(parsed.scheme, parsed.bucket, resolve(url, config))
        jobs.append((store, target if isinstance(target, ObjectRef) else parsed.key))
    return read_jobs(jobs, into, return_errors=return_errors)
