"""Deletes objects and the markers of folders, which a server may refuse to delete."""

import logging

from torchobj.exceptions import (
    AccessDeniedError,
    InvalidKeyError,
    ObjectNotFoundError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    ThrottledError,
)
from torchobj.store import Store

__all__ = ["delete_with_markers"]

logger = logging.getLogger("torchobj")

#: Errors that say nothing about markers.
_OTHER_ERRORS = (AccessDeniedError, StoreConnectionError, StoreTimeoutError, ThrottledError)


def delete_with_markers(store: Store, keys: list[str]) -> None:
    """Deletes objects, a thousand per request.

    Other tools mark folders with empty objects whose keys end with a slash. A server that stores objects as files takes
    them for folders: it may delete them only when they are empty, or never. Such a marker is left, with a warning.

    Args:
        store: The bucket.
        keys: The keys of objects and of markers.

    Raises:
        StoreError: An object, or a marker with content, was not deleted.
    """
    # Inner folders first.
    markers = sorted((key for key in keys if key.endswith("/")), key=len, reverse=True)
    try:
        store.delete(keys)
    except _OTHER_ERRORS:
        raise
    except StoreError:
        if not markers:
            raise
        if len(markers) < len(keys):
            store.delete([key for key in keys if not key.endswith("/")])
        for marker in markers:
            _delete_marker(store, marker)


def _delete_marker(store: Store, marker: str) -> None:
    try:
        store.delete(marker)
    except _OTHER_ERRORS:
        raise
    except StoreError as error:
        try:
            size = store.head(marker).size
        except (InvalidKeyError, ObjectNotFoundError):
            return
        if size:
            raise
        logger.warning(
            "%s/%s: the marker of the folder is left, because the server did not delete it: %s",
            store.url,
            marker,
            error,
        )
