"""Files written through fsspec, each of which appears whole or not at all, and the entries of listings."""

import contextlib
import io
import logging
import sys
from types import TracebackType
from typing import Any

import fsspec.spec as package  # type: ignore[import-untyped]

from torchobj.fsspec.handled import handlers_of, only_iterators_ended
from torchobj.store import ObjectInfo
from torchobj.store.file_objects import ObjectWriter, log_abort

__all__ = [
    "BlockFile",
    "CompressedFile",
    "TransactionFile",
    "entries_by_name",
    "file_entry",
    "folder_entry",
]

logger = logging.getLogger("torchobj")


def file_entry(name: str, info: ObjectInfo) -> dict[str, Any]:
    """The entry of an object."""
    return {
        "name": name,
        "size": info.size,
        "type": "file",
        "ETag": info.version,
        "LastModified": info.last_modified,
    }


def folder_entry(name: str) -> dict[str, Any]:
    """The entry of a folder."""
    return {"name": name, "size": 0, "type": "directory"}


def entries_by_name(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The entries by name. An object with the name of a folder takes precedence, and its entry has `is_folder`."""
    folders = {entry["name"]: entry for entry in entries if entry["type"] == "directory"}
    files = {entry["name"]: entry for entry in entries if entry["type"] == "file"}
    return folders | files | {name: files[name] | {"is_folder": True} for name in files.keys() & folders.keys()}


class BlockFile(package.AbstractBufferedFile):  # type: ignore[misc]
    """A file whose blocks a caching file system of fsspec, such as `blockcache`, reads and keeps."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content


class TransactionFile(ObjectWriter):
    """A writer for fsspec that can be part of a transaction: a closed file then waits for `commit()`.

    `fsspec.open` and others only call `close()` when a `with` block raises. A close therefore aborts the write if an
    exception is being raised or handled that was not there when the file was opened: it cannot be told whether the
    content is whole. It commits in an `except` clause for the end of an iterator, StopIteration or StopAsyncIteration.
    """

    is_deferred = False
    _is_waiting = False

    def __init__(self, url: str, **arguments: Any) -> None:
        self._record_exception()
        super().__init__(url, **arguments)

    def _record_exception(self) -> None:
        """Records the exception that is being handled, and where. It is no failure of what is written from now on."""
        self._exception_at_open = sys.exc_info()[1]
        self._handlers_at_open = handlers_of(self._exception_at_open)

    @property
    def closed(self) -> bool:
        """Whether the file was closed or aborted, also if its transaction has not ended."""
        return self._is_waiting or super().closed

    def close(self) -> None:
        """Commits the object, unless an exception is being raised or the file is part of a transaction."""
        if self.closed:
            return
        error, at_open, self._exception_at_open = sys.exc_info()[1], self._exception_at_open, None
        if error is not None and error is at_open:
            # It may have been raised again, and pass through a `with` or `finally` that it had not reached.
            handlers = handlers_of(error)
            is_failed = handlers != self._handlers_at_open and bool(handlers) and not handlers[0]
        else:
            is_failed = error is not None and not only_iterators_ended(error, at_open)
        if error is not None and is_failed:
            message = log_abort(self.url, error)
            self.abort()
            error.add_note(f"{message}; to commit it, close the file before the exception or after its handler")
        elif self.is_deferred:
            self._is_waiting = True
        else:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            # The block succeeded, whatever exception is handled around it.
            self._record_exception()
        super().__exit__(kind, error, traceback)

    def commit(self) -> None:
        """Commits the object at the end of a transaction."""
        super().close()

    def discard(self) -> None:
        """Aborts the write because its transaction failed."""
        logger.warning("%s: the write was aborted with its transaction; nothing was committed", self.url)
        self.abort()


class CompressedFile(io.BufferedIOBase):
    """A file whose content a compressor of fsspec writes to another one.

    Such a compressor does not close the file that it writes to. Closing this one closes both, so that the object
    appears, unless an exception is being raised; dropping it discards what was written.
    """

    def __init__(self, compressor: Any, file: TransactionFile) -> None:
        self._compressor, self._file = compressor, file

    @property
    def name(self) -> str:
        """The object's URL."""
        return self._file.name

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._file.closed

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any, /) -> int:
        """Compresses bytes and returns their number."""
        count: int = self._compressor.write(data)
        return count

    def tell(self) -> int:
        """Returns the number of bytes before their compression, if the compressor counts them."""
        position: int = self._compressor.tell()
        return position

    def close(self) -> None:
        """Closes the compressor, which writes the end of its format, and the file."""
        self._finish(None)
        self._file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._finish(error)
        self._file.__exit__(kind, error, traceback)

    def _finish(self, error: BaseException | None) -> None:
        """Closes the compressor. Raises what that raises, unless there is an error already."""
        try:
            if not self.closed:
                self._compressor.close()
        except Exception:
            self._file.abort()
            if error is None:
                raise

    def __del__(self) -> None:
        # io.IOBase would call close, which would create an incomplete object. The compressor must not write later.
        if not self.closed:
            with contextlib.suppress(Exception):
                self._compressor.close()
            self._file.__del__()
