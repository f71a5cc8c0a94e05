"""What a commit object says, as JSON. Parses strictly, since anybody with access to the bucket may have written it.

A commit object names the objects that are deleted with its step. So every key is checked here, where it is parsed: it
must be a canonical path below the folder of its own attempt. Reads and deletes nothing.
"""

import dataclasses
import json
import math
import operator
import re
import reprlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, cast

from torchobj.checkpoint.keys import is_canonical
from torchobj.exceptions import ConfigError

__all__ = ["DIGITS", "Attempt", "Commit", "Kind", "StoredObject", "check_size", "checked_step"]

#: Of the commit object; a reader refuses what it does not know.
_FORMAT = 1
#: A larger commit object is not read; each object that a commit names takes about 200 bytes.
_LARGEST_BYTES = 64 << 20
#: A step is written with this many digits: keys then sort as steps do.
DIGITS = 12

_LARGEST_STEP = 10**DIGITS - 1

_NONCE = re.compile("[0-9a-f]{32}")
_DATA_KEY = re.compile(rf"steps/([0-9]{{{DIGITS}}})-({_NONCE.pattern})/(.+)", re.DOTALL)
#: Infinite metrics, for which JSON has no number.
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
#: Sizes are numbers of 63 bits.
_LARGEST_SIZE = (1 << 63) - 1

Kind = Literal["state", "dcp"]


def checked_step(step: Any) -> int:
    """The step as a number.

    Raises:
        ConfigError: It is none of 0..999,999,999,999.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= _LARGEST_STEP:
        raise ConfigError(f"step={step!r}: must be a whole number of 0..{_LARGEST_STEP}")
    return number


class Attempt(NamedTuple):
    """One attempt to save a step."""

    step: int
    nonce: str

    @classmethod
    def new(cls, step: int) -> "Attempt":
        """An attempt with a nonce that no other has."""
        return cls(step, secrets.token_hex(16))

    @property
    def folder(self) -> str:
        """Key of its data, with the slash, below the manager's URL."""
        return f"steps/{self.step:0{DIGITS}}-{self.nonce}/"

    @classmethod
    def of_key(cls, key: str) -> "Attempt | None":
        """The attempt that owns this key; None where it is not a canonical path below the folder of an attempt."""
        found = _DATA_KEY.fullmatch(key)
        return cls(int(found[1]), found[2]) if found is not None and is_canonical(found[3]) else None


@dataclasses.dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a checkpoint."""

    key: str
    """Below the manager's URL."""
    size: int
    """Size in bytes."""
    etag: str | None = None
    """Its version, as the store calls it."""
    crc32: int | None = None
    """CRC-32 of its bytes, where it is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What a commit object says."""

    attempt: Attempt
    kind: Kind
    """`state`: one file of `torch.save`. `dcp`: a folder of `torch.distributed.checkpoint`."""
    objects: tuple[StoredObject, ...]
    metrics: Mapping[str, float]
    time: datetime
    """When it was committed, by the writer's clock."""

    @property
    def step(self) -> int:
        """The step."""
        return self.attempt.step

    def to_json(self) -> bytes:
        """The commit object. JSON has no word for some numbers: infinite metrics are strings, NaN is null."""
        metrics = {name: _in_json(value) for name, value in self.metrics.items()}
        fields = {
            "version": _FORMAT,
            "step": self.step,
            "nonce": self.attempt.nonce,
            "kind": self.kind,
            "time": self.time.isoformat(),
            "metrics": metrics,
            "objects": [dataclasses.asdict(item) for item in self.objects],
        }
        return json.dumps(fields, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, step: int) -> "Commit":
        """Parses a commit object.

        Raises:
            ValueError: It is not a commit object of this step, is too large, is of a later version, or names an object
                that is not a canonical path below the folder of its own attempt.
        """
        check_size(len(data))
        try:
            fields = json.loads(data)
            if type(fields["version"]) is not int or fields["version"] != _FORMAT:
                raise ValueError(f"version {reprlib.repr(fields['version'])}, this torchobj knows {_FORMAT}")
            attempt = _attempt(fields["step"], fields["nonce"], step)
            if fields["kind"] not in ("state", "dcp"):
                raise _wrong("kind", fields["kind"])
            metrics = {name: _metric(value) for name, value in fields["metrics"].items()}
            objects = tuple(_stored_object(item, attempt) for item in _list(fields["objects"]))
            if len({item.key for item in objects}) != len(objects):
                raise ValueError("it names an object twice")
            # A date of the year 1 may have no time in UTC.
            time = datetime.fromisoformat(fields["time"]).astimezone(UTC)
            return cls(attempt, cast("Kind", fields["kind"]), objects, metrics, time)
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
            raise ValueError(f"a field is missing, or of another type or size: {reprlib.repr(str(error))}") from None


def check_size(size: int | None) -> None:
    """Raises where an object is too large for a commit object.

    Args:
        size: Of the object, in bytes; None where a listing does not give it.

    Raises:
        ValueError: It is too large.
    """
    if size is not None and size > _LARGEST_BYTES:
        raise ValueError(f"it has {size} bytes, and at most {_LARGEST_BYTES} are read")


def _wrong(name: str, value: Any) -> ValueError:
    return ValueError(f"its {name} is {reprlib.repr(value)}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} in the place of a list")
    return value


def _attempt(step: Any, nonce: Any, expected: int) -> Attempt:
    if type(step) is not int or step != expected:
        raise _wrong("step", step)
    if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        raise _wrong("nonce", nonce)
    return Attempt(step, nonce)


def _metric(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str):
        return _INFINITIES[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong("metric", value)
    return float(value)


def _stored_object(item: Any, attempt: Attempt) -> StoredObject:
    if not {"key", "size"} <= item.keys() <= {"key", "size", "etag", "crc32"}:
        raise _wrong("object", item)
    key, etag = item["key"], item.get("etag")
    # What is not of the attempt is another checkpoint's, or no checkpoint's, and would be deleted with this one.
    if Attempt.of_key(key) != attempt:
        raise ValueError(f"it names {reprlib.repr(key)}, which is not below {attempt.folder}")
    if etag is not None and not isinstance(etag, str):
        raise _wrong("etag", etag)
    crc32 = item.get("crc32")
    return StoredObject(
        key, _number(item["size"], _LARGEST_SIZE), etag, None if crc32 is None else _number(crc32, 0xFFFFFFFF)
    )


def _number(value: Any, largest: int) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise _wrong("number", value)
    return value


def _in_json(metric: float) -> float | str | None:
    if math.isnan(metric):
        return None
    return str(metric) if math.isinf(metric) else metric
