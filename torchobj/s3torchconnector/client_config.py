"""The settings of a call with the arguments of s3torchconnector. Does not import torch."""

from torchobj.config import S3ClientConfig, StoreConfig, store_config
from torchobj.exceptions import ConfigError

__all__ = ["connector_config"]


def connector_config(
    config: StoreConfig | None,
    s3client_config: S3ClientConfig | StoreConfig | None,
    region: str | None,
    endpoint: str | None,
    endpoint_url: str | None = None,
) -> StoreConfig | None:
    """The configuration of a call; None if it passes no argument.

    Args:
        config, s3client_config: The same, by two names.
        region: Overrides that of the configuration.
        endpoint, endpoint_url: The same, by two names. Overrides that of the configuration.

    Raises:
        ConfigError: An argument is passed by two names, or has another type.
    """
    if config is not None and s3client_config is not None:
        raise ConfigError("config: must be None if s3client_config is set")
    if endpoint is not None and endpoint_url is not None:
        raise ConfigError("endpoint_url: must be None if endpoint is set")
    given = s3client_config if config is None else config
    url = endpoint_url if endpoint is None else endpoint
    return None if given is None and region is None and url is None else store_config(given, region, url)
