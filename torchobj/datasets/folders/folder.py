"""`FolderDataset`: the base class of datasets of the objects in a folder, in an order of their own.

Workers share the memory of the listing; the order is an index into it. Each rank computes it from the listing that all
ranks share.
"""

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchobj._torchobj import ManifestBuilder, ObjectRef
from torchobj.config import StoreConfig
from torchobj.datasets.failures import OnError
from torchobj.datasets.listing import listing_of
from torchobj.datasets.objects import ObjectDataset
from torchobj.datasets.samples import Sample_co
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


class FolderDataset(ObjectDataset[Sample_co]):
    """A map-style dataset of the objects in a folder, which is listed at the first use, pickled and shared as a
    `Listing`. A subclass defines `_arranged`.
    """

    def __init__(self, url: str, config: StoreConfig | None, on_error: OnError) -> None:
        super().__init__(config=config, on_error=on_error)
        # A slash at the end of the URL may be missing.
        parsed = parse_url(url)
        self._folder = parsed if parsed.key.endswith("/") or not parsed.key else parsed._replace(key=f"{parsed.key}/")
        self._listing = listing_of(str(self._folder), parse_url, config)
        self._arrangement: Arrangement | None = None

    def __repr__(self) -> str:
        described = ", ".join([repr(self._listing), *self._options()])
        return f"<{type(self).__name__} {described}, on_error={self._torchobj.failures.on_error!r}>"

    def _options(self) -> list[str]:
        """Further contents of `repr`."""
        return []

    def _arranged(self) -> Arrangement:
        """The objects, from `_in_order` or `_of_urls`. Called once, when the folder is listed."""
        raise NotImplementedError

    def _found(self) -> Arrangement:
        """The objects. The first call lists, and every call ensures that the ranks of a job agree on the listing.

        Raises:
            ManifestMismatchError: The ranks of a job listed different objects.
        """
        self._listing.objects()
        if self._arrangement is None:
            self._arrangement = self._arranged()
        return self._arrangement

    def _names(self, folder: str = "") -> Iterator[tuple[int, str]]:
        """The index in the listing, and the key after the folder, of each object below it.

        Args:
            folder: A folder below that of the dataset, with a slash at its end; empty: that of the dataset.
        """
        start = self._folder.key + folder
        keys = enumerate(_keys(self._listing.objects()))
        return ((index, key[len(start) :]) for index, key in keys if key.startswith(start))

    def _in_order(self, order: "array[int]") -> Arrangement:
        """The objects of these indices in the listing."""
        return Arrangement(self._listing.objects(), order)

    def _of_urls(self, urls: Sequence[str]) -> Arrangement:
        """The objects of these URLs, with the sizes and versions of the listing if they are in it.

        Raises:
            ConfigError: One of them is not the URL of an object.
        """
        listed, wanted = self._listing.objects(), {*urls}
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
