"""Names existing keys near a prefix that has no objects, for the message of an error."""

import contextlib
import difflib

from torchobj._torchobj import NativeStore
from torchobj.exceptions import TorchobjError
from torchobj.store.object_info import Listing
from torchobj.urls import Url

#: Number of keys that are named, and of folders that contain each other in which one is searched.
_SHOWN, _DEPTH = 3, 8


def nearest_keys(store: NativeStore, url: Url) -> str:
    """The existing keys that are most similar, as part of a message; empty if there are none, or a request fails.

    Args:
        store: The store of the prefix.
        url: URL of the prefix, which has no objects, or none that are wanted.
    """
    # The error of the listing is the one to report.
    with contextlib.suppress(TorchobjError):
        prefix = url.key
        while not (found := _names(store, prefix)) and prefix:
            folder = prefix.removesuffix("/").rpartition("/")[0]
            prefix = f"{folder}/" if folder else ""
            if url.scheme == "file" and not prefix:
                return ""
        wanted = url.key[len(prefix) :].partition("/")[0]
        names = sorted(found, key=lambda name: -_similarity(wanted, name[len(prefix) :].removesuffix("/")))
        keys = [f"{url.base}/{_first_key(store, name)}" for name in names[:_SHOWN]]
        return f"; the nearest keys are {', '.join(keys)}" if keys else f"; {url.base} has no objects at all"
    return ""


def _names(store: NativeStore, prefix: str) -> list[str]:
    """The keys and folders below a prefix, of the first page of its listing."""
    listing = Listing(store, prefix=prefix, delimiter="/", start_after=None, glob=None, ordered=True)
    for page in listing.pages():
        # Not the object that marks the folder itself.
        return sorted([info.key for info in page.objects if info.key != prefix] + page.prefixes)
    return []


def _first_key(store: NativeStore, name: str) -> str:
    for _ in range(_DEPTH):
        if not name.endswith("/") or not (names := _names(store, name)):
            break
        name = names[0]
    return name


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
