"""`S3MapDataset` and `S3IterableDataset`: datasets of URLs of S3 only, with the classmethods of s3torchconnector."""

from collections.abc import Iterable
from typing import Any, ClassVar, Self, Unpack

from typing_extensions import override

from torchobj.config import S3ClientConfig, StoreConfig, one_config
from torchobj.datasets.base import Options, PerObjectDataset, Sample_co
from torchobj.datasets.iterable import ObjectIterableDataset
from torchobj.datasets.map import ObjectMapDataset
from torchobj.exceptions import ConfigError
from torchobj.urls import SCHEMES, Url, canonical_url

__all__ = ["S3IterableDataset", "S3MapDataset"]


class _S3ConnectorMethods(PerObjectDataset[Sample_co]):
    """URLs of S3 only, and the classmethods of s3torchconnector's datasets."""

    _schemes = ("s3",)
    _allows_empty = True
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
    def from_prefix(
        cls,
        s3_uri: str,
        *,
        endpoint: str | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        **options: Unpack[Options[Sample_co]],
    ) -> Self:
        """The objects under a prefix, in key order, with a choice of readers. Arguments are named as in
        s3torchconnector.

        Args:
            s3_uri: URL of the prefix, as for the constructor.
            endpoint: URL of the store. None: that of the provider, or the environment's.
            s3client_config: Another name of `config`.
            options: The keyword arguments of the constructor: `region`, `transform`, `enable_sharding`,
                `reader_constructor` and others.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        return super().from_prefix(s3_uri, **_renamed(endpoint, s3client_config, options))

    @classmethod
    @override
    def from_objects(
        cls,
        object_uris: str | Iterable[str],
        *,
        endpoint: str | None = None,
        s3client_config: S3ClientConfig | StoreConfig | None = None,
        **options: Unpack[Options[Sample_co]],
    ) -> Self:
        """The named objects, in the given order. Nothing is listed. Arguments are named as in s3torchconnector.

        Under torch.distributed each rank has the objects that it names. Pass `uris[rank::world_size]` to divide them;
        with `enable_sharding` pass the same objects on all ranks.

        Args:
            object_uris: URL of each object, or of a single one.
            endpoint, s3client_config, options: As for `from_prefix`.

        Raises:
            ConfigError: An argument is invalid. No request is sent here.
        """
        return super().from_objects(object_uris, **_renamed(endpoint, s3client_config, options))


def _renamed(endpoint: str | None, s3client_config: S3ClientConfig | StoreConfig | None, options: Any) -> Any:
    """The options with the names of the constructor."""
    renamed = {"config": one_config(options.get("config"), s3client_config)}
    return options | renamed | ({} if endpoint is None else {"endpoint_url": endpoint})


class S3MapDataset(_S3ConnectorMethods[Sample_co], ObjectMapDataset[Sample_co]):
    """An `ObjectMapDataset` of `s3://` URLs only, with its arguments. URLs of other schemes raise a
    `ConfigError`. A prefix without objects is a dataset without samples, as in s3torchconnector; with
    `allow_empty=False` it is an error.

    Example:
        ```python
        dataset = S3MapDataset("s3://bucket/train/", transform=decode)
        dataset = S3MapDataset.from_prefix("s3://bucket/train/", region="eu-west-1", transform=decode)
        ```
    """

    _any_scheme = "ObjectMapDataset"


class S3IterableDataset(_S3ConnectorMethods[Sample_co], ObjectIterableDataset[Sample_co]):
    """An `ObjectIterableDataset` of `s3://` URLs only, with its arguments. URLs of other schemes raise a
    `ConfigError`. A prefix without objects is a dataset without samples, as in s3torchconnector; with
    `allow_empty=False` it is an error.

    Example:
        ```python
        dataset = S3IterableDataset("s3://bucket/train/", transform=decode, enable_sharding=True)
        ```
    """

    _any_scheme = "ObjectIterableDataset"
