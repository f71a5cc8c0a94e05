"""Datasets that accept URLs of one provider only. Those of S3 have the classmethods of s3torchconnector."""

from collections.abc import Callable, Iterable
from typing import Self

from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from torchobj._torchobj import ObjectReader
from torchobj.config import S3ClientConfig, StoreConfig, one_config, store_config
from torchobj.datasets.base import ListingDataset, Sample_co
from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.datasets.listing import Listing
from torchobj.datasets.map import ObjectMapDataset
from torchobj.datasets.reader_constructor import ReaderConstructor
from torchobj.datasets.sample_ranks import SampleRanks

__all__ = ["GCSIterableDataset", "GCSMapDataset", "S3IterableDataset", "S3MapDataset"]


class _S3ConnectorMethods(ListingDataset[Sample_co]):
    """The classmethods of s3torchconnector's datasets."""

    @classmethod
    @override
    def from_prefix(  # type: ignore[override]  # the names of s3torchconnector
        cls,
        s3_uri: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
    ) -> Self:
        """The objects under a prefix, in key order, with a choice of readers. Arguments are named as in
        s3torchconnector.

        Args:
            s3_uri: URL of the prefix, as for the constructor.
            region: Region of the bucket. None: it is detected.
            endpoint: URL of the store. None: that of the provider, or the environment's.
            transform: Converts a reader to a sample. None: the sample is the reader.
            s3client_config: A `StoreConfig`, or an `S3ClientConfig`.
            enable_sharding: For iterable datasets: whether each rank and DataLoader worker gets a share of the objects.
                False: each gets all.
            rank, world_size, mesh: For iterable datasets: as for the constructor.
            reader_constructor: Kind of reader for `transform`, from `S3ReaderConstructor`. None: `sequential()`.
            config: Another name of `s3client_config`.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        chosen = store_config(one_config(config, s3client_config), region, endpoint, url=s3_uri)
        return cls._from_listing(Listing(chosen, cls._parse, url=s3_uri), transform, reader_constructor)

    @classmethod
    @override
    def from_objects(  # type: ignore[override]  # the names of s3torchconnector
        cls,
        object_uris: str | Iterable[str],
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        reader_constructor: ReaderConstructor | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
    ) -> Self:
        """The named objects, in the given order. Nothing is listed. Arguments are named as in s3torchconnector.

        Under torch.distributed each rank has the objects that it names. Pass `uris[rank::world_size]` to divide them;
        with `enable_sharding` pass the same objects on all ranks.

        Args:
            object_uris: URL of each object, or of a single one.
            region: Region of the buckets. None: it is detected.
            endpoint: URL of the store. None: that of the provider, or the environment's.
            transform: Converts a reader to a sample. None: the sample is the reader.
            s3client_config: A `StoreConfig`, or an `S3ClientConfig`.
            enable_sharding: For iterable datasets: whether each rank and DataLoader worker gets a share of the objects.
                False: each gets all.
            rank, world_size, mesh: For iterable datasets: as for the constructor.
            reader_constructor: Kind of reader for `transform`, from `S3ReaderConstructor`. None: `sequential()`.
            config: Another name of `s3client_config`.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        chosen = store_config(one_config(config, s3client_config), region, endpoint)
        named = [object_uris] if isinstance(object_uris, str) else object_uris
        return cls._from_listing(Listing(chosen, cls._parse, objects=named), transform, reader_constructor)


class S3MapDataset(_S3ConnectorMethods[Sample_co], ObjectMapDataset[Sample_co], scheme="s3"):  # type: ignore[misc]  # the classmethods
    """An `ObjectMapDataset` of `s3://` URLs only. URLs of other schemes raise a `ConfigError`.

    Example:
        ```python
        dataset = S3MapDataset("s3://bucket/train/", transform=decode)
        dataset = S3MapDataset.from_prefix("s3://bucket/train/", region="eu-west-1", transform=decode)
        ```
    """


class S3IterableDataset(_S3ConnectorMethods[Sample_co], ObjectIterableDataset[Sample_co], scheme="s3"):
    """An `ObjectIterableDataset` of `s3://` URLs only. URLs of other schemes raise a `ConfigError`.

    Example:
        ```python
        dataset = S3IterableDataset("s3://bucket/train/", transform=decode, enable_sharding=True)
        ```
    """

    @classmethod
    @override
    def from_prefix(  # type: ignore[override]  # the names of s3torchconnector
        cls,
        s3_uri: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        enable_sharding: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        reader_constructor: ReaderConstructor | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
    ) -> Self:
        dataset = super().from_prefix(
            s3_uri,
            region=region,
            endpoint=endpoint,
            transform=transform,
            s3client_config=s3client_config,
            reader_constructor=reader_constructor,
            config=config,
        )
        return dataset._with_order(SampleRanks.of(enable_sharding, rank, world_size, mesh, by_default=False))

    @classmethod
    @override
    def from_objects(  # type: ignore[override]  # the names of s3torchconnector
        cls,
        object_uris: str | Iterable[str],
        *,
        region: str | None = None,
        endpoint: str | None = None,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        enable_sharding: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        reader_constructor: ReaderConstructor | None = None,
        config: StoreConfig | S3ClientConfig | None = None,
    ) -> Self:
        dataset = super().from_objects(
            object_uris,
            region=region,
            endpoint=endpoint,
            transform=transform,
            s3client_config=s3client_config,
            reader_constructor=reader_constructor,
            config=config,
        )
        return dataset._with_order(SampleRanks.of(enable_sharding, rank, world_size, mesh, by_default=False))


class GCSMapDataset(ObjectMapDataset[Sample_co], scheme="gs"):
    """An `ObjectMapDataset` of `gs://` URLs only. URLs of other schemes raise a `ConfigError`.

    Example:
        ```python
        dataset = GCSMapDataset("gs://bucket/train/", transform=decode)
        dataset = GCSMapDataset.from_objects(["gs://bucket/a.jpg", "gs://bucket/b.jpg"], transform=decode)
        ```
    """


class GCSIterableDataset(ObjectIterableDataset[Sample_co], scheme="gs"):
    """An `ObjectIterableDataset` of `gs://` URLs only. URLs of other schemes raise a `ConfigError`.

    Example:
        ```python
        dataset = GCSIterableDataset("gs://bucket/train/", transform=decode, enable_sharding=True)
        ```
    """
