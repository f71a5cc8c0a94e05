"""`S3MapDataset` and `S3IterableDataset`: datasets of URLs of S3 only, with the arguments of s3torchconnector."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Self, Unpack, cast

from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from torchobj._torchobj import ObjectReader
from torchobj.config import StoreConfig
from torchobj.datasets.base import Options, PerObjectDataset, Sample
from torchobj.datasets.failures import OnError, OnIterableError
from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.datasets.listing import OnChange
from torchobj.datasets.map import ObjectMapDataset
from torchobj.datasets.samples import Sample_co
from torchobj.exceptions import ConfigError
from torchobj.manifest import Manifest
from torchobj.ranks.sharding import Uneven
from torchobj.reading.reader_constructor import ReaderConstructor
from torchobj.s3torchconnector.client_config import S3ClientConfig, connector_config
from torchobj.urls import SCHEMES, Url, canonical_url

__all__ = ["S3IterableDataset", "S3MapDataset"]


class ConnectorOptions(Options[Sample], Generic[Sample], total=False):
    """The keyword arguments of the constructors."""

    region: str | None
    endpoint_url: str | None
    endpoint: str | None
    s3client_config: S3ClientConfig | StoreConfig | None


class _S3Dataset(PerObjectDataset[Sample_co]):
    """URLs of S3 only, and the class methods of s3torchconnector's datasets."""

    _schemes = ("s3",)
    #: Name of the dataset that accepts other URLs.
    _any_scheme: ClassVar[str]

    @classmethod
    @override
    def _parse(cls, url: str) -> Url:
        """Parses a URL of S3. The error for another scheme names the class that accepts it."""
        scheme = canonical_url(url).partition("://")[0] if isinstance(url, str) else ""
        if scheme in SCHEMES and scheme != "s3":
            raise ConfigError(f"url={url!r}: scheme {scheme!r}, expected s3://; use {cls._any_scheme}")
        return super()._parse(url)

    @classmethod
    @override
    def from_prefix(cls, s3_uri: str, **options: Unpack[ConnectorOptions[Sample_co]]) -> Self:
        """The objects under a prefix, in key order, with a choice of readers. Arguments are named as in
        s3torchconnector.

        Args:
            s3_uri: URL of the prefix, as for the constructor.
            options: The keyword arguments of the constructor: `region`, `endpoint`, `transform`, `s3client_config`,
                `enable_sharding`, `reader_constructor` and others.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        return super().from_prefix(s3_uri, **cast("Any", options))

    @classmethod
    @override
    def from_objects(cls, object_uris: str | Iterable[str], **options: Unpack[ConnectorOptions[Sample_co]]) -> Self:
        """The named objects, in the given order. Nothing is listed. Arguments are named as in s3torchconnector.

        Under torch.distributed each rank has the objects that it names. Pass `uris[rank::world_size]` to divide them;
        with `enable_sharding` pass the same objects on all ranks.

        Args:
            object_uris: URL of each object, or of a single one.
            options: As for `from_prefix`.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        return super().from_objects(object_uris, **cast("Any", options))

    @classmethod
    @override
    def from_manifest(
        cls, manifest: Manifest | str | os.PathLike[str], **options: Unpack[ConnectorOptions[Sample_co]]
    ) -> Self:
        """The objects of a manifest, as `ObjectMapDataset.from_manifest`.

        Args:
            manifest: A `Manifest`, or the path or URL of its file.
            options: As for `from_prefix`. The configuration is for the file and the objects.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        return super().from_manifest(manifest, **cast("Any", options))


class S3MapDataset(_S3Dataset[Sample_co], ObjectMapDataset[Sample_co]):
    """An `ObjectMapDataset` of `s3://` URLs only, with its arguments. Also accepts those of s3torchconnector.

    Args:
        source: The URL of a prefix, `s3://bucket/prefix/`, or URLs of objects, or a `Manifest`.
        transform, glob, suffixes, limit, on_change, on_error, reader_constructor: As for `ObjectMapDataset`.
        allow_empty: As for `ObjectMapDataset`, but True by default: a prefix without objects is a dataset without
            samples, as in s3torchconnector.
        region: Region of the buckets. None: that of `config`, or detected.
        endpoint_url: URL of the store. None: that of `config`, AWS, or the environment's.
        config: Settings of the store.
        endpoint, s3client_config: The names of `endpoint_url` and `config` in s3torchconnector. The second may be an
            `S3ClientConfig`.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid, or passed by two names. No request is sent here.

    Example:
        ```python
        dataset = S3MapDataset("s3://bucket/train/", transform=decode)
        dataset = S3MapDataset.from_prefix("s3://bucket/train/", region="eu-west-1", transform=decode)
        ```
    """

    _any_scheme = "ObjectMapDataset"

    def __init__(
        self,
        source: str | Iterable[str] | Manifest,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        on_change: OnChange = "raise",
        allow_empty: bool = True,
        region: str | None = None,
        endpoint_url: str | None = None,
        endpoint: str | None = None,
        config: StoreConfig | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        on_error: OnError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> None:
        super().__init__(
            source,
            transform=transform,
            glob=glob,
            suffixes=suffixes,
            limit=limit,
            on_change=on_change,
            allow_empty=allow_empty,
            config=connector_config(config, s3client_config, region, endpoint, endpoint_url),
            on_error=on_error,
            reader_constructor=reader_constructor,
        )

    _construct = __init__


class S3IterableDataset(_S3Dataset[Sample_co], ObjectIterableDataset[Sample_co]):
    """An `ObjectIterableDataset` of `s3://` URLs only, with its arguments. Also accepts those of s3torchconnector.

    Args:
        source: The URL of a prefix, `s3://bucket/prefix/`, or URLs of objects, or a `Manifest`.
        transform, glob, suffixes, limit, on_change, on_error, reader_constructor: As for `ObjectIterableDataset`.
        allow_empty: As for `ObjectIterableDataset`, but True by default: a prefix without objects is a dataset without
            samples, as in s3torchconnector.
        region: Region of the buckets. None: that of `config`, or detected.
        endpoint_url: URL of the store. None: that of `config`, AWS, or the environment's.
        config: Settings of the store.
        endpoint, s3client_config: The names of `endpoint_url` and `config` in s3torchconnector. The second may be an
            `S3ClientConfig`.
        enable_sharding, rank, world_size, mesh, shuffle, seed, uneven: As for `ObjectIterableDataset`.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.
        shuffle, seed, uneven, on_error: As for `ObjectIterableDataset`.

    Raises:
        ConfigError: An argument is invalid, or passed by two names. No request is sent here.

    Example:
        ```python
        dataset = S3IterableDataset("s3://bucket/train/", transform=decode, enable_sharding=True)
        ```
    """

    _any_scheme = "ObjectIterableDataset"

    def __init__(
        self,
        source: str | Iterable[str] | Manifest,
        *,
        transform: Callable[[ObjectReader], Sample_co] | None = None,
        glob: str | None = None,
        suffixes: str | Sequence[str] | None = None,
        limit: int | None = None,
        on_change: OnChange = "raise",
        allow_empty: bool = True,
        region: str | None = None,
        endpoint_url: str | None = None,
        endpoint: str | None = None,
        config: StoreConfig | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        enable_sharding: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        shuffle: bool = False,
        seed: int = 0,
        uneven: Uneven = None,
        on_error: OnIterableError = "raise",
        reader_constructor: ReaderConstructor | None = None,
    ) -> None:
        super().__init__(
            source,
            transform=transform,
            glob=glob,
            suffixes=suffixes,
            limit=limit,
            on_change=on_change,
            allow_empty=allow_empty,
            config=connector_config(config, s3client_config, region, endpoint, endpoint_url),
            enable_sharding=enable_sharding,
            rank=rank,
            world_size=world_size,
            mesh=mesh,
            shuffle=shuffle,
            seed=seed,
            uneven=uneven,
            on_error=on_error,
            reader_constructor=reader_constructor,
        )

    _construct = __init__
