"""Determines the configuration of a call from its arguments and the configuration file."""

from collections.abc import Iterable
from typing import TypeVar

from torchobj.config.config_file import file_for
from torchobj.config.s3_client import S3ClientConfig
from torchobj.config.settings import Settings, fields_of
from torchobj.config.store import OPTIONS, StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.urls import canonical_url

_Config = TypeVar("_Config", bound=Settings)


def one_config(
    config: StoreConfig | S3ClientConfig | None, s3client_config: StoreConfig | S3ClientConfig | None
) -> StoreConfig | S3ClientConfig | None:
    """The configuration of a call that takes it by two names. `store_config` checks its type.

    Raises:
        ConfigError: Both are passed.
    """
    if config is not None and s3client_config is not None:
        raise ConfigError("config: must be None if s3client_config is set")
    return s3client_config if config is None else config


def store_config(
    config: StoreConfig | S3ClientConfig | None,
    region: str | None = None,
    endpoint_url: str | None = None,
    *,
    url: object = None,
) -> StoreConfig:
    """Converts `config` to a `StoreConfig`; `region` and `endpoint_url` override the options of the URL's provider.

    Args:
        config: The argument of the call.
        region, endpoint_url: Arguments of the call.
        url: The URL of the call, if it is a single one: region and endpoint are errors for providers without them. In a
            call without a URL, or with one that is invalid, they belong to S3.
    """
    if config is None:
        config = StoreConfig()
    elif isinstance(config, S3ClientConfig):
        config = config.to_store_config()
    elif not isinstance(config, StoreConfig):
        raise ConfigError(f"config={config!r}: must be a StoreConfig or an S3ClientConfig")
    passed = {"region": region, "endpoint_url": endpoint_url}
    passed = {name: value for name, value in passed.items() if value is not None}
    if not passed:
        return config
    scheme = canonical_url(url).partition("://")[0] if isinstance(url, str) else "s3"
    for name, value in passed.items():
        if scheme in ("file", "memory"):
            raise ConfigError(f"{name}={value!r}: must be None for a URL of {scheme}://")
        if scheme == "gs" and name == "region":
            raise ConfigError(
                f"region={value!r}: must be None for a URL of gs://, because requests to Google Cloud Storage do not "
                "depend on the location of the bucket"
            )
    if scheme == "gs":
        return config.replaced(gcs=config.gcs.replaced(**passed))
    return config.replaced(s3=config.s3.replaced(**passed))


def store_config_of_all(
    config: StoreConfig | S3ClientConfig | None, region: str | None, endpoint_url: str | None, urls: Iterable[object]
) -> StoreConfig:
    """As `store_config`, for a call with any number of URLs.

    Raises:
        ConfigError: `endpoint_url` is passed with URLs of several providers that have endpoints.
    """
    if region is None and endpoint_url is None:
        return store_config(config)
    schemes = {canonical_url(url).partition("://")[0] for url in urls if isinstance(url, str)}
    if endpoint_url is not None and {"s3", "gs"} <= schemes:
        raise ConfigError(
            f"endpoint_url={endpoint_url!r}: must be None for URLs of s3:// and gs://; pass "
            "StoreConfig(s3=S3Options(endpoint_url=...), gcs=GCSOptions(endpoint_url=...))"
        )
    is_gcs = "gs" in schemes and "s3" not in schemes
    return store_config(config, region, endpoint_url, url="gs://" if is_gcs else None)


def resolve(url: str, config: StoreConfig | None) -> StoreConfig:
    """The configuration of a URL. Fields that are not set have the values of the longest matching prefix of the file.

    All fields of the result are set: it is not changed again, also in a process with another file. Without a file, it
    is the argument.

    Args:
        url: The URL, which is compared with the prefixes.
        config: The argument of the call.

    Raises:
        ConfigError: The file is invalid, or the combination is.
    """
    config = store_config(config)
    file = file_for(config)
    if not file.path:
        return config
    prefix = file.longest(url)
    settings = StoreConfig() if prefix is None else file.settings[prefix]
    try:
        options = {name: _completed(getattr(config, name), getattr(settings, name)) for name in OPTIONS}
        return _completed(config.replaced(**options), settings)
    except ConfigError as error:
        raise ConfigError(
            f"config=... with {str(prefix)!r} of {file.path}: {error}; to ignore a field of the file, pass it with its "
            "default value, such as S3Options(profile=None)"
        ) from None


def _completed(config: _Config, settings: _Config) -> _Config:
    """A copy whose fields that are not set have the values of `settings`."""
    return config.replaced(**{name: getattr(settings, name) for name in fields_of(type(config)).keys() - config._set})
