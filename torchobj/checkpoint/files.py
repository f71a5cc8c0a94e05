"""Objects as files: `open`, and the writer whose object appears only by a close after which nothing failed.

Reading is in Rust (`ObjectReader`). Imports no torch; what it knows of torch is how a `torch.save` looks that failed.
"""

import io
import logging
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, overload

from torchobj import _torchobj
from torchobj._torchobj import ObjectReader
from torchobj.buffers import contiguous
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import CheckpointError, ConfigError
from torchobj.urls import Url, parse_object_url, parse_url

__all__ = ["ObjectWriter", "open"]

logger = logging.getLogger("torchobj")

io.BufferedIOBase.register(ObjectReader)

#: What `_torchobj` takes for an object with no headers and metadata of its own.
NO_ATTRIBUTES: Any = (None, None, None, None, None, None, [])

#: So much of the end of what was written is kept: that of a failed torch.save, with the names of its three records.
_END_BYTES = 4096

#: What torch's archive writer adds by itself when it is closed, behind the archive's name. A torch.save whose pickling
#: raised leaves a sound archive of these alone (torch 2.15, torch/serialization.py, `_save`).
_SERIALIZATION_ID = b".data/serialization_id"
_CLOSING_RECORDS = frozenset({b"version", b"byteorder", _SERIALIZATION_ID})

#: Of a zip file: its end, whose length is 22 bytes where there is no comment, and an entry of its directory.
_ZIP_END = struct.Struct("<4s4H2IH")
_ZIP_ENTRY = struct.Struct("<4s24x3H12x")


class _End:
    """The last bytes that were written, and how many there were in all."""

    def __init__(self) -> None:
        self._last, self._length = b"", 0

    def add(self, data: memoryview) -> None:
        self._last = (self._last + bytes(data[-_END_BYTES:]))[-_END_BYTES:]
        self._length += len(data)

    def is_failed_torch_save(self) -> bool:
        """Whether this is what `torch.save` leaves when pickling raised: an archive with no record of the caller's."""
        names = self._names()
        inner = {name.partition(b"/")[2] for name in names}
        return _SERIALIZATION_ID in inner and inner <= _CLOSING_RECORDS

    def _names(self) -> list[bytes]:
        """The records of an archive; none where this is no archive, or its directory is larger than what is kept."""
        if len(self._last) < _ZIP_END.size:
            return []
        mark, *_, size, offset, _ = _ZIP_END.unpack(self._last[-_ZIP_END.size :])
        start = offset - (self._length - len(self._last))
        if mark != b"PK\x05\x06" or start < 0:
            return []
        directory, names = self._last[start : start + size], []
        while len(directory) >= _ZIP_ENTRY.size:
            mark, name_length, *others = _ZIP_ENTRY.unpack(directory[: _ZIP_ENTRY.size])
            if mark != b"PK\x01\x02":
                return []
            end = _ZIP_ENTRY.size + name_length
            names.append(directory[_ZIP_ENTRY.size : end])
            directory = directory[end + sum(others) :]
        return names


if TYPE_CHECKING:
    # As in typeshed: what is a buffered file is a BinaryIO to type checkers.
    class _BinaryFile(io.BufferedIOBase, BinaryIO): ...
else:
    _BinaryFile = io.BufferedIOBase


class ObjectWriter(_BinaryFile):
    """An object that is being written, as a binary file.

    The object appears, whole, by a `close()` before which nothing failed; in a `with` block that is its end. An
    exception in the block, a part that cannot be written, a writer that is dropped, or a process that is killed leave
    what was there before; and, but for the kill, no parts in the bucket. The first error is the one that is raised.

    Parts are uploaded while the next is filled, in `StoreConfig.write_buffer_bytes` of memory. An object smaller than a
    part is one PUT. Not to be used from two threads at once. It cannot seek: what does, as `torch.export.save`, is
    given an `io.BytesIO`, and this what that holds.

    Args:
        url: `s3://bucket/key`, `file:///folder/file` or `memory://name/key`.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        region, endpoint_url: In place of the configuration's.
        content_type, storage_class, metadata: As for `Store.put`.
        if_none_match: The object must not exist when it is closed.

    Raises:
        ConfigError: No URL of an object.
    """

    def __init__(
        self,
        url: str,
        *,
        config: StoreConfig | S3ClientConfig | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        content_type: str | None = None,
        storage_class: str | None = None,
        metadata: Mapping[str, str] | None = None,
        if_none_match: bool = False,
    ) -> None:
        self._native: _torchobj.NativeWriter | None = None
        self._failed: BaseException | None = None
        self._end = _End()
        parsed, store = _target_of(url, store_config(config, region, endpoint_url))
        attributes = (content_type, None, None, None, None, storage_class, sorted((metadata or {}).items()))
        self._url = parsed
        self._position = 0
        self._version = ""
        self._native = _torchobj.NativeWriter(store, parsed.key, attributes, if_none_match)

    @property
    def url(self) -> str:
        """The object's URL."""
        return str(self._url)

    @property
    def name(self) -> str:
        """The object's URL, as files have the path here."""
        return str(self._url)

    @property
    def bucket(self) -> str:
        """The bucket; empty for a file."""
        return self._url.bucket

    @property
    def key(self) -> str:
        """The key, raw."""
        return self._url.key

    @property
    def version(self) -> str:
        """The store's name of what was written, an ETag or a generation; empty before it is closed."""
        return self._version

    @property
    def mode(self) -> str:
        """`wb`"""
        return "wb"

    @property
    def closed(self) -> bool:
        """Whether it was closed or aborted."""
        return self._native is None

    def __repr__(self) -> str:
        return f"<torchobj.ObjectWriter {self._url}{' (closed)' if self.closed else ''}>"

    def _open(self) -> "_torchobj.NativeWriter":
        if self._native is None:
            raise ValueError("I/O operation on closed file")
        return self._native

    def write(self, data: Any, /) -> int:
        """Writes all of a contiguous buffer and returns its length in bytes. Its bytes are free when this returns.

        Raises:
            StoreError: A part could not be written, now or before.
        """
        native = self._open()
        if self._failed is not None:
            raise self._failed
        view = memoryview(contiguous(data))
        if view.nbytes == 0:
            # Nothing to write; a view with a zero in its shape cannot be cast.
            return 0
        view = view.cast("B")
        try:
            native.write(view)
        except BaseException as error:
            # A part may be lost: from here on nothing can make the object.
            self._failed = error
            raise
        self._end.add(view)
        self._position += len(view)
        return len(view)

    def flush(self) -> None:
        """Does nothing: parts are sent when they are full, the object appears when it is closed."""
        self._open()

    def tell(self) -> int:
        """Bytes written so far."""
        self._open()
        return self._position

    def writable(self) -> bool:
        """Whether it can be written: yes."""
        return True

    def readable(self) -> bool:
        """Whether it can be read: no."""
        return False

    def seekable(self) -> bool:
        """Whether its position can be moved: no."""
        return False

    def close(self) -> None:
        """Makes the object. A second call does nothing.

        Raises:
            StoreError: What kept a part, or the end, from succeeding. The object is what it was before.
            CheckpointError: What was written is what `torch.save` leaves when it fails.
        """
        if self._native is None:
            return
        if self._failed is not None:
            self.abort()
            raise self._failed
        if self._end.is_failed_torch_save():
            self.abort()
            raise CheckpointError(f"{self._url}: torch.save failed before its end: nothing was committed")
        native, self._native = self._native, None
        self._version = native.close()

    def abort(self) -> None:
        """Forgets what was written. The object is what it was before."""
        native, self._native = self._native, None
        if native is not None:
            native.abort()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
            return
        self.abort()
        # torch hides what its file raised behind a RuntimeError of its own ("unexpected pos").
        if self._failed is not None and self._failed is not exc and isinstance(exc, Exception):
            raise self._failed from exc

    def __del__(self) -> None:
        # io.IOBase would close here, and so commit what nobody finished.
        if getattr(self, "_native", None) is not None:
            logger.warning("%s was dropped before it was closed: nothing was committed", self._url)
            self._native = None


def _store_of(url: str, config: StoreConfig) -> tuple[Url, "_torchobj.NativeStore"]:
    parsed = parse_url(url)
    if not parsed.key:
        raise ConfigError(f"url={url!r}: names no object, expected {parsed.base}/key")
    return parsed, _torchobj.NativeStore(parsed.scheme, parsed.bucket, config)


def _target_of(url: str, config: StoreConfig) -> tuple[Url, "_torchobj.NativeStore"]:
    """As `_store_of`, for an object that is to be written."""
    parsed = parse_object_url(url)
    return parsed, _torchobj.NativeStore(parsed.scheme, parsed.bucket, config)


def open_reader(
    url: str, config: StoreConfig, jump_bytes: int | None = None, ahead_bytes: int | None = None
) -> ObjectReader:
    """A reader of an object that fetches as it is read; nothing is asked of the store before its first use."""
    parsed, store = _store_of(url, config)
    return ObjectReader.open(store, str(parsed), parsed.bucket, parsed.key, jump_bytes, ahead_bytes)


@overload
def open(  # noqa: A001  the builtin's name, as in io and gzip
    url: str, mode: Literal["rb"] = "rb", *, config: StoreConfig | S3ClientConfig | None = None
) -> ObjectReader: ...
@overload
def open(  # noqa: A001  the builtin's name, as in io and gzip
    url: str, mode: Literal["wb", "xb"], *, config: StoreConfig | S3ClientConfig | None = None
) -> ObjectWriter: ...


def open(  # noqa: A001  the builtin's name, as in io and gzip
    url: str, mode: str = "rb", *, config: StoreConfig | S3ClientConfig | None = None
) -> ObjectReader | ObjectWriter:
    """Opens an object as a binary file.

    Args:
        url: `s3://bucket/key`, `file:///folder/file` or `memory://name/key`.
        mode: `rb` reads, fetching ahead of the position; `wb` writes; `xb` writes an object that must not exist.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.

    Returns:
        A file; for writing, one whose object appears only by a `close()` before which nothing failed.

    Raises:
        ConfigError: Another mode, or no URL of an object.

    Example:
        >>> with open("memory://example/x.bin", "wb") as file:
        ...     file.write(b"four")
        4
        >>> open("memory://example/x.bin").read()
        b'four'
    """
    if mode == "rb":
        return open_reader(url, store_config(config))
    if mode in ("wb", "xb"):
        return ObjectWriter(url, config=config, if_none_match=mode == "xb")
    raise ConfigError(f"mode={mode!r}: must be rb, wb or xb")
