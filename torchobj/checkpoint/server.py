"""Determines the time by a store's clock, and whether a failed write can still take effect."""

import contextlib
import datetime
from collections.abc import Callable

from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.exceptions import StoreError

__all__ = ["time_of_store", "was_refused"]


def time_of_store(folder: CheckpointDir, name: str, delete: Callable[[list[str]], None]) -> datetime.datetime | None:
    """Returns the time by the clock that sets the times of objects; None if listings have no times.

    The clock of this host may be fast, so that recent objects would seem old.

    Args:
        folder: The folder where a temporary object is written, listed and deleted.
        name: Name of the object, which no other writer uses.
        delete: Deletes objects, given their names in the folder.

    Raises:
        StoreError: The object cannot be written, or the store cannot be listed.
    """
    folder.store.put(folder.key(name), b"")
    try:
        # A listing, as for the times it is compared with: the response to a HEAD may have no fractions of a second.
        return next((info.last_modified for info in folder.objects(name)), None)
    finally:
        with contextlib.suppress(StoreError):
            delete([name])


def was_refused(error: StoreError) -> bool:
    """Returns whether the store refused a write, so that it will never take effect.

    After a lost response, a timeout or a status of 500 and above, an attempt may still take effect later, even if a
    later attempt of the same operation was refused.
    """
    return error.attempts == 1 and error.status is not None and 400 <= error.status < 500
