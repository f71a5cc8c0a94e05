"""`S3ClientConfig`, the configuration class of s3torchconnector, and the `StoreConfig` of calls with it.

Does not import torch.
"""

import dataclasses
import math
from types import NoneType
from typing import Any

from torchobj.config import S3Options, StoreConfig, store_config
from torchobj.config.checks import GIB, MIB, check, check_kinds, check_number
from torchobj.exceptions import ConfigError

__all__ = ["S3ClientConfig", "connector_config"]


@dataclasses.dataclass(frozen=True)
class S3ClientConfig:
    """The configuration class of s3torchconnector 1.5, with its names and defaults.

    `torchobj.StoreConfig` has the same settings and more. The classes of s3torchconnector accept both.

    Args:
        throughput_target_gbps: Target throughput. Other values than the default set the number of concurrent requests,
            one per 0.4 Gbit/s.
        part_size: Size of the ranges of a large read and of the parts of an upload, in bytes. 5 MiB..5 GiB.
        unsigned: Whether requests are sent without a signature.
        force_path_style: Whether the bucket is part of the path of request URLs.
        max_attempts: Maximum number of attempts of a request, including the first.
        profile: Profile of the shared configuration files.
        requester_pays: Whether the reader pays for requests and traffic.

    Raises:
        ConfigError: A value is not allowed; the message names the field and the allowed values.

    Example:
        >>> S3ClientConfig(part_size=16 << 20, max_attempts=3).to_store_config().part_bytes
        16777216
    """

    throughput_target_gbps: float = 10.0
    part_size: int = 8 * MIB
    unsigned: bool = False
    force_path_style: bool = False
    max_attempts: int = 10
    profile: str | None = None
    requester_pays: bool = False

    def __post_init__(self) -> None:
        check_kinds(self, "a string, or None", (str, NoneType), "profile")
        check_kinds(self, "True or False", (bool,), "unsigned", "force_path_style", "requester_pays")
        check_number("throughput_target_gbps", self.throughput_target_gbps, 0.001, 100_000, whole=False)
        check_number("part_size", self.part_size, 5 * MIB, 5 * GIB)
        check_number("max_attempts", self.max_attempts, 1, 1000)
        check(
            "requester_pays",
            self.requester_pays,
            "False if unsigned is True",
            ok=not (self.requester_pays and self.unsigned),
        )

    def to_store_config(self) -> StoreConfig:
        """Converts to a `StoreConfig`."""
        usual = S3ClientConfig.__dataclass_fields__["throughput_target_gbps"].default
        # aws-c-s3, s3_client.c: 100 Gbit/s over 250 connections, at least ten.
        requests = min(4096, max(10, math.ceil(self.throughput_target_gbps / 0.4)))
        s3: dict[str, Any] = {
            "profile": self.profile,
            "anonymous": self.unsigned,
            "addressing_style": "path" if self.force_path_style else "auto",
            "requester_pays": self.requester_pays,
        }
        shared: dict[str, Any] = {
            "part_bytes": self.part_size,
            "max_in_flight": "auto" if self.throughput_target_gbps == usual else requests,
            "max_attempts": self.max_attempts,
        }
        # Only fields with other values than the defaults override the configuration file.
        s3 = {name: value for name, value in s3.items() if value != getattr(S3Options, name)}
        shared = {name: value for name, value in shared.items() if value != getattr(StoreConfig, name)}
        return StoreConfig(s3=S3Options(**s3), **shared)


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
    if isinstance(given, S3ClientConfig):
        given = given.to_store_config()
    ok = given is None or isinstance(given, StoreConfig)
    check("config", type(given), "a StoreConfig or an S3ClientConfig", ok=ok)
    return None if given is None and region is None and url is None else store_config(given, region, url)
