"""How stores are reached and used. Frozen, checked at construction. Reads no environment and no files.

Credentials are never part of a configuration: they come from where the AWS SDKs look, at the moment of use.
"""

import dataclasses
import math
import os
import re
from pathlib import Path
from types import NoneType
from typing import Literal

from torchobj.exceptions import ConfigError

__all__ = ["S3ClientConfig", "StoreConfig"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

AddressingStyle = Literal["auto", "path", "virtual"]
ChecksumAlgorithm = Literal["auto", "crc64nvme", "crc32c", "none"]
Encryption = Literal["AES256", "aws:kms", "aws:kms:dsse"]
KeyRules = Literal["any", "path"]


#: 32 bytes in Base64 or in hexadecimal.
_KEY = re.compile(r"\s*([A-Za-z0-9+/_-]{43}=|[0-9A-Fa-f]{64})\s*")


def _is_region(region: str | None) -> bool:
    return region is None or re.fullmatch(r"[A-Za-z0-9._-]{1,64}", region) is not None


def _check(name: str, value: object, allowed: str, *, ok: bool) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r}: must be {allowed}")


def _check_number(name: str, value: object, low: float, high: float, unit: str = "", *, whole: bool = True) -> None:
    kinds = int if whole else (int, float)
    number = value if isinstance(value, kinds) and not isinstance(value, bool) else math.nan
    text = {5 * MIB: "5 MiB", 5 * GIB: "5 GiB", MIB: "1 MiB", 64 * GIB: "64 GiB"}
    allowed = f"{text.get(int(low), low)}..{text.get(int(high), high)}{unit}"
    _check(name, value, allowed, ok=low <= number <= high)


def _check_kinds(config: object, allowed: str, kinds: tuple[type, ...], *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(name, value, allowed, ok=isinstance(value, kinds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How a store is reached, and how it is used.

    Example:
        >>> StoreConfig(endpoint_url="http://localhost:9000", max_in_flight=32).max_in_flight
        32
        >>> StoreConfig(part_bytes=1 << 20)
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: part_bytes=1048576: must be 5 MiB..5 GiB
    """

    region: str | None = None
    """Region of the bucket. None: `AWS_REGION`, the profile, or what the bucket itself says."""
    endpoint_url: str | None = None
    """Where the store is. None: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, the profile, or AWS."""
    profile: str | None = None
    """Profile of the shared configuration files. None: `AWS_PROFILE`, or `default`."""
    anonymous: bool = False
    """Requests are not signed: public buckets need no credentials."""
    addressing_style: AddressingStyle = "auto"
    """The bucket in the `path`, or as part of the host (`virtual`). `auto`: in the host on AWS, in the path of a custom
    endpoint."""
    verify_tls: bool = True
    """Whether the certificate of the server is checked."""
    ca_bundle: str | Path | None = None
    """PEM file of the certificates to trust. None: `AWS_CA_BUNDLE`, or the system's."""
    requester_pays: bool = False
    """Whoever reads pays, for buckets that ask for it."""
    encryption: Encryption | None = None
    """Encryption of what is written: SSE-S3, SSE-KMS, or KMS in two layers. None: as the bucket says."""
    kms_key_id: str | None = None
    """Key of SSE-KMS. None: the account's own."""
    customer_key_file: str | Path | None = dataclasses.field(default=None, repr=False)
    """File with the 32 bytes, raw or in Base64, of the key of SSE-C. The file is read in each process; the key is in no
    pickle and in no log. Not shown, lest a key that is given in place of its file be shown."""
    storage_class: str | None = None
    """Storage class of what is written, as `STANDARD_IA`."""
    checksum: ChecksumAlgorithm = "auto"
    """Checksum that goes with what is written. `auto`: CRC64NVME to AWS, CRC32C to a custom endpoint, and CRC32 for
    checkpoints, which have it anyway. `none` for stores that refuse the headers."""
    key_rules: KeyRules = "any"
    """`path` for servers that keep objects as files and would take `a//b` for `a/b`: such keys are refused here."""
    force_sdk: bool = False
    """Every request goes through the AWS SDK instead of torchobj's own connections: slower, for comparison."""
    part_bytes: int = 8 * MIB
    """Size of a range of a large read and of the first parts of an upload. AWS advises 8 or 16 MiB. 5 MiB..5 GiB."""
    whole_below_bytes: int = 16 * MIB
    """Objects smaller than this are read and written by one request, where their size is known."""
    write_buffer_bytes: int = 64 * MIB
    """Memory of one writer for parts that are being filled or sent; two parts at the least."""
    upload_mbit_s: float | None = None
    """How fast all uploads of an account together may send, in 10^6 bits a second: so that a checkpoint leaves a loader
    its share of the network. Parts are sent whole, one after the other at this rate. None: as fast as it goes."""
    max_in_flight: int | Literal["auto"] = "auto"
    """Requests at a time, of all stores with this configuration in a process. `auto`: 64 to begin with, more while that
    raises the throughput, fewer while the store refuses. A number stays. 1..4096."""
    max_in_flight_cap: int = 256
    """How many `max_in_flight="auto"` may become. 1..4096."""
    hedge: bool = True
    """Whether a read that is answered later than most is asked for a second time, on another connection: at most one in
    twenty, and none for 10 s after the store asked for fewer requests."""
    max_attempts: int = 10
    """Attempts of a request, the first included. Bytes that arrive start the count anew. While the store throttles
    (503, 429) or sends `Retry-After`, attempts are not counted, and `retry_timeout_s` alone ends them; 1 means no
    retry at all. 1..1000."""
    retry_timeout_s: float = 180.0
    """No attempt begins later than this after the first, those of throttled requests included. For the commit of an
    upload in parts, `commit_timeout_s` replaces it."""
    connect_timeout_s: float = 5.0
    """For a TCP connect, and for a TLS handshake."""
    first_byte_timeout_s: float = 30.0
    """From a request to the head of its answer."""
    idle_timeout_s: float = 20.0
    """How long a transfer may stand still. Nothing limits how long one may take that goes on."""
    commit_timeout_s: float = 900.0
    """For the commit of an upload in parts, retries included. S3 may send white space for minutes while it assembles
    the parts; a store that sends nothing for longer than `first_byte_timeout_s` and `idle_timeout_s` is asked again.
    After an attempt without a response, the store is checked for the object until this time is over. If the object is
    still missing then, the error says that the outcome is unknown, and the upload is not aborted, because the store may
    still be committing it. 0.01..86400 s."""
    min_bytes_per_s: int = 16 * KIB
    """Bytes a second that the body of a read must bring, on average over `idle_timeout_s`: a slower one is continued on
    another connection. On a network where `max_in_flight` requests cannot have as much each, lower either. 0: no such
    limit. 0..1 GiB."""
    keep_alive_s: float = 8.0
    """How long an idle connection is kept. S3 closes its own after 5 to 20 s."""

    def __post_init__(self) -> None:
        texts = ("region", "endpoint_url", "profile", "kms_key_id", "storage_class")
        _check_kinds(self, "a string, or None", (str, NoneType), *texts)
        # What stands before an @ is a password, which is not to be in a log.
        if "@" in (self.endpoint_url or ""):
            raise ConfigError("endpoint_url: must have no user and password; the AWS SDKs' places are for credentials")
        if any(mark in (self.endpoint_url or "") for mark in "?#"):
            raise ConfigError("endpoint_url: must have no query and no fragment")
        _check("region", self.region, "letters, digits, '-', '_' and '.'", ok=_is_region(self.region))
        switches = ("anonymous", "verify_tls", "requester_pays", "force_sdk", "hedge")
        _check_kinds(self, "True or False", (bool,), *switches)
        for name in ("ca_bundle", "customer_key_file"):
            value = getattr(self, name)
            # Its type only: a key that is given in place of its file is not to be in a log.
            _check(name, type(value), "a path, or None", ok=isinstance(value, (str, os.PathLike, NoneType)))
        if self.customer_key_file is not None and _KEY.fullmatch(os.fspath(self.customer_key_file)):
            raise ConfigError("customer_key_file: must be the path of a file that has the key, not the key itself")
        _check(
            "addressing_style",
            self.addressing_style,
            "auto, path or virtual",
            ok=self.addressing_style in ("auto", "path", "virtual"),
        )
        _check(
            "checksum",
            self.checksum,
            "auto, crc64nvme, crc32c or none",
            ok=self.checksum in ("auto", "crc64nvme", "crc32c", "none"),
        )
        _check(
            "encryption",
            self.encryption,
            "None, AES256, aws:kms or aws:kms:dsse",
            ok=self.encryption in (None, "AES256", "aws:kms", "aws:kms:dsse"),
        )
        _check("key_rules", self.key_rules, "any or path", ok=self.key_rules in ("any", "path"))
        _check(
            "kms_key_id",
            self.kms_key_id,
            "None unless encryption is aws:kms or aws:kms:dsse",
            ok=self.kms_key_id is None or self.encryption in ("aws:kms", "aws:kms:dsse"),
        )
        if self.customer_key_file is not None and self.encryption is not None:
            raise ConfigError("customer_key_file: must be None where encryption is set")
        _check(
            "endpoint_url",
            self.endpoint_url,
            "a URL that begins with http:// or https://",
            ok=self.endpoint_url is None or self.endpoint_url.startswith(("http://", "https://")),
        )
        _check(
            "requester_pays",
            self.requester_pays,
            "False where anonymous is True: somebody must be billed",
            ok=not (self.requester_pays and self.anonymous),
        )
        _check_number("part_bytes", self.part_bytes, 5 * MIB, 5 * GIB)
        _check_number("whole_below_bytes", self.whole_below_bytes, MIB, 5 * GIB)
        _check_number("write_buffer_bytes", self.write_buffer_bytes, 5 * MIB, 64 * GIB)
        if self.upload_mbit_s is not None:
            _check_number("upload_mbit_s", self.upload_mbit_s, 1, 1_000_000, " Mbit/s", whole=False)
        if self.max_in_flight != "auto":
            _check_number("max_in_flight", self.max_in_flight, 1, 4096)
        _check_number("max_in_flight_cap", self.max_in_flight_cap, 1, 4096)
        _check_number("max_attempts", self.max_attempts, 1, 1000)
        _check_number("min_bytes_per_s", self.min_bytes_per_s, 0, GIB)
        waits = ("retry_timeout_s", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s", "commit_timeout_s")
        for name in (*waits, "keep_alive_s"):
            _check_number(name, getattr(self, name), 0.01, 86_400, " s", whole=False)

    @property
    def max_in_flight_number(self) -> int:
        """What `max_in_flight` amounts to, or begins with."""
        return min(64, self.max_in_flight_cap) if self.max_in_flight == "auto" else self.max_in_flight

    @property
    def adaptive_cap(self) -> int | None:
        """How many requests at a time it may become; None where the number is fixed."""
        return self.max_in_flight_cap if self.max_in_flight == "auto" else None


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
    """Whoever reads pays."""

    def __post_init__(self) -> None:
        _check_kinds(self, "a string, or None", (str, NoneType), "profile")
        _check_kinds(self, "True or False", (bool,), "unsigned", "force_path_style", "requester_pays")
        _check_number("throughput_target_gbps", self.throughput_target_gbps, 0.001, 100_000, whole=False)
        _check_number("part_size", self.part_size, 5 * MIB, 5 * GIB)
        _check_number("max_attempts", self.max_attempts, 1, 1000)
        _check(
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
            profile=self.profile,
            anonymous=self.unsigned,
            addressing_style="path" if self.force_path_style else "auto",
            requester_pays=self.requester_pays,
            part_bytes=self.part_size,
            max_in_flight="auto" if self.throughput_target_gbps == usual else requests,
            max_attempts=self.max_attempts,
        )


def store_config(
    config: StoreConfig | S3ClientConfig | None, region: str | None = None, endpoint_url: str | None = None
) -> StoreConfig:
    """`config` as a `StoreConfig`, with region and endpoint where they are given."""
    if config is None:
        config = StoreConfig()
    elif isinstance(config, S3ClientConfig):
        config = config.to_store_config()
    elif not isinstance(config, StoreConfig):
        raise ConfigError(f"config={config!r}: must be a StoreConfig or an S3ClientConfig")
    if region is not None:
        config = dataclasses.replace(config, region=region)
    if endpoint_url is not None:
        config = dataclasses.replace(config, endpoint_url=endpoint_url)
    return config
