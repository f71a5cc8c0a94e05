"""Iterable datasets: objects one after the other, read ahead, split over ranks and workers on request."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self

import torch.utils.data

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.datasets import workers
from torchobj.datasets.base import OverObjects, Transform, identity
from torchobj.datasets.listing import Listing, batches
from torchobj.datasets.readers import ReaderConstructor

__all__ = ["S3IterableDataset"]

#: Objects of one read; the next is on its way while one is used.
_BATCH_OBJECTS = 32


class S3IterableDataset(OverObjects, torch.utils.data.IterableDataset[Any]):
    """The objects under a prefix, or objects by name, one after the other in that order.

    Objects are read 32 at a time, the next 32 while these are used.

    The prefix is listed once, when first needed; under torch.distributed by rank 0 for all. DataLoader workers that are
    spawned get the listing from their parent. Those that are forked do if it has one: ask for `dataset.manifest` before
    the loop, or each worker lists for itself, and warns.

    Args:
        url: `s3://bucket/prefix/`.
        transform: Makes a sample of a reader; without one a sample is the reader.
        region, endpoint_url: In place of the configuration's.
        config: A `StoreConfig`, or the `S3ClientConfig` of s3torchconnector.
        enable_sharding: Each rank of torch.distributed and each DataLoader worker gets every n-th object. Without it
            each gets all.

    Raises:
        ConfigError: An argument is wrong. Nothing is asked of the store here.
    """

    def __init__(
        self,
        url: str,
        *,
        transform: Transform | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
        enable_sharding: bool = False,
    ) -> None:
        chosen = store_config(config, region, endpoint_url)
        listing = Listing(chosen, url=url, schemes=("s3",))
        self._set_up(listing, chosen, transform, None, enable_sharding=enable_sharding)

    def _set_up(
        self,
        listing: Listing,
        config: StoreConfig,
        transform: Transform | None,
        reader_constructor: ReaderConstructor | None,
        *,
        enable_sharding: bool,
    ) -> None:
        self._set_up_reading(listing, config, transform, reader_constructor)
        self._enable_sharding = enable_sharding
        self._rank: workers.Rank | None = None

    @classmethod
    def from_prefix(
        cls,
        s3_uri: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Transform = identity,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        enable_sharding: bool = False,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects under a prefix. Arguments as for `S3MapDataset.from_prefix`, and `enable_sharding`."""
        config = store_config(s3client_config, region, endpoint)
        listing = Listing(config, url=s3_uri, schemes=("s3",))
        return cls._from_listing(listing, config, transform, reader_constructor, enable_sharding=enable_sharding)

    @classmethod
    def from_objects(
        cls,
        object_uris: str | Iterable[str],
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Transform = identity,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        enable_sharding: bool = False,
        reader_constructor: ReaderConstructor | None = None,
    ) -> Self:
        """The objects that are named, in that order; nothing is listed.

        Under torch.distributed they stay each rank's own: with `enable_sharding` all ranks should name the same.
        """
        config = store_config(s3client_config, region, endpoint)
        listing = Listing(config, objects=object_uris, schemes=("s3",))
        return cls._from_listing(listing, config, transform, reader_constructor, enable_sharding=enable_sharding)

    @classmethod
    def _from_listing(
        cls,
        listing: Listing,
        config: StoreConfig,
        transform: Transform,
        reader_constructor: ReaderConstructor | None,
        *,
        enable_sharding: bool,
    ) -> Self:
        dataset = cls.__new__(cls)
        dataset._set_up(listing, config, transform, reader_constructor, enable_sharding=enable_sharding)
        return dataset

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if workers.is_for_a_new_process():
            # A spawned worker has no torch.distributed to ask.
            state["_rank"] = workers.rank(self._rank)
        return state

    def _share(self) -> range:
        """The objects of this rank and worker, as of now: torch.distributed may have been initialised since."""
        rank, worker, count = workers.Rank(0, 1), 0, 1
        if self._enable_sharding:
            rank = workers.rank(self._rank)
            info = torch.utils.data.get_worker_info()
            if info is not None:
                worker, count = info.id, info.num_workers
        return range(rank.number * count + worker, len(self._listing.manifest()), rank.world_size * count)

    def __iter__(self) -> Iterator[Any]:
        manifest = self._listing.manifest()
        coming: Future[list[tuple[int, ObjectReader]]] | None = None
        for indices in [*batches(self._share(), _BATCH_OBJECTS), []]:
            asked = self._start(indices) if indices else None
            if coming is not None:
                for index, reader in coming.result():
                    yield self._made(manifest, index, reader)
            coming = asked

    def _start(self, indices: list[int]) -> Future[list[tuple[int, ObjectReader]]]:
        """Reads in a thread for which nobody has to wait: an executor's is waited for by Ctrl-C and by the end."""
        coming: Future[list[tuple[int, ObjectReader]]] = Future()

        def read() -> None:
            try:
                coming.set_result(self._readers(indices))
            except BaseException as error:  # noqa: BLE001  it is raised where the result is wanted
                coming.set_exception(error)

        threading.Thread(target=read, name="torchobj-iterable", daemon=True).start()
        return coming

    def _readers(self, indices: list[int]) -> list[tuple[int, ObjectReader]]:
        return list(zip(indices, self._listing.readers(indices, self._reader_constructor), strict=True))
