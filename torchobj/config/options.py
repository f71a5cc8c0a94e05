"""Options of one provider each: `S3Options` and `FileOptions`. What all providers share is in `StoreConfig`."""

import dataclasses
import os
import re
from pathlib import Path
from types import NoneType
from typing import Literal

from torchobj.config.checks import check, check_choices, check_kinds
from torchobj.exceptions import ConfigError

AddressingStyle = Literal["auto", "path", "virtual"]
ChecksumAlgorithm = Literal["auto", "crc64nvme", "crc32c", "none"]
Encryption = Literal["AES256", "aws:kms", "aws:kms:dsse"]
KeyRules = Literal["any", "path"]

#: 32 bytes in Base64 or in hexadecimal.
_KEY = re.compile(r"\s*([A-Za-z0-9+/_-]{43}=|[0-9A-Fa-f]{64})\s*")


def _is_region(region: str | None) -> bool:
    return region is None or re.fullmatch(r"[A-Za-z0-9._-]{1,64}", region) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class S3Options:
    """Options of S3 and of S3-compatible stores: `StoreConfig(s3=S3Options(...))`.

    Raises:
        ConfigError: A value is not allowed; the message names the field and what is allowed.

    Example:
        >>> S3Options(endpoint_url="http://localhost:9000").addressing_style
        'auto'
        >>> S3Options(checksum="md5")
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: checksum='md5': must be auto, crc64nvme, crc32c or none
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
    requester_pays: bool = False
    """The reader pays for requests and traffic; buckets can demand it."""
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

    def __post_init__(self) -> None:
        texts = ("region", "endpoint_url", "profile", "kms_key_id", "storage_class")
        check_kinds(self, "a string, or None", (str, NoneType), *texts)
        # What stands before an @ is a password, which is not to be in a log.
        if "@" in (self.endpoint_url or ""):
            raise ConfigError("endpoint_url: must have no user and password; the AWS SDKs' places are for credentials")
        if any(mark in (self.endpoint_url or "") for mark in "?#"):
            raise ConfigError("endpoint_url: must have no query and no fragment")
        check("region", self.region, "letters, digits, '-', '_' and '.'", ok=_is_region(self.region))
        check_kinds(self, "True or False", (bool,), "anonymous", "requester_pays", "force_sdk")
        # Its type only: a key that is given in place of its file is not to be in a log.
        is_path = isinstance(self.customer_key_file, (str, os.PathLike, NoneType))
        check("customer_key_file", type(self.customer_key_file), "a path, or None", ok=is_path)
        if self.customer_key_file is not None and _KEY.fullmatch(os.fspath(self.customer_key_file)):
            raise ConfigError("customer_key_file: must be the path of a file that has the key, not the key itself")
        check_choices(self, "auto, path or virtual", ("auto", "path", "virtual"), "addressing_style")
        checksums = ("auto", "crc64nvme", "crc32c", "none")
        check_choices(self, "auto, crc64nvme, crc32c or none", checksums, "checksum")
        encryptions = (None, "AES256", "aws:kms", "aws:kms:dsse")
        check_choices(self, "None, AES256, aws:kms or aws:kms:dsse", encryptions, "encryption")
        check_choices(self, "any or path", ("any", "path"), "key_rules")
        check(
            "kms_key_id",
            self.kms_key_id,
            "None unless encryption is aws:kms or aws:kms:dsse",
            ok=self.kms_key_id is None or self.encryption in ("aws:kms", "aws:kms:dsse"),
        )
        if self.customer_key_file is not None and self.encryption is not None:
            raise ConfigError("customer_key_file: must be None where encryption is set")
        check(
            "endpoint_url",
            self.endpoint_url,
            "a URL that begins with http:// or https://",
            ok=self.endpoint_url is None or self.endpoint_url.startswith(("http://", "https://")),
        )
        check(
            "requester_pays",
            self.requester_pays,
            "False where anonymous is True: somebody must be billed",
            ok=not (self.requester_pays and self.anonymous),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of `file://` URLs: `StoreConfig(file=FileOptions(...))`.

    Raises:
        ConfigError: A value is not allowed; the message names the field and what is allowed.

    Example:
        >>> FileOptions(sync=False).sync
        False
    """

    sync: bool = True
    """Whether a write flushes the file and its folder to the disk (fsync) before it returns, so that the object
    survives a power failure. False is faster, for files that can be written again: after a power failure an object may
    be missing or incomplete."""

    def __post_init__(self) -> None:
        check_kinds(self, "True or False", (bool,), "sync")
