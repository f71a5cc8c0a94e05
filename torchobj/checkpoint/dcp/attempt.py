"""Attempt records, which identify the files of a distributed save that failed or was killed.

Before a rank writes files, it writes a record, `_torchobj_attempt_<token>.json`, to the checkpoint's folder. The token
is random and part of the name of each file that the rank writes in this save. The record contains the start of these
names. After the commit, the coordinator deletes the records. The records of a save that is killed remain, and
`sweeping` deletes the files that they identify.

Two rules protect a running save. First, a rank renews its record while it writes, and a record expires only if it was
not renewed for long, by the store's clock. Second, a sweep marks a record before it deletes files, and the coordinator
checks the records before it commits. So a save whose record was swept fails, instead of committing deleted files.
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

from torchobj.checkpoint.dcp.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.keys import is_canonical
from torchobj.checkpoint.server import was_refused
from torchobj.exceptions import CheckpointError, ConfigError, StoreError

__all__ = ["RECORDS", "Record", "discard", "is_running", "record_of_file", "records_of_files", "running"]

logger = logging.getLogger("torchobj")

#: Start of the names of all records.
RECORDS = "_torchobj_attempt_"

#: Version of the format. Readers reject a later one.
_FORMAT = 1

_BEGINNING = re.compile(r".*[0-9a-f]{12}_", re.DOTALL)
_NUMBERED = re.compile(rf"[0-9]{{1,9}}{re.escape(DEFAULT_SUFFIX)}")

#: Maximum length of a key of S3 (user guide, "Naming Amazon S3 objects").
_MAX_NAME_BYTES = 1024

#: Interval of renewals. A record expires after a day by default.
_RENEWAL_INTERVAL_S = 3600.0

#: Tokens of the saves that run in this process.
_running: set[str] = set()


class Record(NamedTuple):
    """The files of one rank in one save."""

    beginning: str
    """Start of their names, relative to the checkpoint's folder: prefix, token and `_`. A number follows."""
    is_swept: bool = False
    """Whether a sweep has started to delete them."""

    @classmethod
    def new(cls, prefix: str) -> "Record":
        """Creates a record with a unique token.

        Raises:
            ConfigError: The prefix leaves the checkpoint's folder, or has an empty component.
        """
        record = cls(f"{prefix}{secrets.token_hex(6)}_")
        if not is_canonical(record.file(0)):
            message = "must be components between single slashes, without '.', '..', backslashes and null characters"
            raise ConfigError(f"prefix_strategy: the prefix {prefix!r}: {message}")
        return record

    @property
    def token(self) -> str:
        """Token in the names."""
        return self.beginning[-13:-1]

    @property
    def name(self) -> str:
        """Name of the record, relative to the checkpoint's folder."""
        return f"{RECORDS}{self.token}.json"

    def file(self, number: int) -> str:
        """Returns the name of a file."""
        return f"{self.beginning}{number}{DEFAULT_SUFFIX}"

    def owns(self, name: str) -> bool:
        """Returns whether a file belongs to the record, by its name."""
        return name.startswith(self.beginning) and _NUMBERED.fullmatch(name, len(self.beginning)) is not None

    def dump(self) -> bytes:
        """Returns the record as JSON. A swept record is longer."""
        fields = {"format": _FORMAT, "files": self.beginning} | ({"swept": True} if self.is_swept else {})
        return json.dumps(fields).encode()

    @classmethod
    def load(cls, data: bytes, name: str, url: str) -> "Record":
        """Parses untrusted JSON.

        Args:
            data: Bytes of the record.
            name: Name of the record, relative to the checkpoint's folder.
            url: URL of the record, for errors.

        Raises:
            CheckpointError: It is not a record, has a later format, or names files that no save of torchobj writes
                below the checkpoint's folder; the message names `url`.
        """
        try:
            fields = json.loads(data)
            record = cls(fields["files"], fields.get("swept", False) is True)
            is_short = len(record.beginning.encode()) <= _MAX_NAME_BYTES
            is_sound = is_short and record_of_file(record.file(0)) == cls(record.beginning)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{url}: is not a record of a save: {error}") from error
        if fields.get("format") != _FORMAT or not is_sound or record.name != name:
            raise CheckpointError(f"{url}: is not a record of a save: it holds {str(fields)[:200]}")
        return record


def record_of_file(name: str) -> Record | None:
    """Returns the record of a file, by the file's name; None if no save of torchobj uses such a name."""
    beginning = name[: name.rfind("_") + 1]
    if _BEGINNING.fullmatch(beginning) is None or not is_canonical(name):
        return None
    record = Record(beginning)
    return record if record.owns(name) else None


def records_of_files(names: Iterable[str]) -> list[Record]:
    """Returns the distinct records of files."""
    return sorted({record for record in map(record_of_file, names) if record is not None})


def discard(checkpoint: CheckpointDir, names: Iterable[str], errors: Iterable[BaseException]) -> None:
    """Deletes the files of a save that failed, and their records. A failure is only logged.

    Args:
        checkpoint: Folder of the checkpoint.
        names: Names of the files.
        errors: Errors of the save. If the store may still create a file after one of them, the records remain for a
            sweep.
    """
    names = list(names)
    try:
        checkpoint.delete(names)
        if all(map(_is_final, errors)):
            checkpoint.delete(record.name for record in records_of_files(names))
    except StoreError as error:
        message = "%s: could not delete the files of a failed save; sweep() deletes them later: %s"
        logger.warning(message, checkpoint.url, error)


def _is_final(error: BaseException) -> bool:
    """Returns whether no request can take effect later: the store rejected it, and no wait was interrupted."""
    return was_refused(error) if isinstance(error, StoreError) else isinstance(error, Exception)


def is_running(name: str) -> bool:
    """Returns whether this process is writing the files of the record `name`."""
    return name.removeprefix(RECORDS).removesuffix(".json") in _running


@contextmanager
def running(checkpoint: CheckpointDir, record: Record) -> Iterator[None]:
    """Writes the record, and renews it while the block runs.

    Raises:
        StoreError: The record could not be written.
    """
    _running.add(record.token)
    ended = threading.Event()
    try:
        checkpoint.put(record.name, record.dump())
        renewal = threading.Thread(target=_renew, args=(checkpoint, record, ended), name="torchobj-record", daemon=True)
        renewal.start()
        try:
            yield
        finally:
            ended.set()
            # A record that is written after the coordinator deleted it would remain.
            renewal.join()
    finally:
        _running.discard(record.token)


def _renew(checkpoint: CheckpointDir, record: Record, ended: threading.Event) -> None:
    while not ended.wait(_RENEWAL_INTERVAL_S):
        try:
            # A record that is missing or was swept is not written again: the save must fail.
            info = checkpoint.head(record.name)
            if info is None or checkpoint.find(record.name) != record.dump():
                return
            checkpoint.put(record.name, record.dump(), if_version=info.version)
        except StoreError as error:
            logger.info("%s: could not be renewed, will be retried: %s", checkpoint.url_of(record.name), error)
