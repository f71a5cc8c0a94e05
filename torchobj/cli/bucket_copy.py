"""Copies objects from bucket to bucket: on the server within a provider, as a stream between providers."""

from torchobj.config import StoreConfig
from torchobj.store import Store
from torchobj.store.attributes import ObjectAttributes
from torchobj.store.file_objects import ObjectWriter
from torchobj.store.file_objects import open as open_object
from torchobj.urls import Url, parse_url

__all__ = ["copy_object", "is_on_server"]

_BLOCK_BYTES = 8 << 20


def is_on_server(source: Url, destination: Url) -> bool:
    """Whether the server makes the copy, because both are of the same provider."""
    return source.scheme == destination.scheme


def copy_object(source: str, destination: str, config: StoreConfig, size: int | None = None) -> tuple[int, str | None]:
    """Copies an object with its headers and metadata. Returns its size in bytes, and the version of the copy if known.

    Args:
        source, destination: URLs.
        config: The configuration of both stores.
        size: Size of the object if a listing returned it: a copy on the server then takes no request for metadata.

    Raises:
        StoreError: The object cannot be read or written; the destination is unchanged.
    """
    old, new = parse_url(source), parse_url(destination)
    on_server = is_on_server(old, new)
    if on_server and size is not None:
        return size, Store(new.base, config=config).copy(source, new.key)
    info = Store(old.base, config=config).head(old.key)
    if on_server:
        return info.size or 0, Store(new.base, config=config).copy(source, new.key)
    # The storage classes of providers differ.
    attributes = {name: getattr(info, name) for name in ObjectAttributes.__annotations__ if name != "storage_class"}
    with (
        open_object(source, "rb", config=config) as reader,
        ObjectWriter(destination, config=config, **attributes) as writer,
    ):
        while block := reader.read(_BLOCK_BYTES):
            writer.write(block)
    return info.size or 0, None
