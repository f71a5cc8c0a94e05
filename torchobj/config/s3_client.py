"""`S3ClientConfig`, the configuration class of s3torchconnector, and what turns it into a `StoreConfig`."""

import dataclasses
import math
from types import NoneType

from torchobj.config.checks import GIB, MIB, check, check_kinds, check_number
from torchobj.config.options import S3Options
from torchobj.config.store import StoreConfig
from torchobj.exceptions import ConfigError


@dataclasses.dataclass(frozen=True)
class S3ClientConfig:
    """The configuration class of s3torchconnector 1.5, by its names and defaults.

    `torchobj.StoreConfig` says the same and more; wherever one is taken, so is the other.
    """

    throughput_target_gbps: float = 10.0
    """At other values than the default: so many requests at a time as AWS advises for it, one per 0.4 Gbit/s."""
    part_size: int = 8 * MIB
    """Size of a range of a large read and of a part of an upload, in bytes: 5 MiB..5 GiB."""
    unsigned: bool = False
    """Requests are not signed."""
    force_path_style: bool = False
    """The bucket stands in the path of a URL."""
    max_attempts: int = 10
    """Attempts of a request, the first included."""
    profile: str | None = None
    """Profile of the shared configuration files."""
    requester_pays: bool = False
    """The reader pays for requests and traffic."""

    def __post_init__(self) -> None:
        check_kinds(self, "a string, or None", (str, NoneType), "profile")
        check_kinds(self, "True or False", (bool,), "unsigned", "force_path_style", "requester_pays")
        check_number("throughput_target_gbps", self.throughput_target_gbps, 0.001, 100_000, whole=False)
        check_number("part_size", self.part_size, 5 * MIB, 5 * GIB)
        check_number("max_attempts", self.max_attempts, 1, 1000)
        check(
            "requester_pays",
            self.requester_pays,
            "False where unsigned is True",
            ok=not (self.requester_pays and self.unsigned),
        )

    def to_store_config(self) -> StoreConfig:
        """The same as a `StoreConfig`."""
        usual = S3ClientConfig.__dataclass_fields__["throughput_target_gbps"].default
        # aws-c-s3, s3_client.c: 100 Gbit/s over 250 connections, ten at the least.
        requests = min(4096, max(10, math.ceil(self.throughput_target_gbps / 0.4)))
        return StoreConfig(
            s3=S3Options(
                profile=self.profile,
                anonymous=self.unsigned,
                addressing_style="path" if self.force_path_style else "auto",
                requester_pays=self.requester_pays,
            ),
            part_bytes=self.part_size,
            max_in_flight="auto" if self.throughput_target_gbps == usual else requests,
            max_attempts=self.max_attempts,
        )


def store_config(
    config: StoreConfig | S3ClientConfig | None, region: str | None = None, endpoint_url: str | None = None
) -> StoreConfig:
    """`config` as a `StoreConfig`; region and endpoint, where they are given, replace those of its S3 options."""
    if config is None:
        config = StoreConfig()
    elif isinstance(config, S3ClientConfig):
        config = config.to_store_config()
    elif not isinstance(config, StoreConfig):
        raise ConfigError(f"config={config!r}: must be a StoreConfig or an S3ClientConfig")
    s3 = config.s3
    if region is not None:
        s3 = dataclasses.replace(s3, region=region)
    if endpoint_url is not None:
        s3 = dataclasses.replace(s3, endpoint_url=endpoint_url)
    return config if s3 is config.s3 else dataclasses.replace(config, s3=s3)
