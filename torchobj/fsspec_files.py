"""Files that are written through fsspec: each appears whole, or not at all. Knows no file system."""

import io
import logging
import sys
from types import TracebackType
from typing import Any

from torchobj.checkpoint.files import ObjectWriter

__all__ = ["TextFile", "TransactionFile"]

logger = logging.getLogger("torchobj")


class TransactionFile(ObjectWriter):
    """A writer for fsspec: it can be part of a transaction, where what is closed waits for `commit()`.

    `fsspec.open` and others end a `with` block that raised by `close()` and nothing else. So a close while an exception
    is on its way, or is handled, that was not yet when the file was opened, forgets what was written.
    """

    is_deferred = False
    _is_waiting = False

    def __init__(self, url: str, **arguments: Any) -> None:
        #: The exception that is being handled around all of the file's use.
        self._around = sys.exc_info()[1]
        super().__init__(url, **arguments)

    def close(self) -> None:
        """Makes the object, unless an exception is on its way or a transaction is to decide."""
        if self.closed or self._is_waiting:
            return
        error, around, self._around = sys.exc_info()[1], self._around, None
        if error is not None and error is not around:
            logger.warning("%s was closed because of %s: nothing was committed", self.url, type(error).__name__)
            self.abort()
        elif self.is_deferred:
            self._is_waiting = True
        else:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            # The block ended well, whatever is handled around it.
            self._around = sys.exc_info()[1]
        super().__exit__(kind, error, traceback)

    def commit(self) -> None:
        """Makes the object, at the end of a transaction."""
        super().close()

    def discard(self) -> None:
        """Forgets it, as its transaction failed."""
        self.abort()


class TextFile(io.TextIOWrapper):
    """A text file whose object does not appear where the `with` block raised."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and isinstance(self.buffer, ObjectWriter):
            self.buffer.abort()
        super().__exit__(kind, error, traceback)
