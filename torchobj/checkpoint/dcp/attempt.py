"""Attempt records: by them the files of a distributed save that failed or was killed are found, and only those.

Before a rank writes files, it puts a record, `_torchobj_attempt_<token>.json`, into the checkpoint's folder. The token
is random and part of the name of every file that the rank writes in this save; the record holds how these names begin.
When the checkpoint is committed the coordinator deletes the records. A save that was killed leaves its records:
`sweeping` deletes what they name.

Two rules protect a save that is still running. A rank renews its record while it writes, and only a record that was not
renewed for long, by the store's clock, has expired. And a sweep marks a record before it deletes anything, while the
coordinator looks at the records before it commits: a save whose record was swept fails, instead of committing files
that are gone.
"""

import json
import logging
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

from torchobj.checkpoint.dcp.place import Place
from torchobj.checkpoint.keys import is_canonical
from torchobj.checkpoint.refusal import was_refused
from torchobj.exceptions import CheckpointError, ConfigError, StoreError

__all__ = ["RECORDS", "Record", "discard", "is_running", "record_of_file", "records_of_files", "running"]

logger = logging.getLogger("torchobj")

#: How the names of all records begin.
RECORDS = "_torchobj_attempt_"

#: The number of this form. A reader refuses a larger one.
_FORMAT = 1

_BEGINNING = re.compile(r".*[0-9a-f]{12}_", re.DOTALL)
_NUMBERED = re.compile(rf"[0-9]{{1,9}}{re.escape(DEFAULT_SUFFIX)}")

#: Keys of S3 are not longer.
_LONGEST_BYTES = 1024

#: How often a record is renewed. It expires after a day, unless a sweep is told otherwise.
_RENEWED_AFTER_S = 3600.0

#: Tokens of the saves that this process is writing.
_running: set[str] = set()


class Record(NamedTuple):
    """The files of one rank in one save."""

    beginning: str
    """How their names begin, relative to the checkpoint's folder: prefix, token and `_`. A number follows."""
    is_swept: bool = False
    """Whether a sweep has begun to delete them."""

    @classmethod
    def new(cls, prefix: str) -> "Record":
        """A record with a token that no other has.

        Raises:
            ConfigError: The prefix leads out of the checkpoint's folder, or has an empty component.
        """
        record = cls(f"{prefix}{secrets.token_hex(6)}_")
        if not is_canonical(record.file(0)):
            message = "must be components between single slashes, without '.', '..', backslashes and null characters"
            raise ConfigError(f"prefix_strategy: the prefix {prefix!r}: {message}")
        return record

    @property
    def token(self) -> str:
        """The token in the names."""
        return self.beginning[-13:-1]

    @property
    def name(self) -> str:
        """The record's own name, relative to the checkpoint's folder."""
        return f"{RECORDS}{self.token}.json"

    def file(self, number: int) -> str:
        """The name of a file."""
        return f"{self.beginning}{number}{DEFAULT_SUFFIX}"

    def owns(self, name: str) -> bool:
        """Whether a file has such a name."""
        return name.startswith(self.beginning) and _NUMBERED.fullmatch(name, len(self.beginning)) is not None

    def dump(self) -> bytes:
        """As JSON. A swept record is longer."""
        fields = {"format": _FORMAT, "files": self.beginning} | ({"swept": True} if self.is_swept else {})
        return json.dumps(fields).encode()

    @classmethod
    def load(cls, data: bytes, name: str, url: str) -> "Record":
        """From JSON, which anybody may have written.

        Args:
            data: The record's bytes.
            name: The record's name, relative to the checkpoint's folder.
            url: Where it was read, for errors.

        Raises:
            CheckpointError: It is not a record, is of a newer form, or names what no save of torchobj writes below
                the checkpoint's folder; the message names `url`.
        """
        try:
            fields = json.loads(data)
            record = cls(fields["files"], fields.get("swept", False) is True)
            is_short = len(record.beginning.encode()) <= _LONGEST_BYTES
            is_sound = is_short and record_of_file(record.file(0)) == cls(record.beginning)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{url}: is not a record of a save: {error}") from error
        if fields.get("format") != _FORMAT or not is_sound or record.name != name:
            raise CheckpointError(f"{url}: is not a record of a save: it holds {str(fields)[:200]}")
        return record


def record_of_file(name: str) -> Record | None:
    """The record of a file, by the file's name; None where no save of torchobj gives such a name."""
    beginning = name[: name.rfind("_") + 1]
    if _BEGINNING.fullmatch(beginning) is None or not is_canonical(name):
        return None
    record = Record(beginning)
    return record if record.owns(name) else None


def records_of_files(names: Iterable[str]) -> list[Record]:
    """The records of files, each once."""
    return sorted({record for record in map(record_of_file, names) if record is not None})


def discard(place: Place, names: Iterable[str], errors: Iterable[BaseException]) -> None:
    """Deletes the files of a save that failed, and their records. What cannot be deleted is logged.

    Args:
        place: The checkpoint's.
        names: The files.
        errors: What the save failed with. Where one of them leaves it open whether a file is still being stored, the
            records stay, for a sweep.
    """
    names = list(names)
    try:
        place.delete(names)
        if all(map(_is_final, errors)):
            place.delete(record.name for record in records_of_files(names))
    except StoreError as error:
        logger.warning("%s: files of a save that failed are left there, for sweep() to delete: %s", place.url, error)


def _is_final(error: BaseException) -> bool:
    """Whether no request can be carried out later: the store refused it, and no wait was interrupted."""
    return was_refused(error) if isinstance(error, StoreError) else isinstance(error, Exception)


def is_running(name: str) -> bool:
    """Whether this process is writing the files of the record of this name."""
    return name.removeprefix(RECORDS).removesuffix(".json") in _running


@contextmanager
def running(place: Place, record: Record) -> Iterator[None]:
    """Puts the record, and renews it while the block runs.

    Raises:
        StoreError: The record could not be put.
    """
    _running.add(record.token)
    ended = threading.Event()
    try:
        place.put(record.name, record.dump())
        renewal = threading.Thread(target=_renew, args=(place, record, ended), name="torchobj-record", daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            # A record that is put after the coordinator has deleted it would stay.
            renewal.join()
    finally:
        _running.discard(record.token)


def _renew(place: Place, record: Record, ended: threading.Event) -> None:
    while not ended.wait(_RENEWED_AFTER_S):
        try:
            # A record that is gone, or was swept, is not written again: the save must fail.
            info = place.head(record.name)
            if info is None or place.find(record.name) != record.dump():
                return
            place.put(record.name, record.dump(), if_match=info.version)
        except StoreError as error:
            logger.info("%s: is renewed later: %s", place.url_of(record.name), error)
