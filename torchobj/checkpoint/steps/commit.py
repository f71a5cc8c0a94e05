"""The JSON format of commit objects. Parses strictly, because anyone with access to the bucket may write one.

The objects that a commit object names are deleted with its step. So each key is checked when it is parsed: it must be a
canonical path below the folder of its own attempt. Reads and deletes nothing.
"""

import dataclasses
import json
import math
import operator
import re
import reprlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, cast, get_args

from torchobj.checkpoint.checkpoint_dir import is_canonical
from torchobj.checkpoint.leftovers import Attempt
from torchobj.exceptions import ConfigError

__all__ = [
    "DIGITS",
    "STATE_FILE",
    "Commit",
    "Kind",
    "LocalPart",
    "StoredObject",
    "WrittenObject",
    "attempt_of",
    "check_size",
    "checked_step",
    "folder_of",
]

#: Version of the format; other versions are refused.
_FORMAT = 1
#: Maximum size of a commit object; each object that it names takes about 200 bytes.
_MAX_BYTES = 64 << 20
#: Number of digits of a step in keys, so that keys sort as steps.
DIGITS = 12
#: Name of the only object of a state that is saved as one file.
STATE_FILE = "state.pt"

_MAX_STEP = 10**DIGITS - 1

_NONCE = re.compile("[0-9a-f]{32}")
_SHA256 = re.compile("[0-9a-f]{64}")
_DATA_KEY = re.compile(rf"steps/([0-9]{{{DIGITS}}})-({_NONCE.pattern})/(.+)", re.DOTALL)
#: Infinite metrics, which JSON cannot represent as numbers.
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
#: Maximum length of a key, of S3 and of Google Cloud Storage: a longer one could never be deleted.
_MAX_KEY_BYTES = 1024
#: Sizes have 63 bits.
_MAX_SIZE = (1 << 63) - 1

Kind = Literal["state", "dcp", "folder"]


def checked_step(step: Any) -> int:
    """Returns the step as an int.

    Raises:
        ConfigError: It is not a whole number of 0..999,999,999,999.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_STEP:
        raise ConfigError(f"step={step!r}: must be a whole number of 0..{_MAX_STEP}")
    return number


def folder_of(attempt: Attempt[int]) -> str:
    """Returns the prefix of the keys of an attempt's data, with the slash, below the manager's URL."""
    return f"steps/{attempt.checkpoint:0{DIGITS}}-{attempt.nonce}/"


def attempt_of(key: str) -> Attempt[int] | None:
    """Returns the attempt that owns a key; None unless it is a canonical path below the folder of an attempt."""
    found = _DATA_KEY.fullmatch(key)
    return Attempt(int(found[1]), found[2]) if found is not None and is_canonical(found[3]) else None


class WrittenObject(NamedTuple):
    """What is known of an object that a save wrote, and that its commit will name."""

    size: int | None = None
    """Size in bytes, which is compared with the listing; None if it is not known."""
    crc32: int | None = None
    """CRC-32 of its bytes, if known."""
    sha256: str | None = None
    """SHA-256 of its bytes, if known."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a checkpoint."""

    key: str
    """Key below the manager's URL."""
    size: int
    """Size in bytes."""
    etag: str | None = None
    """The store's version of it."""
    crc32: int | None = None
    """CRC-32 of its bytes, if known."""
    sha256: str | None = None
    """SHA-256 of its bytes in hexadecimal digits, if known. Only files of folders have one."""


@dataclasses.dataclass(frozen=True, slots=True)
class LocalPart:
    """What the commit of a copy on a local disk has in addition: which part of the step it is, and what it follows."""

    continues: tuple[str | None, ...]
    """Nonces of the attempts that the run has saved or restored since the newest one in the bucket, which is one of
    them; None: there was none in the bucket. Empty when the step is in the bucket itself."""
    total: int
    """Number of objects of the step, of which this copy may have some."""


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """The content of a commit object."""

    attempt: Attempt[int]
    kind: Kind
    """`state`: one file of `torch.save`. `dcp`: a folder of `torch.distributed.checkpoint`. `folder`: the files of
    a folder."""
    objects: tuple[StoredObject, ...]
    metrics: Mapping[str, float]
    time: datetime
    """Time of the commit, by the writer's clock."""
    local: LocalPart | None = None
    """None in the bucket."""
    version: str | None = dataclasses.field(default=None, compare=False)
    """The store's version of the commit object, which is not in it."""

    @property
    def step(self) -> int:
        """The step."""
        return self.attempt.checkpoint

    def to_json(self) -> bytes:
        """Returns the commit object. Infinite metrics are strings and NaN is null, because JSON has no such numbers."""
        metrics = {name: _in_json(value) for name, value in self.metrics.items()}
        fields = {
            "version": _FORMAT,
            "step": self.step,
            "nonce": self.attempt.nonce,
            "kind": self.kind,
            "time": self.time.isoformat(),
            "metrics": metrics,
            "objects": [_fields(item) for item in self.objects],
        }
        if self.local is not None:
            fields["local"] = dataclasses.asdict(self.local)
        return json.dumps(fields, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, step: int, version: str | None = None) -> "Commit":
        """Parses a commit object, which has this version in the store.

        Raises:
            ValueError: It is not a commit object of this step, is too large, has another version, or names an object
                that is not a canonical path below the folder of its own attempt.
        """
        check_size(len(data))
        try:
            fields = json.loads(data)
            if type(fields["version"]) is not int or fields["version"] != _FORMAT:
                raise ValueError(f"version {reprlib.repr(fields['version'])}, this torchobj reads {_FORMAT}")
            attempt = _attempt(fields["step"], fields["nonce"], step)
            if fields["kind"] not in get_args(Kind):
                raise _wrong("kind", fields["kind"])
            if type(fields["objects"]) is not list:
                raise _wrong("list of objects", fields["objects"])
            metrics = {name: _metric(value) for name, value in fields["metrics"].items()}
            objects = tuple(_stored_object(item, attempt) for item in fields["objects"])
            if len({item.key for item in objects}) != len(objects):
                raise ValueError("it names an object twice")
            # A date of the year 1 may have no equivalent in UTC.
            time = datetime.fromisoformat(fields["time"]).astimezone(UTC)
            local = _local_part(fields["local"]) if "local" in fields else None
            return cls(attempt, cast("Kind", fields["kind"]), objects, metrics, time, local, version)
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
            raise ValueError(f"a field is missing, or of another type or size: {reprlib.repr(str(error))}") from None


def check_size(size: int | None) -> None:
    """Checks the size of a commit object.

    Args:
        size: Size in bytes; None if a listing does not contain it.

    Raises:
        ValueError: It is too large.
    """
    if size is not None and size > _MAX_BYTES:
        raise ValueError(f"it has {size} bytes, the maximum is {_MAX_BYTES}")


def _fields(item: StoredObject) -> dict[str, Any]:
    """Returns the fields of an object in JSON. Earlier versions read objects without a SHA-256."""
    fields = {"key": item.key, "size": item.size, "etag": item.etag, "crc32": item.crc32}
    return fields if item.sha256 is None else fields | {"sha256": item.sha256}


def _wrong(name: str, value: Any) -> ValueError:
    return ValueError(f"its {name} is {reprlib.repr(value)}")


def _attempt(step: Any, nonce: Any, expected: int) -> Attempt[int]:
    if type(step) is not int or step != expected:
        raise _wrong("step", step)
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise _wrong("nonce", nonce)
    return Attempt(step, nonce)


def _local_part(fields: Any) -> LocalPart:
    if type(fields) is not dict or fields.keys() != {"continues", "total"} or type(fields["continues"]) is not list:
        raise _wrong("local part", fields)
    for nonce in fields["continues"]:
        if nonce is not None and (not isinstance(nonce, str) or not _NONCE.fullmatch(nonce)):
            raise _wrong("nonce", nonce)
    return LocalPart(tuple(fields["continues"]), _number(fields["total"], _MAX_SIZE))


def _metric(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str):
        return _INFINITIES[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong("metric", value)
    return float(value)


def _stored_object(item: Any, attempt: Attempt[int]) -> StoredObject:
    if not {"key", "size"} <= item.keys() <= {"key", "size", "etag", "crc32", "sha256"}:
        raise _wrong("object", item)
    key, etag = item["key"], item.get("etag")
    # An object of another attempt, or of another tool, would be deleted with this step.
    if attempt_of(key) != attempt:
        raise ValueError(f"it names {reprlib.repr(key)}, which is not below {folder_of(attempt)}")
    if len(key.encode()) > _MAX_KEY_BYTES:
        raise ValueError(f"it names {reprlib.repr(key)}, which is longer than {_MAX_KEY_BYTES} bytes")
    if etag is not None and not isinstance(etag, str):
        raise _wrong("etag", etag)
    crc32, sha256 = item.get("crc32"), item.get("sha256")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise _wrong("sha256", sha256)
    number = None if crc32 is None else _number(crc32, 0xFFFFFFFF)
    return StoredObject(key, _number(item["size"], _MAX_SIZE), etag, number, sha256)


def _number(value: Any, largest: int) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise _wrong("number", value)
    return value


def _in_json(metric: float) -> float | str | None:
    if math.isnan(metric):
        return None
    return str(metric) if math.isinf(metric) else metric
