"""Map-style datasets: one object is one sample."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch.utils.data
from typing_extensions import override

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.datasets import lookahead_warning, prefetch_source, worker_process
from torchobj.datasets.base import ListingDataset, Sample_co, position_of, positions_of
from torchobj.datasets.errors import OnError, check_map_on_error, log_failed_sample, neighbours
from torchobj.datasets.listing import Listing, OnChange
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.manifest import Manifest
from torchobj.manifest.manifest import key_filter

__all__ = ["ObjectMapDataset"]


class ObjectMapDataset(ListingDataset[Sample_co], torch.utils.data.Dataset[Sample_co]):
    """A map-style dataset of the objects under a prefix, in key order, of any scheme.

    The prefix is listed once, when the length or a sample is first needed; under torch.distributed by rank 0 for all
    ranks. Spawned workers receive the listing from their parent. Forked workers inherit it if the parent has it, which
    shuffling and distributed samplers ensure; otherwise call `len(dataset)` before the loop, or each worker lists by
    itself and logs a warning. A DataLoader reads all objects of a batch in one call.

    Args:
        url: `s3://bucket/prefix/`, `gs://bucket/prefix/`, `file:///folder/` or `memory://name/prefix`; the prefix is
            raw, `train` also selects `training/x`.
        transform: Converts a reader to a sample. None: the sample is the reader, and the default collation builds a
            `RaggedBatch`.
        glob: Pattern for the part of a key after the prefix. `*` matches within a path component, `**` across them.
        suffixes: Selects keys that end with this suffix, or with any of several.
        limit: Maximum number of objects, the first in key order.
        region, endpoint_url: Override those of `config`.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        on_error: Action for a sample that cannot be read or transformed: `raise`; `replace` it by the next one that
            can; or a callable that receives index, URL and exception and returns a sample. The first failure of each
            process is logged.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid. No request is sent here.

    Example:
        >>> import torchobj
        >>> store = torchobj.Store("memory://pictures")
        >>> for key in ("train/b", "train/a", "test/c"):
        ...     _ = store.put(key, key.encode())
        >>> dataset = ObjectMapDataset("memory://pictures/train/", transform=lambda reader: reader.read())
        >>> len(dataset), dataset[0], dataset[-1]
        (2, b'train/a', b'train/b')
    """

    _of_scheme: ClassVar[dict[str, str]] = {"": "ObjectMapDataset"}
    _on_error: OnError = "raise"

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
        chosen = store_config(config, region, endpoint_url, url=url)
        listing = Listing(chosen, self._parse, url=url, chosen=key_filter(glob, suffixes, limit))
        self._set_up(listing, transform, None)
        self._with_on_error(on_error)

    @classmethod
    @override
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
        on_error: OnError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        dataset = super().from_prefix(
            url,
            transform=transform,
            glob=glob,
            suffixes=suffixes,
            limit=limit,
            region=region,
            endpoint_url=endpoint_url,
            config=config,
            reader_constructor=reader_constructor,
        )
        return dataset._with_on_error(on_error)

    @classmethod
    @override
    def from_objects(
        cls,
        urls: str | Iterable[str],
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        on_error: OnError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        dataset = super().from_objects(
            urls,
            transform=transform,
            region=region,
            endpoint_url=endpoint_url,
            config=config,
            reader_constructor=reader_constructor,
        )
        return dataset._with_on_error(on_error)

    @classmethod
    @override
    def from_manifest(
        cls,
        manifest: Manifest | str | os.PathLike[str],
        *,
        on_change: OnChange = "raise",
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        on_error: OnError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        dataset = super().from_manifest(
            manifest, on_change=on_change, transform=transform, config=config, reader_constructor=reader_constructor
        )
        return dataset._with_on_error(on_error)

    def _with_on_error(self, on_error: OnError) -> Self:
        check_map_on_error(on_error)
        self._on_error = on_error
        return self

    def __len__(self) -> int:
        return len(self.manifest)

    def __iter__(self) -> Iterator[Sample_co]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Sample_co:
        """Sample `index`. Negative indices count from the end.

        Raises:
            IndexError: There is no such sample.
            StoreError: It cannot be read.
        """
        if worker_process.in_worker():
            self._note_batch()
        return self._samples([position_of(index, self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample_co]:
        """The samples of a batch, read concurrently. Called by DataLoader."""
        if type(self).__getitem__ is not ObjectMapDataset.__getitem__:
            # A subclass may override the samples.
            return [self[index] for index in indices]
        self._note_batch()
        return self._samples(positions_of(indices, self))

    def announced(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """The objects of samples, as pairs of source number and index, which a loader announces."""
        if not self._reader_constructor.whole:
            return []
        number = self._listing.source_number()
        return [] if number is None else [(number, position) for position in positions_of(indices, self)]

    def _note_batch(self) -> None:
        if prefetch_source.SUPPORTED and self._reader_constructor.whole:
            lookahead_warning.note_batch(self)

    def _samples(self, positions: list[int]) -> list[Sample_co]:
        raising = self._on_error == "raise"
        readers = self._listing.readers(positions, self._reader_constructor, return_errors=not raising)
        return [self._sample(position, reader) for position, reader in zip(positions, readers, strict=True)]

    def _sample(self, position: int, reader: ObjectReader | Exception) -> Any:
        try:
            return self._transformed(self.manifest, position, reader)
        except Exception as error:
            if self._on_error == "raise":
                raise
            url = self.manifest.url(position)
            self._failed.add()
            if callable(self._on_error):
                sample = self._on_error(position, url, error)
            else:
                sample = self._replacement(position, error)
            log_failed_sample(position, url, error)
            return sample

    def _replacement(self, position: int, error: Exception) -> Any:
        for neighbour in neighbours(position, len(self)):
            [reader] = self._listing.readers([neighbour], self._reader_constructor, return_errors=True)
            # Otherwise the next neighbour is tried.
            with contextlib.suppress(Exception):
                return self._transformed(self.manifest, neighbour, reader)
        raise error
