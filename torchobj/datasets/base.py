"""What map-style and iterable datasets of objects share: URLs, listing, transform, and kind of reader."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Self, TypedDict, Unpack

from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypeVar

from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.config.checks import check, check_callable
from torchobj.datasets.failures import OnError, OnIterableError
from torchobj.datasets.listing import Listing, ManifestFile, Objects, OnChange, listing_of
from torchobj.datasets.samples import Sample_co
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import url_of_file
from torchobj.ranks.sharding import Uneven
from torchobj.reading.reader import ManifestReader
from torchobj.reading.reader_constructor import SEQUENTIAL, ReaderConstructor
from torchobj.urls import SCHEMES, Url, parse_url

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


class _ListedObjects:
    """A source whose samples are the objects of a listing."""

    def __init__(self, listing: Listing, transform: Callable[[ObjectReader], Any] | None) -> None:
        check_callable("transform", transform)
        self._listing, self._transform = listing, transform

    def __len__(self) -> int:
        return len(self._listing.manifest())

    def prepare(self) -> None:
        self._listing.reader()

    def reader(self) -> ManifestReader:
        return self._listing.reader()

    def keys(self, positions: list[int]) -> list[tuple[int]]:
        return list(zip(positions))

    def build(self, _: int, readers: Sequence[ObjectReader]) -> Any:
        return readers[0] if self._transform is None else self._transform(readers[0])

    def configs(self) -> list[StoreConfig]:
        return self._listing.configs


class PerObjectDataset(Generic[Sample_co]):
    """A dataset of one sample per object, whose objects are listed, named, or of a manifest."""

    _listing: Listing
    _sample_source: _ListedObjects
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
        source: Objects,
        transform: Callable[[ObjectReader], Any] | None,
        config: StoreConfig | None,
        reader_constructor: ReaderConstructor | None,
        **options: Any,
    ) -> None:
        """Sets the arguments that map-style and iterable datasets share. `options` are those of `listing_of`."""
        kind = SEQUENTIAL if reader_constructor is None else reader_constructor
        check("reader_constructor", kind, "from S3ReaderConstructor, or None", ok=isinstance(kind, ReaderConstructor))
        self._listing = listing_of(source, self._parse, config, kind=kind, **options)
        self._sample_source = _ListedObjects(self._listing, transform)

    def __repr__(self) -> str:
        # A subclass may not have called super().__init__().
        described = [repr(self._listing), *self._options()] if "_listing" in self.__dict__ else ["not set up"]
        return f"<{type(self).__name__} {', '.join(described)}>"

    def _options(self) -> list[str]:
        """Further contents of `repr`."""
        return []

    @property
    def manifest(self) -> Manifest:
        """The objects, listed at the first access. An access before the loop lists once for all workers."""
        return self._listing.manifest()

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
