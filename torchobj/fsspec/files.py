"""Files written through fsspec, each of which appears whole or not at all, and the entries of listings."""

import io
import logging
import sys
from types import TracebackType
from typing import Any

from torchobj.checkpoint.files import ObjectWriter
from torchobj.store import ObjectInfo

__all__ = ["TextFile", "TransactionFile", "file_entry", "folder_entry"]

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


class TransactionFile(ObjectWriter):
    """A writer for fsspec that can be part of a transaction: a closed file then waits for `commit()`.

    `fsspec.open` and others only call `close()` when a `with` block raises. A close therefore aborts the write if an
    exception is being raised or handled that was not there when the file was opened.
    """

    is_deferred = False
    _is_waiting = False

    def __init__(self, url: str, **arguments: Any) -> None:
        #: The exception that was being handled when the file was opened.
        self._exception_at_open = sys.exc_info()[1]
        super().__init__(url, **arguments)

    def close(self) -> None:
        """Commits the object, unless an exception is being raised or the file is part of a transaction."""
        if self.closed or self._is_waiting:
            return
        error, at_open, self._exception_at_open = sys.exc_info()[1], self._exception_at_open, None
        if error is not None and error is not at_open:
            logger.warning(
                "%s: the write was aborted because of %s; nothing was committed", self.url, type(error).__name__
            )
            self.abort()
        elif self.is_deferred:
            self._is_waiting = True
        else:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            # The block succeeded, whatever exception is handled around it.
            self._exception_at_open = sys.exc_info()[1]
        super().__exit__(kind, error, traceback)

    def commit(self) -> None:
        """Commits the object at the end of a transaction."""
        super().close()

    def discard(self) -> None:
        """Aborts the write because its transaction failed."""
        self.abort()


class TextFile(io.TextIOWrapper):
    """A text file whose object does not appear if the `with` block raises."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and isinstance(self.buffer, ObjectWriter):
            self.buffer.abort()
        super().__exit__(kind, error, traceback)
