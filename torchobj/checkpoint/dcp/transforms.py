"""Items that were saved through extensions of torch's streams, as compression."""

import io
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

from torchobj.exceptions import CheckpointError

__all__ = ["is_transformed", "untransformed"]


def _descriptors(info: _StorageInfo) -> Any:
    # Metadata, and torch, of before there were extensions have no such field.
    return getattr(info, "transform_descriptors", None)


def is_transformed(info: _StorageInfo) -> bool:
    """Whether an item's bytes are not those of its archive."""
    return bool(_descriptors(info))


def untransformed(content: bytearray, info: _StorageInfo, name: str) -> bytes | bytearray:
    """The bytes that were saved.

    Raises:
        CheckpointError: An extension is not known, or it fails; the message has `name`.
    """
    if not is_transformed(info):
        return content
    try:
        from torch.distributed.checkpoint._extension import (  # noqa: PLC0415  torch 2.6 has none
            ExtensionRegistry,
            StreamTransformExtension,
        )

        stream: Any = io.BytesIO(content)
        for extension in ExtensionRegistry().from_descriptor_list(_descriptors(info)):
            if isinstance(extension, StreamTransformExtension):
                stream = extension.transform_from(stream)
        plain: bytes = stream.read(-1)
    except Exception as error:
        raise CheckpointError(
            f"{name}: was saved through {list(_descriptors(info))}, which fails: {error!r}"
        ) from error
    return plain
