"""Objects as files: `open`, `ObjectWriter` and `TextFile`.

`ObjectReader` is written in Rust. Does not import torch.
"""

import codecs
import io
import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypedDict, Unpack, overload

from torchobj import _shutdown, _torchobj
from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import ConfigError
from torchobj.store.attributes import ObjectAttributes, native_attributes
from torchobj.store.buffers import contiguous
from torchobj.store.conditions import check_condition
from torchobj.urls import Url, parse_object_url, parse_url

__all__ = [
    "ObjectWriter",
    "OpenOptions",
    "TextFile",
    "WriteConditions",
    "check_before_commit",
    "ends_silently",
    "log_abort",
    "open",
]

logger = logging.getLogger("torchobj")

io.BufferedIOBase.register(ObjectReader)

#: Attributes of an object without headers and metadata of its own, for `_torchobj`.
NO_ATTRIBUTES: "_torchobj.Attributes" = {"metadata": {}}

#: Length of the end of the written data that is kept for the checks: it contains the directory of a small archive.
_END_BYTES = 4096

#: What runs before an object is created: see `check_before_commit`.
_checks: list[Callable[[str, bytes, int], None]] = []


def check_before_commit(check: Callable[[str, bytes, int], None]) -> None:
    """Adds a check of what every `ObjectWriter` has written, before the object is created.

    Args:
        check: Receives the URL, the last 4096 bytes of the data, and its length in bytes. If it raises, the writer is
            aborted, and its `close` raises the error.
    """
    _checks.append(check)


if TYPE_CHECKING:
    # As in typeshed: type checkers treat a buffered file as a BinaryIO.
    class _BinaryFile(io.BufferedIOBase, BinaryIO): ...
else:
    _BinaryFile = io.BufferedIOBase


class ObjectWriter(_BinaryFile):
    """A binary file that writes an object.

    `close()`, or the end of a `with` block, creates the whole object if nothing failed before. After an exception in
    the block, or if a part cannot be written, the writer is dropped, or the process is killed, the previous object is
    unchanged; except after a kill, no parts remain in the bucket. The first error is raised.

    Parts are uploaded while the next one is filled, in `StoreConfig.write_buffer_bytes` of memory. An object smaller
    than a part is one PUT. Not thread-safe. Cannot seek: for functions that do, such as `torch.export.save`, use an
    `io.BytesIO` and write its content.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`.
        config: Settings of the store.
        overwrite: If False, the object must not exist when the writer is closed.
        if_version: The object must have this version when the writer is closed.
        attributes: `content_type`, `metadata`, `storage_class` and the other attributes of `Store.put`.

    Raises:
        ConfigError: The URL does not name an object, or conditions exclude each other.
    """

    def __init__(
        self,
        url: str,
        *,
        config: StoreConfig | None = None,
        overwrite: bool = True,
        if_version: str | None = None,
        **attributes: Unpack[ObjectAttributes],
    ) -> None:
        self._native: _torchobj.NativeWriter | None = None
        self._failed: BaseException | None = None
        self._end = b""
        parsed, store = store_of(url, config, is_written=True)
        check_condition(overwrite, if_version)
        native = native_attributes(attributes)
        self._url = parsed
        self._position = 0
        self._version = ""
        self._native = _torchobj.NativeWriter(store, parsed.key, native, overwrite, if_version)

    @property
    def url(self) -> str:
        """The object's URL."""
        return str(self._url)

    @property
    def name(self) -> str:
        """The object's URL: files have their path here."""
        return str(self._url)

    @property
    def bucket(self) -> str:
        """The bucket; empty for a file."""
        return self._url.bucket

    @property
    def key(self) -> str:
        """The key, not decoded."""
        return self._url.key

    @property
    def version(self) -> str:
        """The store's version of the object, on S3 the ETag; empty until the writer is closed."""
        return self._version

    @property
    def mode(self) -> str:
        """`wb`"""
        return "wb"

    @property
    def closed(self) -> bool:
        """Whether the writer was closed or aborted."""
        return self._native is None

    def __repr__(self) -> str:
        return f"<torchobj.ObjectWriter {self._url}{' (closed)' if self.closed else ''}>"

    def _open(self) -> "_torchobj.NativeWriter":
        if self._native is None:
            raise ValueError("I/O operation on closed file")
        return self._native

    def write(self, data: Any, /) -> int:
        """Writes all of a contiguous buffer and returns its length in bytes. The buffer can be reused then.

        Raises:
            StoreError: This or an earlier part could not be written.
        """
        native = self._open()
        if self._failed is not None:
            raise self._failed
        view = memoryview(contiguous(data))
        if view.nbytes == 0:
            # A view with a zero in its shape cannot be cast.
            return 0
        view = view.cast("B")
        try:
            native.write(view)
        except BaseException as error:
            # A part may be missing: the object can no longer be created.
            self._failed = error
            raise
        self._end = (self._end + bytes(view[-_END_BYTES:]))[-_END_BYTES:]
        self._position += len(view)
        return len(view)

    def flush(self) -> None:
        """Does nothing: parts are sent when they are full, and `close` creates the object."""
        self._open()

    def tell(self) -> int:
        """Returns the number of bytes written so far."""
        self._open()
        return self._position

    def writable(self) -> bool:
        """Returns True."""
        return True

    def readable(self) -> bool:
        """Returns False."""
        return False

    def seekable(self) -> bool:
        """Returns False."""
        return False

    def close(self) -> None:
        """Creates the object. A second call does nothing.

        Raises:
            StoreError: A part could not be written, or the upload not finished. The previous object is unchanged.
            CheckpointError: The data is the output of a `torch.save` that failed.
        """
        if self._native is None:
            return
        if self._failed is not None:
            self.abort()
            raise self._failed
        try:
            for check in _checks:
                check(str(self._url), self._end, self._position)
        except BaseException:
            self.abort()
            raise
        native, self._native = self._native, None
        self._version = native.close()

    def abort(self) -> None:
        """Discards what was written. The previous object is unchanged."""
        native, self._native = self._native, None
        if native is not None:
            native.abort()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
            return
        if self._native is not None and ends_silently(exc):
            log_abort(str(self._url), exc)
        self.abort()
        # torch replaces an error of its file by a RuntimeError of its own ("unexpected pos").
        if self._failed is not None and self._failed is not exc and isinstance(exc, Exception):
            raise self._failed from exc

    def __del__(self) -> None:
        # io.IOBase would call close, which would create an incomplete object.
        if getattr(self, "_native", None) is not None:
            logger.warning("%s was dropped before it was closed: nothing was written", self._url)
            self._native = None
            _shutdown.finish_dropped()


def ends_silently(error: BaseException) -> bool:
    """Returns whether Python may handle an exception without a message.

    That is how a generator or a task is ended, an iterator ends, and `sys.exit()` ends the program.
    """
    return not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration)


def log_abort(url: str, error: BaseException) -> str:
    """Logs that an object was not written because of an exception, and returns the message."""
    message = f"{url}: the write was aborted because of {type(error).__name__}; nothing was committed"
    logger.warning("%s", message)
    return message


def store_of(url: str, config: StoreConfig | None, *, is_written: bool = False) -> tuple[Url, "_torchobj.NativeStore"]:
    """Returns the parsed URL of an object, and its store.

    Raises:
        ConfigError: The URL does not name an object, or not one that can be written.
    """
    parsed = parse_object_url(url) if is_written else parse_url(url)
    if not parsed.key:
        raise ConfigError(f"url={url!r}: names no object, expected {parsed.base}/key")
    return parsed, _torchobj.NativeStore(parsed.scheme, parsed.bucket, resolve(url, config))


def open_reader(
    url: str,
    config: StoreConfig | None,
    jump_bytes: int | None = None,
    ahead_bytes: int | None = None,
    *,
    version: str | None = None,
) -> ObjectReader:
    """Returns a file to read an object, of a version if one is given. Sends no request before its first use."""
    parsed, store = store_of(url, config)
    return ObjectReader.open(store, str(parsed), parsed.bucket, parsed.key, jump_bytes, ahead_bytes, version)


class TextFile(io.TextIOWrapper):
    """A text file over a binary file of torchobj.

    As with `ObjectWriter`, the object does not appear if the `with` block raises, or if the file is dropped unclosed.
    """

    def __init__(
        self, file: Any, encoding: str | None = None, *arguments: Any, is_appended: bool = False, **named: Any
    ) -> None:
        super().__init__(file, encoding, *arguments, **named)
        is_marked = not is_appended and codecs.lookup(self.encoding).name in ("utf-16", "utf-32")
        #: Byte-order mark, written before the first text. io.TextIOWrapper writes it to seekable files only.
        self._bom = "".encode(self.encoding) if is_marked else b""

    def write(self, text: str, /) -> int:
        """Writes text, and returns its number of characters."""
        if text and self._bom:
            self.buffer.write(self._bom)
            self._bom = b""
        return super().write(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        file: Any = self.buffer
        if error is None and not self.closed:
            try:
                self.flush()
            except BaseException as failed:
                file.__exit__(type(failed), failed, failed.__traceback__)
                raise
        file.__exit__(kind, error, traceback)

    def __del__(self) -> None:
        # io.TextIOWrapper would call close, which would create an incomplete object. A writer discards it.
        try:
            file: Any = self.buffer
        except ValueError:
            # Detached, and the caller's to close; or not initialized.
            return
        if hasattr(file, "__del__") and not file.closed:
            file.__del__()


class WriteConditions(TypedDict, total=False):
    """The conditions of a write, as arguments of `open`."""

    overwrite: bool
    if_version: str | None


class OpenOptions(WriteConditions, total=False):
    """The arguments of `open` for any mode; the last three are for text."""

    encoding: str | None
    errors: str | None
    newline: str | None


@overload
def open(url: str, mode: Literal["rb"] = "rb", *, config: StoreConfig | None = None) -> ObjectReader: ...  # noqa: A001
@overload
def open(  # noqa: A001
    url: str, mode: Literal["wb", "xb"], *, config: StoreConfig | None = None, **conditions: Unpack[WriteConditions]
) -> ObjectWriter: ...
@overload
def open(  # noqa: A001
    url: str,
    mode: Literal["r", "rt", "w", "wt", "x", "xt"],
    *,
    config: StoreConfig | None = None,
    **options: Unpack[OpenOptions],
) -> TextFile: ...
@overload
def open(  # noqa: A001
    url: str, mode: str, *, config: StoreConfig | None = None, **options: Unpack[OpenOptions]
) -> ObjectReader | ObjectWriter | TextFile: ...


def open(  # noqa: A001  the builtin's name, as in io and gzip
    url: str,
    mode: str = "rb",
    *,
    config: StoreConfig | None = None,
    overwrite: bool = True,
    if_version: str | None = None,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
) -> ObjectReader | ObjectWriter | TextFile:
    """Opens an object as a file.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`, `file:///folder/file` or `memory://name/key`.
        mode: `rb` reads, fetching ahead of the position; `wb` writes; `xb` is `wb` with `overwrite=False`. `r`, `w` and
            `x`, with or without a `t`, are the same for text.
        config: Settings of the store.
        overwrite: If False, the object must not exist when the file is closed. For `wb` and `w` only.
        if_version: The object must have this version when the file is closed. For `wb` and `w` only.
        encoding: Encoding of text; None: UTF-8, in every environment.
        errors, newline: As for the builtin `open`. For text only.

    Returns:
        A file. If it is for writing, `close()` creates the object, unless a write failed before.

    Raises:
        ConfigError: The mode is unknown, the URL does not name an object, or the mode does not take an argument.
        LookupError, ValueError: `encoding` or `newline` is unknown, as from the builtin `open`.
        PreconditionFailedError: From `close()`: the condition does not hold. This is also a `FileExistsError`.

    Example:
        >>> with open("memory://example/x.bin", "wb") as file:
        ...     file.write(b"four")
        4
        >>> open("memory://example/x.bin").read()
        b'four'
        >>> open("memory://example/x.bin", "r").read()
        'four'
    """
    name = str(mode)
    binary = name if name.endswith("b") else f"{name.removesuffix('t')}b"
    if binary not in ("rb", "wb", "xb"):
        raise ConfigError(f"mode={mode!r}: must be rb, wb or xb, or r, w or x for text")
    check_condition(overwrite, if_version)
    if binary != "wb" and (if_version is not None or (binary == "rb" and not overwrite)):
        given = f"overwrite={overwrite!r}" if if_version is None else f"if_version={if_version!r}"
        raise ConfigError(f"mode={mode!r}, {given}: exclude each other; conditions need mode='wb' or 'w'")
    text = {"encoding": encoding, "errors": errors, "newline": newline}
    if binary == mode and any(value is not None for value in text.values()):
        given = ", ".join(f"{name}={value!r}" for name, value in text.items() if value is not None)
        raise ConfigError(f"mode={mode!r}, {given}: exclude each other; text needs mode={mode[0]!r}")
    file: Any
    if binary == "rb":
        file = open_reader(url, config)
    else:
        file = ObjectWriter(url, config=config, overwrite=overwrite and binary != "xb", if_version=if_version)
    return file if binary == mode else TextFile(file, encoding or "utf-8", errors, newline)
