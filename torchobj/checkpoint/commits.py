"""Commit objects: what is written last, and makes a checkpoint real. Knows no tensors, and removes nothing by a prefix.

Below the manager's URL an attempt to save a step writes its data under `steps/{step:012}-{nonce}/`, where the nonce is
the attempt's own: two writers, or a second attempt, share no key. When all data is there, `commits/{step:012}.json` is
put on the condition that there is none. It names the attempt and each of its objects. A step exists when its commit
object exists; `latest.json` names the newest for other tools, and is believed by nobody here.
"""

import dataclasses
import json
import logging
import math
import operator
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, cast

from torchobj._torchobj import Buffer
from torchobj.config import StoreConfig
from torchobj.exceptions import (
    BucketNotFoundError,
    CheckpointError,
    ConfigError,
    ObjectNotFoundError,
    PreconditionFailedError,
    StoreError,
    TorchobjError,
    UnsupportedError,
)
from torchobj.store import ObjectInfo, Store
from torchobj.urls import parse_url

__all__ = ["Attempt", "Commit", "Commits", "CommittedByAnotherError", "StoredObject", "UnreadableCommitError"]

logger = logging.getLogger("torchobj")

#: Of the commit object; a reader refuses what it does not know.
_FORMAT = 1
#: A step is written with so many digits: keys then sort as steps do.
_DIGITS = 12
LARGEST_STEP = 10**_DIGITS - 1

_COMMIT_KEY = re.compile(rf"commits/(\d{{{_DIGITS}}})\.json")
_DATA_KEY = re.compile(rf"steps/(\d{{{_DIGITS}}})-([0-9a-f]{{32}})/.+", re.DOTALL)
_POINTER = "latest.json"
#: A pointer that others keep moving is theirs.
_POINTER_ATTEMPTS = 3

Kind = Literal["state", "dcp"]


class CommittedByAnotherError(CheckpointError):
    """Another writer was first: this attempt can no longer become the step."""


class UnreadableCommitError(CheckpointError):
    """A commit object does not say what belongs to its step."""


class Attempt(NamedTuple):
    """One attempt to save a step."""

    step: int
    nonce: str

    @classmethod
    def new(cls, step: int) -> "Attempt":
        """An attempt that no other has the nonce of."""
        return cls(step, secrets.token_hex(16))

    @property
    def folder(self) -> str:
        """Key of its data, with the slash, below the manager's URL."""
        return f"steps/{self.step:0{_DIGITS}}-{self.nonce}/"

    @classmethod
    def of_key(cls, key: str) -> "Attempt | None":
        """The attempt whose data is kept under this key; None where the key is not one of an attempt."""
        found = _DATA_KEY.fullmatch(key)
        return None if found is None else cls(int(found[1]), found[2])


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
        """The commit that these bytes are.

        Raises:
            ValueError: They are none of this step, are of a later version, or name an object that is not of their own
                attempt.
        """
        try:
            fields = json.loads(data)
            if fields["version"] != _FORMAT:
                raise ValueError(f"version {fields['version']!r}, this torchobj knows {_FORMAT}")
            attempt = Attempt(fields["step"], fields["nonce"])
            metrics = {name: math.nan if value is None else float(value) for name, value in fields["metrics"].items()}
            objects = tuple(StoredObject(**item) for item in fields["objects"])
            # What is not of the attempt is another checkpoint's, and would be deleted with this one.
            strange = [item.key for item in objects if Attempt.of_key(item.key) != attempt]
            if strange or attempt.step != step or fields["kind"] not in ("state", "dcp"):
                raise ValueError(f"step {attempt.step}, kind {fields['kind']!r}, objects of other attempts: {strange}")
            return cls(
                attempt, fields["kind"], objects, metrics, datetime.fromisoformat(fields["time"]).astimezone(UTC)
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field is missing or of another type: {error}") from error


class Commits:
    """The commit objects below a URL, and the deletion of what they name.

    Args:
        url: `s3://bucket/folder`, `file:///folder` or `memory://name/folder`.
        config: How the store is reached.
    """

    def __init__(self, url: str, config: StoreConfig) -> None:
        parsed = parse_url(url)
        inside = parsed.scheme != "file"
        self.store = Store(parsed.base if inside else url, config=config)
        folder = parsed.key.rstrip("/") if inside else ""
        self._prefix = f"{folder}/" if folder else ""
        self.url = f"{self.store.url}/{self._prefix}".rstrip("/")
        self._has_buckets = parsed.scheme == "s3"
        self._said: set[str] = set()
        #: Commit objects that were read, by step, with their version: they are never changed, only replaced.
        self._known: dict[int, tuple[str | None, Commit]] = {}

    def key(self, below: str) -> str:
        """The whole key of what is kept at `below`."""
        return self._prefix + below

    def objects(self, below: str) -> list[ObjectInfo]:
        """What is kept under `below`, with keys below the URL. A folder that does not exist holds nothing.

        Raises:
            BucketNotFoundError: There is no such bucket.
        """
        try:
            return [
                dataclasses.replace(info, key=info.key.removeprefix(self._prefix))
                for info in self.store.list(self.key(below))
            ]
        except ObjectNotFoundError as error:
            if self._has_buckets and isinstance(error, BucketNotFoundError):
                raise
            return []

    def versions(self) -> dict[int, str | None]:
        """The committed steps, ascending, each with the version of its commit object. One listing."""
        found = ((_COMMIT_KEY.fullmatch(info.key), info.version) for info in self.objects("commits/"))
        return {int(match[1]): version for match, version in found if match is not None}

    def version(self, step: int) -> str | None:
        """The version of the step's commit object; None where the step is not committed."""
        return self._version_of(self._commit_key(step))

    def read(self, step: int, version: str | None = None) -> Commit:
        """The commit of a step.

        Raises:
            ObjectNotFoundError: The step is not committed.
            ObjectChangedError: Its commit object is not of this version.
            UnreadableCommitError: The object is no commit of this step.
        """
        return self._parsed(step, self.store.get(self._commit_key(step), version=version))

    def readable(self) -> list[Commit]:
        """All commits that can be read, ascending. The others are said in the log, and are nobody's to delete."""
        versions = self.versions()
        unread = [step for step, version in versions.items() if version is None or self._known_version(step) != version]
        keys = [self._commit_key(step) for step in unread]
        bodies = self.store.get_many(keys, return_errors=True)
        for step, body in zip(unread, bodies, strict=True):
            self._known.pop(step, None)
            if isinstance(body, ObjectNotFoundError):
                continue
            if isinstance(body, Exception):
                raise body
            try:
                self._known[step] = (versions[step], self._parsed(step, cast("Buffer", body)))
            except UnreadableCommitError as error:
                self.warn_once(str(error))
        self._known = {step: known for step, known in self._known.items() if step in versions}
        return [self._known[step][1] for step in versions if step in self._known]

    def _known_version(self, step: int) -> str | None:
        known = self._known.get(step)
        return None if known is None else known[0]

    def publish(self, commit: Commit, replaces: str | None = None) -> None:
        """Makes a checkpoint real.

        Args:
            commit: What is committed; all its objects are there.
            replaces: The version of the commit object of this step that is replaced; None where there must be none.

        Raises:
            CommittedByAnotherError: Another writer committed the step.
            StoreError: What else kept it from being written. Where its answer was lost the commit may still be there,
                and the error has a note that says so.
        """
        key, body = self._commit_key(commit.step), commit.to_json()
        try:
            version = self._put_if(key, body, replaces)
        except StoreError as error:
            self._settle(commit, error)
        else:
            self._known[commit.step] = (version, commit)

    def _put_if(self, key: str, body: bytes, replaces: str | None) -> str:
        try:
            return self.store.put(key, body, if_none_match=replaces is None, if_match=replaces)
        except UnsupportedError:
            # Folders know no If-Match, some servers no condition at all: then the last look is as near as can be.
            now = self._version_of(key)
            if now != replaces:
                raise PreconditionFailedError(f"put {self.store.url}/{key}: there is another commit object") from None
            logger.warning("%s keeps no conditions on writes: two writers of one step may not see each other", self.url)
            return self.store.put(key, body)

    def _version_of(self, key: str) -> str | None:
        try:
            return self.store.head(key).version
        except ObjectNotFoundError:
            return None

    def _settle(self, commit: Commit, error: StoreError) -> None:
        """Returns where the commit was made although `error` was met; raises otherwise."""
        try:
            there = self.read(commit.step).attempt
        except ObjectNotFoundError:
            there = None
        except (StoreError, CheckpointError):
            error.add_note(f"whether step {commit.step} was committed is not known: steps() says so later")
            raise error from None
        if there == commit.attempt:
            return
        if there is not None and isinstance(error, PreconditionFailedError):
            message = f"{self.url}: step {commit.step} was committed by another writer; this attempt does not count"
            raise CommittedByAnotherError(message) from error
        if error.status is None or error.status >= 500:
            error.add_note(f"step {commit.step} was not committed when it was looked for, and may be yet: see steps()")
        raise error

    def delete(self, commit: Commit) -> None:
        """Deletes a checkpoint: first its commit object, and with it the step; then what it names.

        Raises:
            CommittedByAnotherError: The step was saved anew since this commit was read; nothing was deleted.
        """
        try:
            there = self.read(commit.step).attempt
        except ObjectNotFoundError:
            there = None
        if there not in (commit.attempt, None):
            raise CommittedByAnotherError(f"{self.url}: step {commit.step} was saved anew, and was not deleted")
        self.delete_unread(commit.step)
        self.delete_objects(item.key for item in commit.objects)

    def delete_unread(self, step: int) -> None:
        """Deletes the commit object of a step, and with it the step. What it named is a leftover then."""
        self.store.delete(self._commit_key(step))
        self._known.pop(step, None)

    def warn_once(self, message: str) -> None:
        """Logs a warning that is not to be read at every save."""
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s", message)

    def delete_objects(self, keys: Iterable[str]) -> None:
        """Deletes objects by their keys below the URL."""
        whole = [self.key(key) for key in keys]
        if whole:
            self.store.delete(whole)

    def point(self) -> None:
        """Moves `latest.json` to the newest committed step, for tools that read it."""
        key = self.key(_POINTER)
        for _ in range(_POINTER_ATTEMPTS):
            newest, there = max(self.versions(), default=None), self._version_of(key)
            if newest is None:
                return self.store.delete(key)
            body = json.dumps({"step": newest, "commit": self._commit_key(newest)}).encode()
            try:
                self._put_if_quietly(key, body, there)
            except PreconditionFailedError:
                continue
            return None
        return None

    def _put_if_quietly(self, key: str, body: bytes, there: str | None) -> None:
        try:
            self.store.put(key, body, if_none_match=there is None, if_match=there)
        except UnsupportedError:
            self.store.put(key, body)

    def _commit_key(self, step: int) -> str:
        return self.key(f"commits/{step:0{_DIGITS}}.json")

    def _parsed(self, step: int, data: Buffer) -> Commit:
        try:
            return Commit.from_json(bytes(cast("Any", data)), step)
        except ValueError as error:
            url = f"{self.store.url}/{self._commit_key(step)}"
            help_ = f"restore another step, or remove it with delete({step}) or save({step}, ..., overwrite=True)"
            raise UnreadableCommitError(f"{url}: no commit object of a checkpoint: {error}; {help_}") from error


def _in_json(metric: float) -> float | str | None:
    if math.isnan(metric):
        return None
    return str(metric) if math.isinf(metric) else metric


def checked_step(step: Any) -> int:
    """The step as a number.

    Raises:
        ConfigError: It is none of 0..999,999,999,999.
    """
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= LARGEST_STEP:
        raise ConfigError(f"step={step!r}: must be a whole number of 0..{LARGEST_STEP}")
    return number


def surely_refused(error: TorchobjError) -> bool:
    """Whether what `Commits.publish` raised says that the commit was not made, and will not be.

    An earlier try of the same request, of which the answer was lost, may yet be carried out.
    """
    told = error.attempts == 1 and error.status in (403, 412)
    return told or isinstance(error, CommittedByAnotherError)


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(tz=UTC)
