"""The time by the clock of a store: hosts disagree, and by a clock that is fast here, what is young would be old."""

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import Protocol

from torchobj.exceptions import StoreError
from torchobj.store import ObjectInfo, Store

__all__ = ["time_of_store"]


class _Folder(Protocol):
    @property
    def store(self) -> Store: ...
    def key(self, name: str, /) -> str: ...
    def objects(self, beginning: str, /) -> Sequence[ObjectInfo]: ...


def time_of_store(
    folder: _Folder, name: str, data: bytes, delete: Callable[[list[str]], None]
) -> datetime.datetime | None:
    """The time by the clock that gives objects their times; None where a listing has no times.

    Args:
        folder: Where an object is written, listed and deleted.
        name: Its name: one that no other writer uses.
        data: Its content.
        delete: Deletes objects by their names in the folder.

    Raises:
        StoreError: The object cannot be written, or the store cannot be listed.
    """
    folder.store.put(folder.key(name), data)
    try:
        # A listing, because the other times come from listings: the answer to a HEAD may have no fractions of a second.
        return next((info.last_modified for info in folder.objects(name)), None)
    finally:
        with contextlib.suppress(StoreError):
            delete([name])
