"""`StoreConfig`: the settings that all providers share, with the less usual ones, and the options of each."""

import dataclasses
import os
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torchobj.config.checks import GIB, KIB, MIB, check, check_kinds, check_number
from torchobj.config.config_base import ConfigBase, fields_of, nearest
from torchobj.config.options import CacheOptions, FileOptions, GCSOptions, PriceOptions, S3Options
from torchobj.exceptions import ConfigError

#: Limits of a time, in seconds.
_SECONDS = (0.01, 86_400, " s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvancedOptions(ConfigBase):
    """Settings of all providers that few need to change: `StoreConfig(advanced=AdvancedOptions(...))`.

    Args:
        whole_below_bytes: Objects below this size are read and written in one request, if their size is known.
        max_in_flight_cap: Upper limit of `max_in_flight="auto"`, for all ranks of a host together. 1..4096.
        connect_timeout_s: Limit of a TCP connect, and of a TLS handshake.
        commit_timeout_s: Limit of the commit of a multipart upload, including retries. S3 may send white space for
            minutes while it assembles the parts; if a store sends nothing for longer than `first_byte_timeout_s` and
            `idle_timeout_s`, the commit is retried. After an attempt without a response, the store is checked for the
            object until this time has elapsed. If the object is still missing then, the error states that the outcome
            is unknown, and the upload is not aborted, because the store may still be committing it. 0.01..86400 s.
        min_bytes_per_s: Minimum rate of the body of a read, on average over `idle_timeout_s`; a slower read continues
            on another connection. On a network that is too slow for `max_in_flight` requests at this rate, lower one of
            them. 0: no minimum. 0..1 GiB.
        keep_alive_s: Time for which an idle connection is kept. S3 closes idle connections after 5 to 20 s.

    Raises:
        ConfigError: A value is not allowed; the message names the field and the allowed values.

    Example:
        >>> AdvancedOptions(connect_timeout_s=2).commit_timeout_s
        900.0
    """

    whole_below_bytes: int = 16 * MIB
    max_in_flight_cap: int = 512
    connect_timeout_s: float = 5.0
    commit_timeout_s: float = 900.0
    min_bytes_per_s: int = 16 * KIB
    keep_alive_s: float = 8.0

    def __post_init__(self) -> None:
        check_number("whole_below_bytes", self.whole_below_bytes, MIB, 5 * GIB)
        check_number("max_in_flight_cap", self.max_in_flight_cap, 1, 4096)
        check_number("min_bytes_per_s", self.min_bytes_per_s, 0, GIB)
        for name in ("connect_timeout_s", "commit_timeout_s", "keep_alive_s"):
            check_number(name, getattr(self, name), *_SECONDS, whole=False)


#: The options in fields of `StoreConfig`, which are tables of a configuration file.
OPTIONS: dict[str, type[S3Options | GCSOptions | FileOptions | CacheOptions | PriceOptions | AdvancedOptions]] = {
    "s3": S3Options,
    "gcs": GCSOptions,
    "file": FileOptions,
    "cache": CacheOptions,
    "prices": PriceOptions,
    "advanced": AdvancedOptions,
}

#: The holders of options that are not fields of `StoreConfig`, by their names.
_HOLDERS = {
    name: [holder for holder, kind in OPTIONS.items() if name in fields_of(kind)]
    for kind in OPTIONS.values()
    for name in fields_of(kind)
}


def _moved(names: list[str]) -> str:
    """The message about options that are passed to `StoreConfig`: the first one, and those with the same holder."""
    holders = _HOLDERS[names[0]]
    same = [name for name in names if holders[0] in _HOLDERS[name]]
    holders = [holder for holder in holders if all(holder in _HOLDERS[name] for name in same)]
    options = ", ".join(f"{name}=..." for name in same)
    places = [f"StoreConfig({holder}={OPTIONS[holder].__name__}({options}))" for holder in holders]
    if len(holders) > 1:
        return f"{', '.join(same)}: belongs to a provider: {' or '.join(places)}"
    verb = "is" if len(same) == 1 else "are"
    return f"{', '.join(same)}: {verb} in {OPTIONS[holders[0]].__name__}: {places[0]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig(ConfigBase):
    """Configures access to stores: parts, concurrency, retries, timeouts, TLS, and the options of each provider.

    The options of a provider apply to its URLs only, so that one configuration serves URLs of all schemes. Fields that
    are not given are taken from the configuration file (`torchobj.load_config`), or have their defaults.

    Args:
        s3: Options of `s3://` URLs.
        gcs: Options of `gs://` URLs.
        file: Options of `file://` URLs.
        cache: The disk cache, if it has a folder.
        prices: What requests and bytes cost, for reports.
        advanced: Settings of all providers that few need to change.
        verify_tls: Whether to verify the certificate of the server.
        ca_bundle: PEM file of trusted certificates. None: those of the system; for `s3://`, `AWS_CA_BUNDLE`,
            `ca_bundle` of the profile, and `REQUESTS_CA_BUNDLE` first.
        part_bytes: Size of the ranges of a large read, and of the first parts of an upload. AWS recommends 8 or 16 MiB.
            5 MiB..5 GiB.
        write_buffer_bytes: Memory of one writer for parts that are being filled or sent; at least two parts.
        upload_mbit_s: Bandwidth limit of all uploads of an account, in 10^6 bits per second, so that a checkpoint does
            not slow down a loader. The limit applies to whole parts. None: no limit.
        max_in_flight: Maximum number of concurrent requests to one provider, of all stores with this configuration in a
            process. `auto`: starts with 64, increases while that raises the throughput, and decreases while the store
            throttles. The ranks of a host share it: with `LOCAL_WORLD_SIZE=8`, as torchrun sets it, each starts with 8.
            A number is fixed, per process. 1..4096.
        hedge: Whether reads whose response is late are hedged with a second request on another connection: at most one
            in twenty, and none for 10 s after the store throttled.
        verify_checksums: Whether `Store.get`, `get_many` and the prefetcher compare objects that they read whole with
            the CRC in the response, and raise `IntegrityError` if they differ. Google Cloud Storage sends a CRC32C; S3
            sends none, because torchobj does not request it.
        max_attempts: Maximum number of attempts of a request, including the first. Received bytes reset the count.
            While the store throttles (503, 429) or sends `Retry-After`, attempts are not counted, and only
            `retry_timeout_s` ends them. 1: no retries. 1..1000.
        retry_timeout_s: No attempt starts later than this after the first, including attempts of throttled requests.
            For the commit of a multipart upload, `AdvancedOptions.commit_timeout_s` replaces it.
        first_byte_timeout_s: Limit from a request to the head of its response.
        idle_timeout_s: Limit without progress of a transfer. There is no limit on the total time.

    Raises:
        ConfigError: A value is not allowed, or the field belongs to the options of a provider; the message
            names the field.

    Example:
        >>> StoreConfig(s3=S3Options(endpoint_url="http://localhost:9000"), max_in_flight=32).max_in_flight
        32
        >>> StoreConfig(part_bytes=1 << 20)
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: part_bytes=1048576: must be 5 MiB..5 GiB
        >>> StoreConfig(region="eu-west-1")
        Traceback (most recent call last):
        torchobj.exceptions.ConfigError: region: is in S3Options: StoreConfig(s3=S3Options(region=...))
    """

    s3: S3Options = dataclasses.field(default_factory=S3Options)
    gcs: GCSOptions = dataclasses.field(default_factory=GCSOptions)
    file: FileOptions = dataclasses.field(default_factory=FileOptions)
    cache: CacheOptions = dataclasses.field(default_factory=CacheOptions)
    prices: PriceOptions = dataclasses.field(default_factory=PriceOptions)
    advanced: AdvancedOptions = dataclasses.field(default_factory=AdvancedOptions)
    verify_tls: bool = True
    ca_bundle: str | Path | None = None
    part_bytes: int = 8 * MIB
    write_buffer_bytes: int = 64 * MIB
    upload_mbit_s: float | None = None
    max_in_flight: int | Literal["auto"] = "auto"
    hedge: bool = True
    verify_checksums: bool = False
    max_attempts: int = 10
    retry_timeout_s: float = 180.0
    first_byte_timeout_s: float = 30.0
    idle_timeout_s: float = 20.0

    @classmethod
    def _refuse(cls, names: list[str]) -> NoReturn:
        if misplaced := [name for name in names if name in _HOLDERS]:
            raise ConfigError(_moved(misplaced))
        raise TypeError(f"StoreConfig has no field {names[0]!r}{nearest(names[0], fields_of(cls), _HOLDERS)}")

    def __post_init__(self) -> None:
        # Only the types are shown, because a value in the wrong field may be a secret.
        for name, kind in OPTIONS.items():
            value, article = getattr(self, name), "a" if name in ("gcs", "file", "cache", "prices") else "an"
            check(name, type(value), f"{article} {kind.__name__}", ok=isinstance(value, kind))
        check_kinds(self, "True or False", (bool,), "verify_tls", "hedge", "verify_checksums")
        is_path = isinstance(self.ca_bundle, (str, os.PathLike, NoneType))
        check("ca_bundle", type(self.ca_bundle), "a path, or None", ok=is_path)
        check_number("part_bytes", self.part_bytes, 5 * MIB, 5 * GIB)
        check_number("write_buffer_bytes", self.write_buffer_bytes, 5 * MIB, 64 * GIB)
        if self.upload_mbit_s is not None:
            check_number("upload_mbit_s", self.upload_mbit_s, 1, 1_000_000, " Mbit/s", whole=False)
        if self.max_in_flight != "auto":
            check_number("max_in_flight", self.max_in_flight, 1, 4096)
        check_number("max_attempts", self.max_attempts, 1, 1000)
        for name in ("retry_timeout_s", "first_byte_timeout_s", "idle_timeout_s"):
            check_number(name, getattr(self, name), *_SECONDS, whole=False)

    @property
    def is_resolved(self) -> bool:
        """Whether all fields are set, so that no configuration file applies, also in other processes."""
        holders: list[ConfigBase] = [self, *(getattr(self, name) for name in OPTIONS)]
        return all(len(holder._set) == len(fields_of(type(holder))) for holder in holders)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of another version is checked like the arguments of a call.
        config = type(self)(**{name: value for name, value in state.items() if name != "_set"})
        self.__dict__.update(vars(config) | state)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _HOLDERS:
                raise AttributeError(_moved([name]))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
