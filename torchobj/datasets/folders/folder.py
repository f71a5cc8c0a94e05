"""`Folder`: the objects in a folder, from which a dataset has some in an order of its own.

Workers share the memory of the listing; the order is an index into it. Each rank computes it from the listing that all
ranks share.
"""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchobj._torchobj import ManifestBuilder, ObjectRef
from torchobj.config import StoreConfig
from torchobj.datasets.listing import listing_of
from torchobj.manifest import Manifest
from torchobj.urls import parse_object_url, parse_url

#: Number of objects that are converted together.
_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The objects of a dataset in its order."""

    manifest: Manifest
    order: "array[int]"
    """The index in the manifest of each object."""

    def __len__(self) -> int:
        return len(self.order)

    def url(self, number: int) -> str:
        """The URL of an object."""
        return self.manifest.url(self.order[number])

    def key(self, number: int) -> str:
        """The key of an object."""
        return self.manifest.entry(self.order[number])[1]

    def ref(self, number: int) -> ObjectRef:
        """An object, with the size and version of the listing."""
        _, _, size, version = self.manifest.entry(self.order[number])
        return ObjectRef(self.url(number), size=size, version=version)


class Folder:
    """The objects in a folder, which is listed at the first use, pickled and shared as a `Listing`."""

    def __init__(self, url: str, config: StoreConfig | None) -> None:
        # A slash at the end of the URL may be missing.
        parsed = parse_url(url)
        self.url = parsed if parsed.key.endswith("/") or not parsed.key else parsed._replace(key=f"{parsed.key}/")
        self.listing = listing_of(str(self.url), parse_url, config)

    def names(self, folder: str = "") -> Iterator[tuple[int, str]]:
        """The index in the listing, and the key after the folder, of each object below it.

        Args:
            folder: A folder below this one, with a slash at its end; empty: this one.
        """
        start = self.url.key + folder
        keys = enumerate(_keys(self.listing.objects()))
        return ((index, key[len(start) :]) for index, key in keys if key.startswith(start))

    def in_order(self, order: "array[int]") -> Arrangement:
        """The objects of these indices in the listing."""
        return Arrangement(self.listing.objects(), order)

    def of_urls(self, urls: Sequence[str]) -> Arrangement:
        """The objects of these URLs, with the sizes and versions of the listing if they are in it.

        Raises:
            ConfigError: One of them is not the URL of an object.
        """
        listed, wanted = self.listing.objects(), {*urls}
        indices = {url: index for index, url in enumerate(map(listed.url, range(len(listed)))) if url in wanted}
        others = Manifest.from_urls(str(parse_object_url(url)) for url in wanted.difference(indices))
        if len(others):
            indices |= {others.url(index): len(listed) + index for index in range(len(others))}
            listed = _joined(listed, others)
        return Arrangement(listed, array("q", [indices[url] for url in urls]))


def _joined(*manifests: Manifest) -> Manifest:
    """The objects of several manifests, one after the other."""
    builder = ManifestBuilder()
    for manifest in manifests:
        for begin in range(0, len(manifest), _CHUNK):
            builder.add(manifest.bases(), manifest.columns(begin, min(begin + _CHUNK, len(manifest))))
    return Manifest(builder.finish())


def _keys(manifest: Manifest) -> Iterator[str]:
    """The keys of all objects, without other Python objects for them."""
    for begin in range(0, len(manifest), _CHUNK):
        _, offsets, keys, *_ = manifest.columns(begin, min(begin + _CHUNK, len(manifest)))
        for start, end in pairwise(array("i", offsets)):
            yield keys[start:end].decode()
