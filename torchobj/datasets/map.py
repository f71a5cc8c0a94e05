"""Map-style datasets: one object is one sample."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch.utils.data

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.datasets import source, unannounced, workers
from torchobj.datasets.base import OverObjects, Sample_co, Transform, identity, position_of
from torchobj.datasets.errors import OnError, check_on_error, neighbours, say_failed
from torchobj.datasets.listing import Listing
from torchobj.datasets.readers import ReaderConstructor
from torchobj.urls import SCHEMES

__all__ = ["ObjectMapDataset", "S3MapDataset"]


class ObjectMapDataset(OverObjects, torch.utils.data.Dataset[Sample_co]):
    """A dataset of the objects under a prefix, in key order.

    The prefix is listed once, when the length or a sample is first needed; under torch.distributed by rank 0 for all.
    Workers that are spawned get the listing from their parent. So do those that are forked where the parent has one: a
    shuffling or distributed sampler sees to it; without one call `len(dataset)` before the loop, or each worker lists
    for itself, and warns. A DataLoader gets a batch by one call that reads all its objects at once.

    Args:
        url: `s3://bucket/prefix/`, `file:///folder/` or `memory://name/prefix`; the prefix is raw, `train` also selects
            `training/x`.
        transform: Makes a sample of a reader. Without one a sample is the reader, and the default collation makes a
            `RaggedBatch` of readers.
        glob: Only keys whose part behind the prefix matches: `*` stays within a component, `**` does not.
        suffixes: Only keys that end so; one, or any of several.
        limit: At most so many objects, the first in key order.
        region, endpoint_url: In place of the configuration's.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        on_error: What to do about a sample that cannot be read or made: `raise`; `replace` by the next one that can; or
            a callable that gets index, URL and exception and returns a sample. The first of each process is logged.

    Attributes:
        failed_samples: How many samples could not be read or made, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is wrong. Nothing is asked of the store here.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://pictures")
        >>> for key in ("train/b", "train/a", "test/c"):
        ...     _ = store.put(key, key.encode())
        >>> dataset = ObjectMapDataset("memory://pictures/train/", transform=lambda reader: reader.read())
        >>> len(dataset), dataset[0], dataset[-1]
        (2, b'train/a', b'train/b')
    """

    _schemes: tuple[str, ...] = SCHEMES

    def __init__(
        self,
        url: str,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        on_error: OnError = "raise",
    ) -> None:
        chosen = store_config(config, region, endpoint_url)
        listing = Listing(
            chosen,
            url=url,
            glob=glob,
            suffixes=suffixes,
            limit=limit,
            schemes=self._schemes,
            any_scheme="ObjectMapDataset",
        )
        self._set_up(listing, chosen, transform, None, on_error)

    def _set_up(
        self,
        listing: Listing,
        config: StoreConfig,
        transform: Transform | None,
        reader_constructor: ReaderConstructor | None,
        on_error: OnError,
    ) -> None:
        check_on_error(on_error)
        self._set_up_reading(listing, config, transform, reader_constructor)
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self.manifest)

    def __iter__(self) -> Iterator[Sample_co]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`; a negative one counts from the end.

        Raises:
            IndexError: There is no such sample.
            StoreError: It cannot be read.
        """
        if workers.in_worker():
            self._note_batch()
        return self._samples([position_of(index, self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch, read at once; what a DataLoader calls."""
        if type(self).__getitem__ is not ObjectMapDataset.__getitem__:
            # What a subclass makes of a sample is what a batch is made of.
            return [self[index] for index in indices]
        self._note_batch()
        return self._samples([position_of(index, self) for index in indices])

    def announced(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """The objects that samples are made of, as the prefetcher knows them: what a loader announces."""
        if not self._reader_constructor.whole:
            return []
        number = self._listing.source_number()
        return [] if number is None else [(number, position_of(index, self)) for index in indices]

    def _note_batch(self) -> None:
        if source.SUPPORTED and self._reader_constructor.whole:
            unannounced.note_batch(self)

    def _samples(self, positions: list[int]) -> list[Sample_co]:
        raising = self._on_error == "raise"
        readers = self._listing.readers(positions, self._reader_constructor, return_errors=not raising)
        return [self._sample(position, reader) for position, reader in zip(positions, readers, strict=True)]

    def _sample(self, position: int, reader: ObjectReader | Exception) -> Any:
        try:
            return self._made(self.manifest, position, reader)
        except Exception as error:
            if self._on_error == "raise":
                raise
            url = self.manifest.url(position)
            self._failed.add()
            if callable(self._on_error):
                sample = self._on_error(position, url, error)
            else:
                sample = self._replacement(position, error)
            say_failed(position, url, error)
            return sample

    def _replacement(self, position: int, error: Exception) -> Any:
        for neighbour in neighbours(position, len(self)):
            [reader] = self._listing.readers([neighbour], self._reader_constructor, return_errors=True)
            # The next neighbour may do.
            with contextlib.suppress(Exception):
                return self._made(self.manifest, neighbour, reader)
        raise error


class S3MapDataset(ObjectMapDataset[Sample_co]):
    """An `ObjectMapDataset` of `s3://` URLs, with the classmethods of s3torchconnector."""

    _schemes = ("s3",)

    @classmethod
    def from_prefix(
        cls,
        s3_uri: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Transform = identity,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects under a prefix.

        Args:
            s3_uri: `s3://bucket/prefix`.
            region: Found out when None.
            endpoint: AWS, or the environment's, when None.
            transform: Makes a sample of a reader.
            s3client_config: An `S3ClientConfig`, or a `StoreConfig`.
            reader_constructor: From `S3ReaderConstructor`.
        """
        config = store_config(s3client_config, region, endpoint)
        listing = Listing(config, url=s3_uri, schemes=cls._schemes, any_scheme="ObjectMapDataset")
        return cls._from_listing(listing, config, transform, reader_constructor)

    @classmethod
    def from_objects(
        cls,
        object_uris: str | Iterable[str],
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Transform = identity,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects that are named, in that order. Arguments as for `from_prefix`.

        Nothing is listed, and under torch.distributed nothing is shared: `uris[rank::world_size]` stay each rank's own.
        """
        config = store_config(s3client_config, region, endpoint)
        listing = Listing(config, objects=object_uris, schemes=cls._schemes, any_scheme="ObjectMapDataset")
        return cls._from_listing(listing, config, transform, reader_constructor)

    @classmethod
    def _from_listing(
        cls,
        listing: Listing,
        config: StoreConfig,
        transform: Transform,
        reader_constructor: ReaderConstructor | None,
    ) -> Self:
        dataset = cls.__new__(cls)
        dataset._set_up(listing, config, transform, reader_constructor, "raise")
        return dataset
