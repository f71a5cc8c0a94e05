"""The base class of map-style and iterable datasets: URLs, listing, transform, kind of reader, and failed samples.

The datasets decide the order of samples and the handling of failures.
"""

import operator
import os
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, ClassVar, Generic, Self, TypedDict, Unpack

from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypeVar

from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.config.checks import check
from torchobj.datasets.failures import Failure, FailurePolicy, OnError, OnIterableError
from torchobj.datasets.listing import DatasetListing, ManifestFile, Objects, OnChange
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import url_of_file
from torchobj.ranks.sharding import Uneven
from torchobj.reading.reader_constructor import ReaderConstructor
from torchobj.urls import SCHEMES, Url, parse_url

#: Type of the samples of a dataset, for type checkers.
Sample_co = TypeVar("Sample_co", covariant=True, default=Any)


Sample = TypeVar("Sample", default=Any)


class Options(TypedDict, Generic[Sample], total=False):
    """The keyword arguments of the constructors of `PerObjectDataset`s."""

    transform: Callable[[ObjectReader], Sample] | None
    glob: str | None
    suffixes: str | Sequence[str] | None
    limit: int | None
    on_change: OnChange
    allow_empty: bool
    config: StoreConfig | None
    reader_constructor: ReaderConstructor | None
    on_error: OnError | OnIterableError
    enable_sharding: bool | None
    rank: int | None
    world_size: int | None
    mesh: DeviceMesh | None
    shuffle: bool
    seed: int
    uneven: Uneven


def identity(reader: ObjectReader) -> ObjectReader:
    """The default transform."""
    return reader


def position_of(index: Any, samples: Sized) -> int:
    """The position of sample `index`, as `positions_of` returns it."""
    return positions_of([index], samples)[0]


def positions_of(indices: Sequence[Any], samples: Sized) -> list[int]:
    """The positions of samples, starting at 0. Negative indices count from the end. Takes the length once.

    Raises:
        TypeError: An index is not an integer.
        IndexError: There is no such sample.
    """
    length, positions = len(samples), []
    for index in indices:
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(f"index {index!r}: must be an int") from None
        if not -length <= number < length:
            raise IndexError(f"index {number} of {length} samples")
        positions.append(number % length)
    return positions


class ListedDataset(Generic[Sample_co]):
    """A dataset of objects, or of shards, that are listed at the first use."""

    _listing: DatasetListing
    _transform: Callable[[Any], Any]
    _failures: FailurePolicy

    def _set_listing(self, listing: DatasetListing, transform: Callable[[Any], Any] | None) -> None:
        check("transform", transform, "callable, or None", ok=transform is None or callable(transform))
        self._listing, self._transform = listing, transform or identity

    def __repr__(self) -> str:
        # A subclass may not have called super().__init__().
        described = [repr(self._listing), *self._options()] if "_listing" in self.__dict__ else ["not set up"]
        return f"<{type(self).__name__} {', '.join(described)}>"

    def _options(self) -> list[str]:
        """Further contents of `repr`."""
        return []

    @property
    def manifest(self) -> Manifest:
        """The objects or shards, listed at the first access. An access before the loop lists once for all workers."""
        return self._listing.manifest()

    @property
    def failed_samples(self) -> int:
        """Number of samples that failed so far, in this process and its DataLoader workers."""
        return self._failures.count


class PerObjectDataset(ListedDataset[Sample_co]):
    """A dataset of one sample per object, whose objects are listed, named, or of a manifest."""

    _reader_constructor: ReaderConstructor
    #: The constructor of torchobj's class: that of a subclass may have other arguments.
    _construct: ClassVar[Callable[..., None]]
    #: The schemes of the URLs that it accepts.
    _schemes: ClassVar[tuple[str, ...]] = SCHEMES

    @classmethod
    def from_prefix(cls, url: str, **options: Unpack[Options[Sample_co]]) -> Self:
        """The objects under a prefix, as the constructor of this class with the URL of a prefix.

        Args:
            url: URL of the prefix.
            options: The keyword arguments of the constructor.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        check("url", url, "the URL of a prefix", ok=isinstance(url, str))
        return cls._of(url, options)

    @classmethod
    def from_objects(cls, urls: str | Iterable[str], **options: Unpack[Options[Sample_co]]) -> Self:
        """The named objects, in the given order, as the constructor of this class with the URLs of objects. Nothing is
        listed.

        Under torch.distributed each rank has the objects that it names. Pass `urls[rank::world_size]` to divide them;
        with `enable_sharding` pass the same objects on all ranks.

        Args:
            urls: URL of each object, or of a single one.
            options: The keyword arguments of the constructor.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        return cls._of([urls] if isinstance(urls, str) else urls, options)

    @classmethod
    def from_manifest(cls, manifest: Manifest | str | os.PathLike[str], **options: Unpack[Options[Sample_co]]) -> Self:
        """The objects of a manifest, in its order: the same set on every rank and in every run. Nothing is listed.

        A file is loaded at the first use, under torch.distributed by rank 0 for all ranks. The state of a loader
        contains the digest of the manifest, and is refused by a loader of another one.

        Args:
            manifest: A `Manifest`, or the path or URL of a file that `Manifest.save` wrote.
            options: The keyword arguments of the constructor. `config` is for the file and the objects.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
            ManifestError: At the first use: the file is not a manifest, or is damaged.
            ManifestMismatchError: At the first use: the ranks of a job passed manifests of different objects.
        """
        is_known = isinstance(manifest, (Manifest, str, os.PathLike))
        check("manifest", manifest, "a torchobj.Manifest, or the path or URL of its file", ok=is_known)
        return cls._of(manifest if isinstance(manifest, Manifest) else ManifestFile(url_of_file(manifest)), options)

    @classmethod
    def _of(cls, objects: Objects, options: Any) -> Self:
        dataset = cls.__new__(cls)
        cls._construct(dataset, objects, **options)
        return dataset

    @classmethod
    def _parse(cls, url: str) -> Url:
        """Parses a URL of this class."""
        return parse_url(url, cls._schemes)

    def _set_up(
        self,
        listing: DatasetListing,
        transform: Callable[[ObjectReader], Any] | None,
        reader_constructor: ReaderConstructor | None,
    ) -> None:
        is_reader = reader_constructor is None or isinstance(reader_constructor, ReaderConstructor)
        check("reader_constructor", reader_constructor, "from S3ReaderConstructor, or None", ok=is_reader)
        self._set_listing(listing, transform)
        self._reader_constructor = reader_constructor or ReaderConstructor("sequential")

    @property
    def region(self) -> str | None:
        """The configured region of S3; None if no object is there. Of a manifest in a file, see `endpoint`."""
        return self._listing.config.s3.region if "s3" in self._object_schemes() else None

    @property
    def endpoint(self) -> str | None:
        """The configured endpoint URL of S3, or of Google Cloud Storage if all objects are there; otherwise None.

        Until a manifest is loaded from a file, the file stands for its objects.
        """
        config, schemes = self._listing.config, self._object_schemes()
        if "s3" in schemes:
            return config.s3.endpoint_url
        return config.gcs.endpoint_url if "gs" in schemes else None

    def _object_schemes(self) -> set[str]:
        return self._listing.schemes if len(self._schemes) > 1 else set(self._schemes)

    def _torchobj_build(
        self, position: int, read: ObjectReader | Exception, url_of: Callable[[int], str] | None = None
    ) -> Any | Failure:
        """Transforms a reader to a sample. An exception of the transform has a note that names the sample.

        Args:
            position: Number of the object.
            read: Its reader, or the exception in place of it.
            url_of: Returns the URL of an object. None: that of the listing.
        """
        if isinstance(read, Exception):
            return Failure((url_of or self._url_of)(position), read)
        try:
            return self._transform(read)
        except Exception as error:  # noqa: BLE001  raised, unless on_error handles it
            return Failure.noted(error, "in the transform", (url_of or self._url_of)(position), position)

    def _url_of(self, index: int) -> str:
        return self.manifest.url(index)
