"""Determines the configuration of a call from its arguments and the configuration file."""

from collections.abc import Iterable

from torchobj.config.config_file import ConfigFile, Prefix, current
from torchobj.config.explicit_fields import ExplicitFields, explicit_fields, replace_fields
from torchobj.config.s3_client import S3ClientConfig
from torchobj.config.store import OPTIONS, StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.urls import canonical_url


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
        return replace_fields(config, gcs=replace_fields(config.gcs, **passed))
    return replace_fields(config, s3=replace_fields(config.s3, **passed))


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


def resolved(url: str, config: StoreConfig) -> StoreConfig:
    """The configuration of a URL: fields that were passed to `config` override those of the longest matching prefix.

    A resolved configuration is complete and is not changed again, also in a process with another file.

    Raises:
        ConfigError: The file is invalid, or the combination is.
    """
    file = None if config.is_complete else current()
    return config if file is None else _merged(file, file.longest(url), config)


def by_prefix(config: StoreConfig) -> list[tuple[Prefix | None, StoreConfig]]:
    """The configurations of all prefixes of the file, the longest first; the last one, with None, is for other URLs.

    Raises:
        ConfigError: As `resolved`, for any of the prefixes.
    """
    file = None if config.is_complete else current()
    if file is None:
        return [(None, config)]
    prefixes = sorted(file.settings, key=lambda prefix: len(prefix.segments), reverse=True)
    return [(prefix, _merged(file, prefix, config)) for prefix in (*prefixes, None)]


def by_bucket(objects: Iterable[tuple[str, str]], config: StoreConfig) -> dict[str, StoreConfig]:
    """The configurations of the buckets of objects, by the base of their URLs.

    Args:
        objects: Base and URL of each object.
        config: The argument of the call.

    Raises:
        ConfigError: As `resolved`; or different prefixes of the file apply to objects of one bucket.
    """
    file = None if config.is_complete else current()
    is_divided = file is not None and any(prefix.is_below_bucket for prefix in file.settings)
    first: dict[str, str] = {}
    for base, url in objects:
        other = first.setdefault(base, url)
        if file is not None and is_divided and file.longest(url) != file.longest(other):
            raise ConfigError(
                f"url={url!r}: {_described(file.longest(url))} of {file.path} applies to it, and "
                f"{_described(file.longest(other))} to {other!r} in the same bucket. A dataset of named objects uses "
                "one configuration for each bucket: create a dataset for each prefix and combine them, for example "
                "with torch.utils.data.ConcatDataset"
            )
    return {base: resolved(url, config) for base, url in first.items()}


def prefix_in_bucket(url: str, config: StoreConfig) -> Prefix | None:
    """The prefix of the file that applies to a URL, if it is a part of a bucket."""
    file = None if config.is_complete else current()
    prefix = None if file is None else file.longest(url)
    return prefix if prefix is not None and prefix.is_below_bucket else None


def _described(prefix: Prefix | None) -> str:
    return "no prefix" if prefix is None else f"the prefix {prefix}"


def _merged(file: ConfigFile, prefix: Prefix | None, config: StoreConfig) -> StoreConfig:
    fields = explicit_fields(config)
    if prefix is None:
        return type(config)(**fields).completed()
    settings = file.settings[prefix]
    options: dict[str, ExplicitFields] = {name: getattr(config, name) for name in OPTIONS}
    try:
        for name, given in options.items():
            merged = {**explicit_fields(getattr(settings, name)), **explicit_fields(given)}
            options[name] = type(given)(**merged)
        return type(config)(**{**explicit_fields(settings), **fields, **options}).completed()
    except ConfigError as error:
        raise ConfigError(
            f"config=... with {str(prefix)!r} of {file.path}: {error}; to ignore a field of the file, pass it with its "
            "default value, such as S3Options(profile=None)"
        ) from None
