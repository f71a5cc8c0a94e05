"""Options of the providers, `S3Options`, `GCSOptions` and `FileOptions`, of the disk cache, `CacheOptions`, and the
prices of requests, `PriceOptions`.

`StoreConfig` has what the providers share.
"""

import dataclasses
import os
import re
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torchobj.config.checks import GIB, MIB, check, check_auto_or_bool, check_choices, check_kinds, check_number
from torchobj.config.config_base import ConfigBase
from torchobj.config.credentials import (
    CredentialSource,
    GCSCredentialProvider,
    S3CredentialProvider,
    StaticCredentials,
    check_picklable,
    source_of,
)
from torchobj.exceptions import ConfigError

AddressingStyle = Literal["auto", "path", "virtual"]
ChecksumAlgorithm = Literal["auto", "crc64nvme", "crc32c", "none"]
Encryption = Literal["AES256", "aws:kms", "aws:kms:dsse"]
KeyRules = Literal["any", "path"]

#: Fields that hold credentials.
_KEYS = ("access_key_id", "secret_access_key", "session_token")

#: 32 bytes in Base64 or in hexadecimal.
_KEY = re.compile(r"\s*([A-Za-z0-9+/_-]{43}=|[0-9A-Fa-f]{64})\s*")

_REGION = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROJECT = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_DOMAIN = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+")
_KMS_KEY = re.compile(r"projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/[^/\s]+")


def _matches(pattern: re.Pattern[str], value: str | None) -> bool:
    return value is None or pattern.fullmatch(value) is not None


class _ProviderOptions(ConfigBase):
    """Base class of a dataclass with the fields `endpoint_url` and `credential_provider`."""

    #: Where credentials belong that are not allowed in a URL.
    _credential_hint: ClassVar[str]
    #: Fields that exclude a `credential_provider`.
    _excludes_provider: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:

        @property
        def endpoint_url(self) -> str | None:
            """A field of each dataclass."""

        @property
        def credential_provider(self) -> Any:
            """A field of each dataclass."""

    @property
    def _credential_source(self) -> CredentialSource | None:
        """Calls `credential_provider`; read by the core."""
        return None if self.credential_provider is None else source_of(self.credential_provider)

    def __getstate__(self) -> dict[str, Any]:
        if self.credential_provider is not None:
            check_picklable(self.credential_provider)
        return self.__dict__

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self

    def _check_endpoint(self) -> None:
        url = self.endpoint_url or ""
        # The part before an @ may be a password, which must not be logged.
        if "@" in url:
            raise ConfigError(f"endpoint_url: must have no user and password; {self._credential_hint}")
        if any(mark in url for mark in "?#"):
            raise ConfigError("endpoint_url: must have no query or fragment")
        check(
            "endpoint_url",
            self.endpoint_url,
            "a URL that begins with http:// or https://",
            ok=self.endpoint_url is None or url.startswith(("http://", "https://")),
        )

    def _check_credential_provider(self) -> None:
        # Only the type is shown: its repr may contain credentials.
        provider = self.credential_provider
        is_callable = provider is None or callable(provider)
        check("credential_provider", type(provider), "a callable, or None", ok=is_callable)
        for name in self._excludes_provider if provider is not None else ():
            if getattr(self, name):
                raise ConfigError(f"credential_provider: must be None if {name} is set")


@dataclasses.dataclass(frozen=True, kw_only=True)
class S3Options(_ProviderOptions):
    """Options of S3 and of S3-compatible stores: `StoreConfig(s3=S3Options(...))`. Other URLs are not affected.

    Args:
        region: Region of the bucket. None: `AWS_REGION`, the profile, or detected from the bucket.
        endpoint_url: URL of the store. None: `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, the profile, or AWS.
        profile: Profile of the shared configuration files. Keys and web identities of the environment are not used.
            None: the keys of the environment (`AWS_ACCESS_KEY_ID`), or the profile that `AWS_DEFAULT_PROFILE` or
            `AWS_PROFILE` names, or `default`. Credentials are those that boto3 would use.
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
        check("region", self.region, "letters, digits, '-', '_' and '.'", ok=_matches(_REGION, self.region))
        check_kinds(self, "True or False", (bool,), "anonymous", "requester_pays", "force_sdk")
        # Only the type is shown: a key that is passed instead of a path must not be logged.
        is_path = isinstance(self.customer_key_file, (str, os.PathLike, NoneType))
        check("customer_key_file", type(self.customer_key_file), "a path, or None", ok=is_path)
        if self.customer_key_file is not None and _KEY.fullmatch(os.fspath(self.customer_key_file)):
            raise ConfigError("customer_key_file: must be the path of a file that contains the key, not the key itself")
        self._check_keys()
        self._check_credential_provider()
        check_choices(self, addressing_style=AddressingStyle, checksum=ChecksumAlgorithm, key_rules=KeyRules)
        check_choices(self, encryption=Literal[None, Encryption])  # noqa: PYI061  flattens to its values
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GCSOptions(_ProviderOptions):
    """Options of Google Cloud Storage: `StoreConfig(gcs=GCSOptions(...))`. They apply to `gs://` URLs only, also if
    these are written as `gcs://`.

    Args:
        endpoint_url: URL of the store. None: `STORAGE_EMULATOR_HOST`, an emulator, to which requests are sent without a
            token; or `https://storage.<universe_domain>`.
        user_project: Project that is billed for requests and traffic, which requester-pays buckets require. It is sent
            with every request. None: the quota project of the credentials, if they have one; otherwise that of the
            bucket.
        universe_domain: Domain of a cloud other than Google's public one. None: `googleapis.com`.
        anonymous: Whether requests are sent without a token, for public buckets and emulators.
        credential_provider: A callable that returns credentials, in place of Application Default Credentials: a dict of
            `token`, an OAuth 2.0 access token, and `expires_at`, a datetime with a time zone, or None. The form is that
            of obstore: objects of `obstore.auth.google` work, and a coroutine is awaited, in an event loop of its own.

            It is called on a separate thread, at the first request and before each expiry, in every process that sends
            requests. Requests wait for it only without valid credentials. If it raises, takes more than 20 s, or
            returns invalid or expired credentials, requests that need them raise a `CredentialsError` with the type and
            message of the exception, and the next request calls it again. Its return value does not appear in pickles,
            logs, messages or reprs. For DataLoader workers that are started with spawn, the callable itself is pickled.
            Equal callables share credentials and connections; an unhashable callable equals only itself.

            None: Application Default Credentials: the file that `GOOGLE_APPLICATION_CREDENTIALS` names, the credentials
            of `gcloud auth application-default login`, or the service account of the machine.
        storage_class: Storage class of uploaded objects, such as `NEARLINE`; copies are not affected. None: the default
            class of the bucket.
        kms_key_name: Cloud KMS key that encrypts written objects:
            `projects/P/locations/L/keyRings/R/cryptoKeys/K`. None: the default of the bucket.
        parallel_upload: How large objects are written. `auto`: in parts, if the storage class of the object is STANDARD
            (others bill deleted parts for their minimum storage duration), the bucket has no retention policy or
            default hold, and the credentials have the permissions to read its settings and to delete objects; otherwise
            by one resumable upload, which sends parts one after the other. True: always in parts. False: always by a
            resumable upload. Parts are sent in parallel as objects whose names begin with `.torchobj-parts/`, composed,
            and deleted when the upload ends. A bucket with soft delete bills them for its retention duration.
        force_sdk: Whether GET requests and uploads of whole objects or parts go through the crate google-cloud-storage,
            for comparison; slower. It connects by itself: TLS and connection settings, and a path in `endpoint_url`, do
            not apply.

    Raises:
        ConfigError: A value is not allowed; the message names the field and the allowed values.

    Example:
        >>> GCSOptions(endpoint_url="http://localhost:4443", anonymous=True).parallel_upload
        'auto'
        >>> GCSOptions(parallel_upload="never")
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: parallel_upload='never': must be auto, True or False
    """

    endpoint_url: str | None = None
    user_project: str | None = None
    universe_domain: str | None = None
    anonymous: bool = False
    credential_provider: GCSCredentialProvider | None = dataclasses.field(default=None, repr=False, hash=False)
    storage_class: str | None = None
    kms_key_name: str | None = None
    parallel_upload: bool | Literal["auto"] = "auto"
    force_sdk: bool = False

    _credential_hint: ClassVar[str] = "use Application Default Credentials, or pass a credential_provider"
    _excludes_provider: ClassVar[tuple[str, ...]] = ("anonymous",)

    def __post_init__(self) -> None:
        texts = ("endpoint_url", "user_project", "universe_domain", "storage_class", "kms_key_name")
        check_kinds(self, "a string, or None", (str, NoneType), *texts)
        check_kinds(self, "True or False", (bool,), "anonymous", "force_sdk")
        self._check_endpoint()
        self._check_credential_provider()
        project, domain, key = self.user_project, self.universe_domain, self.kms_key_name
        check("user_project", project, "the ID or number of a project", ok=_matches(_PROJECT, project))
        check("universe_domain", domain, "a domain such as googleapis.com", ok=_matches(_DOMAIN, domain))
        form = "projects/P/locations/L/keyRings/R/cryptoKeys/K, or None"
        check("kms_key_name", key, form, ok=_matches(_KMS_KEY, key))
        check_auto_or_bool(self, "parallel_upload")
        check(
            "user_project",
            project,
            "None if anonymous is True, because an anonymous request cannot be billed",
            ok=project is None or not self.anonymous,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions(ConfigBase):
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions(ConfigBase):
    """The disk cache: `StoreConfig(cache=CacheOptions(folder="/nvme/torchobj", max_bytes=...))`.

    Objects and ranges that were read stay in files of a local folder, and later reads of them send no request: the
    second epoch reads from the disk. All processes of a user that name the folder share it. Reads of objects whose size
    and version are known from a listing or a manifest are cached, which are those of datasets; checkpoints are not.
    Objects of `file://` and `memory://`, and those that are encrypted with a key of the customer, never are.

    Objects are admitted until the cache is full, and stay: each sample is used once per epoch, so that an object that
    replaced the oldest would itself be replaced before its next use. Only those that were not read for `ttl_s` make
    room, the oldest first.

    Args:
        folder: A folder of a local disk, which is created for this user only. A relative path and `~` are resolved when
            the options are created, so that all processes use the same folder. None: no cache.
        max_bytes: Maximum size of the files of all objects, of all processes together. A process with a lower maximum
            than what the folder has admits nothing, and evicts only what has expired. 1 MiB..2^50.
        min_free_bytes: Nothing is written that would leave less of the disk free. 0..2^50.
        max_object_bytes: Objects are cached if they are read whole, or in parts of at most this size, and so are
            ranges. 1 MiB..5 GiB.
        ttl_s: Time after which an object that was not read makes room for others. 60..31536000 s.
        admit: False: read what is in the cache, and write nothing. A folder that does not exist when the process first
            uses the store is not created, and is not read if another job creates it later.

    Raises:
        ConfigError: A value is not allowed. The first read raises it if other users may write to the folder, if it
            belongs to another user, if it has files of another program, or if it is on a network file system. A folder
            that cannot be used for another reason, such as a full disk, causes a warning, and reads go to the store.

    Example:
        >>> CacheOptions(folder="/nvme/torchobj", max_bytes=500 << 30).ttl_s
        86400.0
    """

    folder: str | Path | None = None
    max_bytes: int = 100 * GIB
    min_free_bytes: int = 10 * GIB
    max_object_bytes: int = 64 * MIB
    ttl_s: float = 86_400.0
    admit: bool = True

    def __post_init__(self) -> None:
        folder = self.folder
        is_path = folder is None or (isinstance(folder, (str, os.PathLike)) and os.fspath(folder) != "")
        check("folder", folder if isinstance(folder, str) else type(folder), "a path, or None", ok=is_path)
        if folder is not None:
            # A Path has one slash.
            is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fsdecode(folder))
            is_local = not is_url and "\0" not in os.fsdecode(folder)
            check("folder", os.fsdecode(folder), "a path of a local disk, such as '/nvme/torchobj'", ok=is_local)
            # A worker may have another working directory.
            try:
                object.__setattr__(self, "folder", Path(os.fsdecode(folder)).expanduser().absolute())
            except RuntimeError as error:
                raise ConfigError(f"folder={os.fsdecode(folder)!r}: {error}") from None
        check_number("max_bytes", self.max_bytes, MIB, 1 << 50)
        check_number("min_free_bytes", self.min_free_bytes, 0, 1 << 50)
        check_number("max_object_bytes", self.max_object_bytes, MIB, 5 * GIB)
        check_number("ttl_s", self.ttl_s, 60, 31_536_000, " s", whole=False)
        check_kinds(self, "True or False", (bool,), "admit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriceOptions(ConfigBase):
    """What the provider bills: `StoreConfig(prices=PriceOptions(get_per_1000=0.0004, list_per_1000=0.005))`.

    `DataLoader.report()` and `torchobj bench --estimate` multiply numbers of requests and bytes by these prices, and
    name no dollars if all are 0. Prices are never fetched: copy those of your region, storage class and contract.

    Args:
        get_per_1000: Dollars per 1,000 requests that read an object or its attributes. S3: GET, SELECT and all other
            requests; Google Cloud Storage: class B. 0..1000.
        list_per_1000: Dollars per 1,000 requests that list. S3: PUT, COPY, POST, LIST; Google Cloud Storage: class A.
            0..1000.
        put_per_1000: Dollars per 1,000 requests that write, copy or compose an object, or a part of an upload; the
            same classes as `list_per_1000`. 0..1000.
        egress_per_gib: Dollars per GiB that is received. 0 within a region. 0..1000.

    Raises:
        ConfigError: A price is not a number in these limits.

    Example:
        >>> PriceOptions(get_per_1000=0.0004).egress_per_gib
        0.0
        >>> PriceOptions(get_per_1000=-1)
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: get_per_1000=-1: must be 0..1000 dollars
    """

    get_per_1000: float = 0.0
    list_per_1000: float = 0.0
    put_per_1000: float = 0.0
    egress_per_gib: float = 0.0

    def __post_init__(self) -> None:
        for name in ("get_per_1000", "list_per_1000", "put_per_1000", "egress_per_gib"):
            check_number(name, getattr(self, name), 0, 1000, " dollars", whole=False)

    @property
    def are_given(self) -> bool:
        """Whether any price is not 0."""
        return self != PriceOptions()
