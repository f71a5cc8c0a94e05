"""The objects of a listing in the order of a dataset's samples. The datasets decide which objects, and the order.

The objects in their new order are a manifest again, so that workers share its memory. Each rank computes it from the
listing that all ranks share.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from torchobj._torchobj import ManifestBuilder, NativeManifest, ObjectRef
from torchobj.config import StoreConfig
from torchobj.datasets.listing import Listing
from torchobj.manifest import Manifest
from torchobj.urls import parse_object_url, parse_url

#: Number of objects that are converted together.
_CHUNK = 1 << 16

#: What a dataset finds in a listing besides the order.
Details = TypeVar("Details")


class Arrangement(NamedTuple, Generic[Details]):
    """The objects of a dataset in its order."""

    manifest: Manifest
    details: Details
    prefix: str
    """The prefix of all keys, which ends with a slash or is empty."""

    def ref(self, index: int) -> ObjectRef:
        """The object, with the size and version of the listing."""
        _, _, size, version = self.manifest.entry(index)
        return ObjectRef(self.manifest.url(index), size=size, version=version)

    def name(self, index: int) -> str:
        """The key after the prefix."""
        return self.manifest.entry(index)[1][len(self.prefix) :]


class ArrangedListing(Generic[Details]):
    """The objects of a folder, in the order of a dataset. Listed at the first use; pickled and shared as a `Listing`.

    Args:
        url: URL of the folder; a slash at its end may be missing.
        config: The configuration of its store.
    """

    def __init__(self, url: str, config: StoreConfig) -> None:
        parsed = parse_url(url)
        folder = parsed if parsed.key.endswith("/") or not parsed.key else parsed._replace(key=f"{parsed.key}/")
        self.url, self._prefix = str(folder), folder.key
        self._listing = Listing(config, parse_url, url=self.url)
        self._found: Arrangement[Details] | None = None

    def __repr__(self) -> str:
        return repr(self._listing)

    def found(self, arrange: Callable[[], Arrangement[Details]]) -> Arrangement[Details]:
        """The objects. The first call lists, and every call ensures that the ranks of a job agree on the listing.

        Args:
            arrange: Called once, when the folder is listed: returns the objects from `of_order` or `of_urls`.

        Raises:
            ManifestMismatchError: The ranks of a job listed different objects.
        """
        self._listing.objects()
        if self._found is None:
            self._found = arrange()
        return self._found

    def objects(self) -> Manifest:
        """The objects in the order of the listing."""
        return self._listing.objects()

    def names(self, folder: str = "") -> Iterator[tuple[int, str]]:
        """The index in the listing, and the key after the folder, of each object below it.

        Args:
            folder: A folder below `url`, with a slash at its end; empty: `url`.
        """
        start = self._prefix + folder
        return ((index, key[len(start) :]) for index, key in enumerate(_keys(self.objects())) if key.startswith(start))

    def of_order(self, order: Sequence[int], details: Details) -> Arrangement[Details]:
        """The objects of these indices in the listing."""
        return Arrangement(_arranged(self.objects(), order), details, self._prefix)

    def of_urls(self, urls: Sequence[str], details: Details) -> Arrangement[Details]:
        """The objects of these URLs, with the sizes and versions of the listing if they are in it.

        Raises:
            ConfigError: One of them is not the URL of an object.
        """
        listed, wanted = self.objects(), {*urls}
        indices = {url: index for index, url in enumerate(map(listed.url, range(len(listed)))) if url in wanted}
        others = Manifest.from_urls(str(parse_object_url(url)) for url in wanted.difference(indices))
        if len(others):
            indices |= {others.url(index): len(listed) + index for index in range(len(others))}
            listed = _joined(listed, others)
        order = array("q", [indices[url] for url in urls])
        return Arrangement(_arranged(listed, order), details, self._prefix)


def _joined(*manifests: Manifest) -> Manifest:
    """The objects of several manifests, one after the other."""
    builder = ManifestBuilder()
    for manifest in manifests:
        for begin in range(0, len(manifest), _CHUNK):
            builder.add(manifest.bases(), manifest.columns(begin, min(begin + _CHUNK, len(manifest))))
    return Manifest(builder.finish())


def _keys(manifest: NativeManifest) -> Iterator[str]:
    """The keys of all objects, without other Python objects for them."""
    for begin in range(0, len(manifest), _CHUNK):
        _, offsets, keys, *_ = manifest.columns(begin, min(begin + _CHUNK, len(manifest)))
        for start, end in pairwise(array("i", offsets)):
            yield keys[start:end].decode()


def _arranged(manifest: NativeManifest, order: Sequence[int]) -> Manifest:
    """The manifest of some objects of one store, in this order."""
    builder, chosen = ManifestBuilder(), np.asarray(order, np.int64)
    for begin in range(0, len(chosen), _CHUNK):
        indices = chosen[begin : begin + _CHUNK]
        # Neighbours are usually close to each other in the listing too.
        for part in [indices] if np.ptp(indices) < 4 * _CHUNK else np.split(indices, range(1, len(indices))):
            first = int(part.min())
            columns = manifest.columns(first, int(part.max()) + 1)
            builder.add(manifest.bases(), _rows(columns, part - first))
    return Manifest(builder.finish())


def _rows(columns: list[bytes], rows: Any) -> list[bytes]:
    bases, key_offsets, keys, sizes, version_offsets, versions = columns
    return [
        _fixed(bases, np.int32, rows),
        *_texts(key_offsets, keys, rows),
        _fixed(sizes, np.int64, rows),
        *_texts(version_offsets, versions, rows),
    ]


def _fixed(values: bytes, kind: Any, rows: Any) -> bytes:
    return bytes(np.frombuffer(values, kind)[rows])


def _texts(offsets: bytes, texts: bytes, rows: Any) -> tuple[bytes, bytes]:
    ends = np.frombuffer(offsets, np.int32)
    lengths = np.diff(ends)[rows]
    new_ends = np.concatenate(([0], np.cumsum(lengths)))
    # The position of each byte of the result in `texts`.
    positions = np.repeat(ends[:-1][rows] - new_ends[:-1], lengths) + np.arange(new_ends[-1])
    return bytes(new_ends.astype(np.int32)), bytes(np.frombuffer(texts, np.uint8)[positions])
