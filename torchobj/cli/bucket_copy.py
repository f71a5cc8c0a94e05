"""Copies objects from bucket to bucket: on the server within a provider, as a stream between providers."""

from torchobj.checkpoint.files import ObjectWriter
from torchobj.checkpoint.files import open as open_object
from torchobj.config import StoreConfig
from torchobj.store import Store
from torchobj.urls import parse_url

__all__ = ["copy_object"]

_BLOCK_BYTES = 8 << 20


def copy_object(source: str, destination: str, config: StoreConfig) -> tuple[int, str | None]:
    """Copies an object with its type and metadata. Returns its size in bytes, and the version of the copy if known.

    Raises:
        StoreError: The object cannot be read or written; the destination is unchanged.
    """
    old, new = parse_url(source), parse_url(destination)
    info = Store(old.base, config=config).head(old.key)
    if old.scheme == new.scheme:
        return info.size or 0, Store(new.base, config=config).copy(source, new.key)
    metadata = dict(info.metadata)
    with (
        open_object(source, "rb", config=config) as reader,
        ObjectWriter(destination, config=config, content_type=info.content_type, metadata=metadata) as writer,
    ):
        while block := reader.read(_BLOCK_BYTES):
            writer.write(block)
    return info.size or 0, None
