"""Buckets, objects with their generations, and upload sessions in memory. The operations enforce the rules of the API."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from awscrt import checksums as crt

from ..store import ObjectTable
from .attributes import Attributes
from .tokens import Tokens


def crc32c_of(body: bytes) -> str:
    """Returns the checksum as GCS shows it: base64 of four big-endian bytes."""
    return base64.b64encode(crt.crc32c(body).to_bytes(4, "big")).decode()


def md5_of(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


def _varint(number: int) -> bytes:
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


@dataclass(frozen=True)
class StoredObject:
    """One generation of an object; it is replaced, never changed, so that a response in progress keeps its content.

    md5, component_count: a composed object has only the latter.
    deleted_s: when it became noncurrent or soft-deleted, in seconds since the Unix epoch.
    """

    name: str
    body: bytes
    generation: int
    created_s: float
    attributes: Attributes
    crc32c: str
    md5: str | None
    component_count: int | None = None
    metageneration: int = 1
    updated_s: float = 0.0
    deleted_s: float | None = None

    @property
    def etag(self) -> str:
        """The base64 of a message with both generations, as GCS makes it."""
        return base64.b64encode(b"\x08" + _varint(self.generation) + b"\x10" + _varint(self.metageneration)).decode()


@dataclass
class Bucket:
    """A bucket and the flags that a test may set.

    retention_s: an object cannot be deleted or overwritten for so long.
    denied: permissions that no caller has.
    kms: name of the key that new objects are encrypted with.
    """

    name: str
    created_s: float
    public: bool = False
    requester_pays: bool = False
    versioning: bool = False
    soft_delete: bool = False
    storage_class: str = "STANDARD"
    retention_s: float | None = None
    default_event_based_hold: bool = False
    denied: list[str] = field(default_factory=list)
    kms: str | None = None
    objects: ObjectTable[StoredObject] = field(default_factory=lambda: ObjectTable[StoredObject]())
    noncurrent: list[StoredObject] = field(default_factory=list)
    soft_deleted: list[StoredObject] = field(default_factory=list)

    def version(self, name: str, generation: int | None) -> StoredObject | None:
        """Returns the live object, or the one of this generation, which may be noncurrent."""
        live = self.objects.get(name)
        if generation is None or (live is not None and live.generation == generation):
            return live
        return _find(self.noncurrent, name, generation)

    def soft_deleted_version(self, name: str, generation: int | None) -> StoredObject | None:
        return _find(self.soft_deleted, name, generation) if generation is not None else None

    def put(self, stored: StoredObject) -> None:
        """Makes an object the live one of its name."""
        self._retire(stored.name, stored.created_s)
        self.objects.put(stored.name, stored)

    def update(self, stored: StoredObject) -> None:
        """Replaces a generation by the same one with other metadata."""
        live = self.objects.get(stored.name)
        if live is not None and live.generation == stored.generation:
            self.objects.put(stored.name, stored)
        else:
            self.noncurrent = [stored if old.generation == stored.generation else old for old in self.noncurrent]

    def delete(self, stored: StoredObject, now_s: float, *, permanently: bool) -> None:
        """Deletes a generation; with versioning, the live one becomes noncurrent unless it is deleted permanently."""
        if self.objects.get(stored.name) is not stored:
            self.noncurrent = [old for old in self.noncurrent if old is not stored]
            self._soft_delete(stored, now_s)
        elif permanently:
            self.objects.delete(stored.name)
            self._soft_delete(stored, now_s)
        else:
            self._retire(stored.name, now_s)

    def _retire(self, name: str, now_s: float) -> None:
        """Removes the live object of a name, as far as the bucket's flags allow."""
        live = self.objects.get(name)
        if live is None:
            return
        self.objects.delete(name)
        if self.versioning:
            self.noncurrent.append(replace(live, deleted_s=now_s))
        else:
            self._soft_delete(live, now_s)

    def _soft_delete(self, stored: StoredObject, now_s: float) -> None:
        if self.soft_delete:
            self.soft_deleted.append(replace(stored, deleted_s=now_s))


def _find(objects: list[StoredObject], name: str, generation: int) -> StoredObject | None:
    return next((old for old in objects if old.name == name and old.generation == generation), None)


@dataclass
class Session:
    """A resumable upload; `total_bytes` is None until a request tells it, `finished` until all bytes are persisted."""

    upload_id: str
    bucket: str
    name: str
    resource: Mapping[str, Any]
    query: Mapping[str, str]
    total_bytes: int | None
    persisted: bytearray = field(default_factory=bytearray)
    finished: StoredObject | None = None
    cancelled: bool = False


@dataclass
class Rewrite:
    """A copy that takes several calls; `identity` has all that must be the same in each of them."""

    identity: tuple[object, ...]
    rewritten_bytes: int


class Project:
    """All buckets, tokens, sessions and rewrites of a GCS server."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.tokens = Tokens()
        self.sessions: dict[str, Session] = {}
        self.rewrites: dict[str, Rewrite] = {}
        self._last_generation = 0

    def buckets_by_name(self) -> Iterator[Bucket]:
        return (self.buckets[name] for name in sorted(self.buckets))

    def next_generation(self, now_s: float) -> int:
        """Returns a generation above all earlier ones: microseconds since the Unix epoch, as those of GCS."""
        self._last_generation = max(self._last_generation + 1, int(now_s * 1e6))
        return self._last_generation
