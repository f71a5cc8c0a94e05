"""The bytes to decode: of a reader, of an object with the buffer protocol, or in a dict of Hugging Face datasets."""

import io
from typing import Any, BinaryIO

from typing_extensions import Buffer as BufferProtocol

from torchobj._torchobj import ObjectReader
from torchobj.exceptions import ConfigError

#: An object to decode.
Data = ObjectReader | BufferProtocol | dict[str, Any]


def _content(data: Data) -> ObjectReader | BufferProtocol:
    """The bytes in a dict of Hugging Face datasets, and anything else unchanged."""
    if not isinstance(data, dict):
        return data
    content: BufferProtocol | None = data.get("bytes")
    if content is None:
        path = data.get("path")
        reason = f"a dict of {', '.join(map(repr, data))}" if path is None else f"only the path {path!r}, and no bytes"
        raise ConfigError(f"torchobj.decode: {reason}: pass the bytes of the object, such as torchobj.get(url)")
    return content


def memory_of(data: Data) -> memoryview:
    """The bytes, shared if they are in memory."""
    data = _content(data)
    if isinstance(data, ObjectReader):
        if data.buffer is not None:
            return data.getbuffer()
        data.seek(0)
        return memoryview(data.read())
    return memoryview(data).cast("B")


def file_of(data: Data) -> BinaryIO:
    """The bytes as a file, at its start."""
    data = _content(data)
    if isinstance(data, ObjectReader):
        data.seek(0)
        return data
    return io.BytesIO(data)
