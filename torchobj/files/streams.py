"""Uploads bytes of unknown length from a file, a pipe or an iterator. Does not import torch."""

import time
from collections.abc import Iterable, Iterator
from typing import Any, Unpack

from torchobj import _torchobj
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import ConfigError
from torchobj.store.attributes import ObjectAttributes, native_attributes
from torchobj.store.buffers import contiguous
from torchobj.store.conditions import check_condition
from torchobj.store.transfers import ProgressCallback, Transfer, counters_to
from torchobj.urls import parse_object_url

__all__ = ["upload_stream"]

#: Bytes that are read from a file at once.
_CHUNK_BYTES = 1 << 20

#: Minimum time between two calls of `progress`.
_PROGRESS_INTERVAL_S = 0.1


def upload_stream(
    stream: Any,
    url: str,
    *,
    config: StoreConfig | None = None,
    overwrite: bool = True,
    if_version: str | None = None,
    progress: ProgressCallback | None = None,
    **attributes: Unpack[ObjectAttributes],
) -> Transfer:
    """Uploads the bytes of a stream of unknown length. The object appears when the stream has ended without an error.

    Parts are sent while the next one is filled, within `StoreConfig.write_buffer_bytes` of memory. Their size grows: an
    object can have several terabytes.

    Args:
        stream: A binary file, such as `sys.stdin.buffer`, a pipe or a socket file, which is read to its end; or an
            iterable of bytes-like objects. It is not closed.
        url: As for `upload_file`.
        config: As for `upload_file`.
        overwrite: As for `upload_file`.
        if_version: As for `upload_file`.
        progress: As for `upload_file`. The totals are None until the end of the stream.
        attributes: As for `upload_file`.

    Returns:
        Size and version of the object; its path is None.

    Raises:
        ConfigError: `stream` is a path, a text file or a single bytes object, or yields something else than bytes.
        StoreError: A part could not be written, or the condition is not met. An exception of the stream, also
            KeyboardInterrupt, aborts the upload and is raised.

    Example:
        >>> upload_stream((str(number).encode() for number in range(5)), "memory://files/digits").size
        5
    """
    report = counters_to(progress)
    parsed = parse_object_url(url)
    chunks = _chunks(stream)
    native = _torchobj.NativeStore(parsed.scheme, parsed.bucket, resolve(str(parsed), config))
    check_condition(overwrite, if_version)
    writer = _torchobj.NativeWriter(native, parsed.key, native_attributes(attributes), overwrite, if_version)
    size, reported = 0, time.monotonic()
    try:
        for chunk in chunks:
            size += writer.write(chunk)
            if report is not None and time.monotonic() - reported >= _PROGRESS_INTERVAL_S:
                reported = time.monotonic()
                report(0, None, size, None, 0)
        version = writer.close()
    except BaseException:
        writer.abort()
        raise
    if report is not None:
        report(1, 1, size, size, 0)
    return Transfer(native.url(parsed.key), None, size, version, skipped=False)


def _chunks(stream: Any) -> Iterator[Any]:
    if hasattr(stream, "read"):
        return _chunks_of_file(stream)
    if isinstance(stream, Iterable) and not isinstance(stream, (str, bytes, bytearray, memoryview)):
        return _chunks_of_iterable(stream)
    raise ConfigError(
        f"stream={type(stream).__name__}: must be a binary file or an iterable of bytes; upload_file uploads a path, "
        "and Store.put bytes"
    )


def _chunks_of_file(file: Any) -> Iterator[Any]:
    readinto = getattr(file, "readinto1", None) or getattr(file, "readinto", None)
    if readinto is None:
        while chunk := _available(file.read(_CHUNK_BYTES)):
            yield _bytes_like(chunk)
        return
    memory = memoryview(bytearray(_CHUNK_BYTES))
    while True:
        count = _available(readinto(memory))
        if not count:
            return
        yield memory[:count]


def _available(result: Any) -> Any:
    if result is None:
        raise ConfigError("stream: is a non-blocking file without data; make it blocking with os.set_blocking")
    return result


def _chunks_of_iterable(chunks: Iterable[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield _bytes_like(chunk)


def _bytes_like(chunk: Any) -> Any:
    if isinstance(chunk, str):
        raise ConfigError("stream: yields str; open the file in binary mode, or encode the text")
    try:
        return memoryview(contiguous(chunk))
    except TypeError as error:
        raise ConfigError(f"stream: yields {type(chunk).__name__}; must yield bytes") from error
