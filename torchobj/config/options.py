"""Options of S3 and of files: `S3Options`, `FileOptions`. `StoreConfig` holds the settings that all providers share."""

import dataclasses
import os
import re
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal

from torchobj.config.checks import check, check_auto_or_bool, check_choices, check_kinds
from torchobj.config.credentials import CredentialSource, S3CredentialProvider, StaticCredentials, source_of
from torchobj.config.explicit_fields import ExplicitFields, configuration
from torchobj.config.provider_options import ProviderOptions
from torchobj.exceptions import ConfigError

AddressingStyle = Literal["auto", "path", "virtual"]
ChecksumAlgorithm = Literal["auto", "crc64nvme", "crc32c", "none"]
Encryption = Literal["AES256", "aws:kms", "aws:kms:dsse"]
KeyRules = Literal["any", "path"]

#: Fields that hold credentials.
_KEYS = ("access_key_id", "secret_access_key", "session_token")

#: 32 bytes in Base64 or in hexadecimal.
_KEY = re.compile(r"\s*([A-Za-z0-9+/_-]{43}=|[0-9A-Fa-f]{64})\s*")


def _is_region(region: str | None) -> bool:
    return region is None or re.fullmatch(r"[A-Za-z0-9._-]{1,64}", region) is not None


@configuration
class S3Options(ProviderOptions):
    """Options of S3 and of S3-compatible stores: `StoreConfig(s3=S3Options(...))`. Other URLs are not affected.

    Args:
        region: Region of the bucket. None: `AWS_REGION`, the profile, or detected from the bucket.
        endpoint_url: URL of the store. None: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, the profile, or AWS.
        profile: Profile of the shared configuration files, whose credentials are used and no others. None: those of
            the environment (`AWS_ACCESS_KEY_ID`), or of the profile `AWS_PROFILE` or `default`.
        credential_provider: A callable that returns credentials, in place of the environment and the profile: a dict of
            `access_key_id`, `secret_access_key`, `token` (optional) and `expires_at`, a datetime with a time zone, or
            None. The form is that of obstore: objects of `obstore.auth` work, and a coroutine is awaited, in an event
            loop of its own.

            It is called on a separate thread, at the first request and before each expiry, in every process that sends
            requests. Requests wait for it only without valid credentials. If it raises, takes more than 20 s, or
            returns invalid or expired credentials, requests that need them raise a `CredentialsError` with the type and
            message of the exception, and the next request calls it again. Its return value does not appear in pickles,
            logs, messages or reprs. For DataLoader workers that are started with spawn, the callable itself is pickled.
            Equal callables share credentials and connections; an unhashable callable equals only itself.
        access_key_id: Access key, in place of the environment and the profile. Prefer a profile, or a
            `credential_provider` for keys that expire. The keys are not part of the repr, and a configuration file
            cannot contain them. A pickle contains them only while multiprocessing starts a process, such as a worker of
            a DataLoader; any other pickle raises a `ConfigError`.
        secret_access_key: The secret of `access_key_id`.
        session_token: Token of temporary keys. They are not renewed.
        anonymous: Whether requests are sent without a signature, for public buckets.
        addressing_style: Position of the bucket: in the `path`, or in the host name (`virtual`). `auto`: in the host
            name on AWS, in the path for a custom endpoint.
        requester_pays: Whether the reader pays for requests and traffic, which buckets can require.
        encryption: Encryption of written objects: SSE-S3, SSE-KMS, or dual-layer KMS. None: the default of the bucket.
        kms_key_id: Key of SSE-KMS. None: the default key of the account.
        customer_key_file: File that contains the 32-byte key of SSE-C, raw or in Base64. Each process reads the file;
            the key is not pickled or logged. The field is not part of the repr, in case a key is passed instead of a
            path.
        storage_class: Storage class of written objects, such as `STANDARD_IA`.
        checksum: Checksum that is sent with uploads. `auto`: CRC64NVME for AWS, CRC32C for a custom endpoint, and CRC32
            for checkpoints, which contain it anyway. `none` for stores that reject the headers.
        key_rules: `path` for servers that store objects as files and treat `a//b` as `a/b`: such keys are then refused.
        conditional_writes: Whether the store compares versions before it writes (If-Match, If-None-Match). `auto`:
            unless the endpoint is `storage.googleapis.com`, which ignores these headers. If False, conditional writes
            raise `UnsupportedError`, and checkpoint managers compare versions before they write instead.
        force_sdk: Whether all requests go through the AWS SDK instead of torchobj's own connections; slower, for
            comparison.

    Raises:
        ConfigError: A value is not allowed; the message names the field and the allowed values.

    Example:
        >>> S3Options(endpoint_url="http://localhost:9000").addressing_style
        'auto'
        >>> S3Options(endpoint="http://localhost:9000")
        Traceback (most recent call last):
        TypeError: S3Options has no field 'endpoint'; did you mean endpoint_url?
        >>> S3Options(checksum="md5")
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: checksum='md5': must be auto, crc64nvme, crc32c or none
    """

    region: str | None = None
    endpoint_url: str | None = None
    profile: str | None = None
    credential_provider: S3CredentialProvider | None = dataclasses.field(default=None, repr=False, hash=False)
    access_key_id: str | None = dataclasses.field(default=None, repr=False, hash=False)
    secret_access_key: str | None = dataclasses.field(default=None, repr=False, hash=False)
    session_token: str | None = dataclasses.field(default=None, repr=False, hash=False)
    anonymous: bool = False
    addressing_style: AddressingStyle = "auto"
    requester_pays: bool = False
    encryption: Encryption | None = None
    kms_key_id: str | None = None
    customer_key_file: str | Path | None = dataclasses.field(default=None, repr=False)
    storage_class: str | None = None
    checksum: ChecksumAlgorithm = "auto"
    key_rules: KeyRules = "any"
    conditional_writes: bool | Literal["auto"] = "auto"
    force_sdk: bool = False

    _credential_hint: ClassVar[str] = "store credentials where the AWS SDKs look for them"
    _excludes_provider: ClassVar[tuple[str, ...]] = ("profile", "anonymous")

    def __post_init__(self) -> None:
        texts = ("region", "endpoint_url", "profile", "kms_key_id", "storage_class")
        check_kinds(self, "a string, or None", (str, NoneType), *texts)
        self._check_endpoint()
        check("region", self.region, "letters, digits, '-', '_' and '.'", ok=_is_region(self.region))
        check_kinds(self, "True or False", (bool,), "anonymous", "requester_pays", "force_sdk")
        # Only the type is shown: a key that is passed instead of a path must not be logged.
        is_path = isinstance(self.customer_key_file, (str, os.PathLike, NoneType))
        check("customer_key_file", type(self.customer_key_file), "a path, or None", ok=is_path)
        if self.customer_key_file is not None and _KEY.fullmatch(os.fspath(self.customer_key_file)):
            raise ConfigError("customer_key_file: must be the path of a file that contains the key, not the key itself")
        self._check_keys()
        self._check_credential_provider()
        check_choices(self, "auto, path or virtual", ("auto", "path", "virtual"), "addressing_style")
        checksums = ("auto", "crc64nvme", "crc32c", "none")
        check_choices(self, "auto, crc64nvme, crc32c or none", checksums, "checksum")
        encryptions = (None, "AES256", "aws:kms", "aws:kms:dsse")
        check_choices(self, "None, AES256, aws:kms or aws:kms:dsse", encryptions, "encryption")
        check_choices(self, "any or path", ("any", "path"), "key_rules")
        check_auto_or_bool(self, "conditional_writes")
        check(
            "kms_key_id",
            self.kms_key_id,
            "None unless encryption is aws:kms or aws:kms:dsse",
            ok=self.kms_key_id is None or self.encryption in ("aws:kms", "aws:kms:dsse"),
        )
        if self.customer_key_file is not None and self.encryption is not None:
            raise ConfigError("customer_key_file: must be None if encryption is set")
        check(
            "requester_pays",
            self.requester_pays,
            "False if anonymous is True, because an anonymous request cannot be billed",
            ok=not (self.requester_pays and self.anonymous),
        )

    def _check_keys(self) -> None:
        # Only the types are shown.
        for name in _KEYS:
            value = getattr(self, name)
            check(name, type(value), "a string, or None", ok=isinstance(value, (str, NoneType)))
            if value is not None and not (value.isascii() and value.isprintable() and value and " " not in value):
                raise ConfigError(
                    f"{name}: must not be empty, and must be printable ASCII without spaces (is a newline at its end?)"
                )
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError("access_key_id and secret_access_key: must be given together")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError("session_token: must be None unless access_key_id and secret_access_key are set")
        for name in ("profile", "anonymous", "credential_provider") if self.access_key_id is not None else ():
            if getattr(self, name):
                raise ConfigError(f"access_key_id: must be None if {name} is set")

    @property
    def _credential_source(self) -> CredentialSource | None:
        if self.access_key_id is None or self.secret_access_key is None:
            return super()._credential_source
        return source_of(StaticCredentials(self.access_key_id, self.secret_access_key, self.session_token))

    def __getstate__(self) -> dict[str, Any]:
        if self.secret_access_key is not None and get_spawning_popen() is None:
            raise ConfigError(
                "secret_access_key: keys are pickled only while multiprocessing starts a process; pass a "
                "credential_provider, which each process calls, or a profile"
            )
        return super().__getstate__()


@configuration
class FileOptions(ExplicitFields):
    """Options of `file://` URLs: `StoreConfig(file=FileOptions(...))`. Other URLs are not affected.

    Args:
        sync: Whether a write flushes the file and its folder to the disk (fsync) before it returns, so that the object
            survives a power failure. False is faster, for files that can be written again: after a power failure an
            object may be missing or incomplete.

    Raises:
        ConfigError: A value is not allowed; the message names the field and the allowed values.

    Example:
        >>> FileOptions(sync=False).sync
        False
    """

    sync: bool = True

    def __post_init__(self) -> None:
        check_kinds(self, "True or False", (bool,), "sync")
