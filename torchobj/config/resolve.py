"""Determines the configuration of a call from its arguments and the configuration file."""

from typing import TypeVar

from torchobj.config.checks import check
from torchobj.config.config_base import ConfigBase, fields_of
from torchobj.config.config_file import file_for
from torchobj.config.store import OPTIONS, StoreConfig
from torchobj.exceptions import ConfigError

_Config = TypeVar("_Config", bound=ConfigBase)


def store_config(
    config: StoreConfig | None,
    region: str | None = None,
    endpoint_url: str | None = None,
    scheme: str = "s3",
) -> StoreConfig:
    """The configuration of a call, in which `region` and `endpoint_url` override the options of one provider.

    Args:
        config: The argument of the call.
        region, endpoint_url: Arguments of the call.
        scheme: The scheme of the provider.

    Raises:
        ConfigError: `config` has another type, or the provider has no region or endpoint.
    """
    check("config", type(config), "a StoreConfig, or None", ok=config is None or isinstance(config, StoreConfig))
    config = StoreConfig() if config is None else config
    passed = {"region": region, "endpoint_url": endpoint_url}
    passed = {name: value for name, value in passed.items() if value is not None}
    if not passed:
        return config
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
