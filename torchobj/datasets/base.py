"""The base class of map-style and iterable datasets: URLs, listing, transform, kind of reader, and failed samples.

The datasets decide the order of samples and the handling of failures.
"""

import inspect
import operator
import os
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, ClassVar, Generic, Protocol, Self

from typing_extensions import TypeVar

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, store_config, store_config_of_all
from torchobj.config.checks import check
from torchobj.datasets import ragged, reductions  # noqa: F401  register buffers with multiprocessing and readers with default_collate
from torchobj.datasets.errors import add_sample_note
from torchobj.datasets.listing import Listing, OnChange
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.datasets.shared_values import SharedCounter
from torchobj.exceptions import ConfigError
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import key_filter
from torchobj.urls import SCHEMES, Url, canonical_url, parse_url

Transform = Callable[[ObjectReader], Any]

#: Type of the samples of a dataset, for type checkers.
Sample_co = TypeVar("Sample_co", covariant=True, default=Any)


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


class UrlByIndex(Protocol):
    """Maps the numbers of objects to URLs."""

    def url(self, index: int) -> str:
        """The URL of object `index`."""


class ListingDataset(Generic[Sample_co]):
    """A dataset over the objects of a listing.

    Class arguments of a subclass:
        scheme: The only scheme whose URLs it accepts; None: those of its parent. The docstring is completed with the
            arguments of the parent.
    """

    _listing: Listing
    _transform: Transform
    _reader_constructor: ReaderConstructor
    _failed: SharedCounter
    _schemes: tuple[str, ...] = SCHEMES
    #: Names of the classes of one kind by the scheme that they accept; "" is the one that accepts any.
    _of_scheme: ClassVar[dict[str, str]]

    def __init_subclass__(cls, *, scheme: str | None = None, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if scheme is None:
            return
        parent = next(kind for kind in cls.__mro__[1:] if "_of_scheme" in kind.__dict__)
        cls._schemes = (scheme,)
        cls._of_scheme.setdefault(scheme, cls.__name__)
        if cls.__doc__ and parent.__doc__:
            explained = inspect.cleandoc(parent.__doc__).partition("\nArgs:")[2].partition("\nExample:")[0]
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nArgs:{explained}"

    @classmethod
    def from_prefix(
        cls,
        url: str,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects under a prefix, with a choice of readers. The other arguments are those of the constructor.

        Args:
            url: URL of the prefix.
            transform: Converts a reader to a sample. None: the sample is the reader.
            glob: Pattern for the part of a key after the prefix.
            suffixes: Selects keys that end with this suffix, or with any of several.
            limit: Maximum number of objects, the first in key order.
            region, endpoint_url: Override those of `config`.
            config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
            enable_sharding, rank, world_size, mesh, shuffle, seed, uneven: For iterable datasets: as for the
                constructor.
            on_error: Action for a sample that cannot be read or transformed, as for the constructor.
            reader_constructor: Kind of reader for `transform`, from `S3ReaderConstructor`. None: `sequential()`.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        chosen = store_config(config, region, endpoint_url, url=url)
        listing = Listing(chosen, cls._parse, url=url, chosen=key_filter(glob, suffixes, limit))
        return cls._from_listing(listing, transform, reader_constructor)

    @classmethod
    def from_objects(
        cls,
        urls: str | Iterable[str],
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The named objects, in the given order. Nothing is listed. The other arguments are those of the constructor.

        Under torch.distributed each rank has the objects that it names. Pass `urls[rank::world_size]` to divide them;
        with `enable_sharding` pass the same objects on all ranks.

        Args:
            urls: URL of each object, or of a single one.
            transform: Converts a reader to a sample. None: the sample is the reader.
            region: For the objects of S3; overrides that of `config`.
            endpoint_url: Overrides that of `config`. With objects of S3 and GCS, pass `config` instead.
            config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
            enable_sharding, rank, world_size, mesh, shuffle, seed, uneven: For iterable datasets: as for the
                constructor.
            on_error: Action for a sample that cannot be read or transformed, as for the constructor.
            reader_constructor: Kind of reader for `transform`, from `S3ReaderConstructor`. None: `sequential()`.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        # An iterable is consumed here, as s3torchconnector does.
        named = [urls] if isinstance(urls, str) else list(urls)
        chosen = store_config_of_all(config, region, endpoint_url, named)
        return cls._from_listing(Listing(chosen, cls._parse, objects=named), transform, reader_constructor)

    @classmethod
    def from_manifest(
        cls,
        manifest: Manifest | str | os.PathLike[str],
        *,
        on_change: OnChange = "raise",
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects of a manifest, in its order: the same set on every rank and in every run. Nothing is listed.

        A file is loaded at the first use, under torch.distributed by rank 0 for all ranks. The state of a loader
        contains the digest of the manifest, and is refused by a loader of another one. The other arguments are those
        of the constructor.

        Args:
            manifest: A `Manifest`, or the path or URL of a file that `Manifest.save` wrote.
            on_change: What to do if an object has another version or size than in the manifest: `raise` an
                `ObjectChangedError`, or `accept` the object as it is now.
            transform: Converts a reader to a sample. None: the sample is the reader.
            config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector, for the file and the objects.
            enable_sharding, rank, world_size, mesh, shuffle, seed, uneven: For iterable datasets: as for the
                constructor.
            on_error: Action for a sample that cannot be read or transformed, as for the constructor.
            reader_constructor: Kind of reader for `transform`, from `S3ReaderConstructor`. None: `sequential()`.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
            ManifestError: At the first use: the file is not a manifest, or is damaged.
            ManifestMismatchError: At the first use: the ranks of a job passed manifests of different objects.
        """
        is_known = isinstance(manifest, (Manifest, str, os.PathLike))
        check("manifest", manifest, "a torchobj.Manifest, or the path or URL of its file", ok=is_known)
        listing = Listing(store_config(config), cls._parse, manifest=manifest, on_change=on_change)
        return cls._from_listing(listing, transform, reader_constructor)

    @classmethod
    def _parse(cls, url: str) -> Url:
        """Parses a URL of this class. The error for another scheme names the classes that accept it."""
        scheme = canonical_url(url).partition("://")[0] if isinstance(url, str) else ""
        if scheme in SCHEMES and scheme not in cls._schemes:
            expected = " or ".join(f"{name}://" for name in cls._schemes)
            kinds = [cls._of_scheme[name] for name in (scheme, "") if name in cls._of_scheme]
            raise ConfigError(f"url={url!r}: scheme {scheme!r}, expected {expected}; use {' or '.join(kinds)}")
        return parse_url(url, cls._schemes)

    @classmethod
    def _from_listing(
        cls, listing: Listing, transform: Transform | None, reader_constructor: ReaderConstructor | None
    ) -> Self:
        # Without the constructor, because that of a subclass may have other arguments.
        dataset = cls.__new__(cls)
        dataset._set_up(listing, transform, reader_constructor)
        return dataset

    def _set_up(
        self, listing: Listing, transform: Transform | None, reader_constructor: ReaderConstructor | None
    ) -> None:
        check("transform", transform, "callable, or None", ok=transform is None or callable(transform))
        is_reader = reader_constructor is None or isinstance(reader_constructor, ReaderConstructor)
        check("reader_constructor", reader_constructor, "from S3ReaderConstructor, or None", ok=is_reader)
        self._listing, self._transform = listing, transform or identity
        self._reader_constructor = reader_constructor or ReaderConstructor("sequential")
        self._failed = SharedCounter()

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
    def failed_samples(self) -> int:
        """Number of samples that failed so far, in this process and its DataLoader workers."""
        return self._failed.total()

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

    def _transformed(self, urls: UrlByIndex, index: int, reader: ObjectReader | Exception) -> Any:
        """Transforms a reader to a sample.

        Raises:
            Exception: The exception in place of the reader; or that of the transform, with a note that names the
                sample.
        """
        if isinstance(reader, Exception):
            raise reader
        try:
            return self._transform(reader)
        except Exception as error:
            add_sample_note(error, "in the transform", urls.url(index), index)
            raise
