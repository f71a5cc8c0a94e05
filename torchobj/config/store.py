"""`StoreConfig`: what all providers share, and the options of each."""

import dataclasses
import functools
import os
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torchobj.config.checks import GIB, KIB, MIB, check, check_kinds, check_number
from torchobj.config.options import FileOptions, S3Options
from torchobj.exceptions import ConfigError

_Config = TypeVar("_Config")

#: Options that an earlier `StoreConfig` had itself.
_S3_FIELDS = frozenset(field.name for field in dataclasses.fields(S3Options))


def _new_place(names: list[str]) -> str:
    verb, options = "is" if len(names) == 1 else "are", ", ".join(f"{name}=..." for name in names)
    return f"{', '.join(names)}: {verb} in S3Options: StoreConfig(s3=S3Options({options}))"


def _refuses_s3_fields(cls: type[_Config]) -> type[_Config]:
    """Makes the constructor refuse fields of `S3Options` with a `ConfigError` that names their place."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: _Config, *args: Any, **fields: Any) -> None:
        if misplaced := [name for name in fields if name in _S3_FIELDS]:
            raise ConfigError(_new_place(misplaced))
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_refuses_s3_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How stores are reached, and how they are used. One configuration serves URLs of all schemes.

    Raises:
        ConfigError: A value is not allowed, or the field is one of `S3Options`; the message names the field.

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
    """Options of `s3://` URLs."""
    file: FileOptions = dataclasses.field(default_factory=FileOptions)
    """Options of `file://` URLs."""
    verify_tls: bool = True
    """Whether the certificate of the server is checked."""
    ca_bundle: str | Path | None = None
    """PEM file of the certificates to trust. None: `AWS_CA_BUNDLE`, or the system's."""
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
    """Maximum number of concurrent requests to one provider, of all stores with this configuration in a process.
    `auto`: 64 to begin with, more while that raises the throughput, fewer while the store refuses. A number is fixed.
    1..4096."""
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
        # Types only: what is given in place of options may have a key.
        check("s3", type(self.s3), "an S3Options", ok=isinstance(self.s3, S3Options))
        check("file", type(self.file), "a FileOptions", ok=isinstance(self.file, FileOptions))
        check_kinds(self, "True or False", (bool,), "verify_tls", "hedge")
        is_path = isinstance(self.ca_bundle, (str, os.PathLike, NoneType))
        check("ca_bundle", type(self.ca_bundle), "a path, or None", ok=is_path)
        check_number("part_bytes", self.part_bytes, 5 * MIB, 5 * GIB)
        check_number("whole_below_bytes", self.whole_below_bytes, MIB, 5 * GIB)
        check_number("write_buffer_bytes", self.write_buffer_bytes, 5 * MIB, 64 * GIB)
        if self.upload_mbit_s is not None:
            check_number("upload_mbit_s", self.upload_mbit_s, 1, 1_000_000, " Mbit/s", whole=False)
        if self.max_in_flight != "auto":
            check_number("max_in_flight", self.max_in_flight, 1, 4096)
        check_number("max_in_flight_cap", self.max_in_flight_cap, 1, 4096)
        check_number("max_attempts", self.max_attempts, 1, 1000)
        check_number("min_bytes_per_s", self.min_bytes_per_s, 0, GIB)
        waits = ("retry_timeout_s", "connect_timeout_s", "first_byte_timeout_s", "idle_timeout_s", "commit_timeout_s")
        for name in (*waits, "keep_alive_s"):
            check_number(name, getattr(self, name), 0.01, 86_400, " s", whole=False)

    @property
    def max_in_flight_number(self) -> int:
        """What `max_in_flight` amounts to, or begins with."""
        return min(64, self.max_in_flight_cap) if self.max_in_flight == "auto" else self.max_in_flight

    @property
    def adaptive_cap(self) -> int | None:
        """How many requests at a time it may become; None where the number is fixed."""
        return self.max_in_flight_cap if self.max_in_flight == "auto" else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of another version is checked like the arguments of a call.
        self.__init__(**state)  # type: ignore[misc]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _S3_FIELDS:
                raise AttributeError(_new_place([name]))
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
