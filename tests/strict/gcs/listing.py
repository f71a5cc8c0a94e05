"""ListObjects, page by page. Changes nothing."""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from ..response import Response
from ..store import ObjectTable
from .errors import GcsError
from .names import NAME_LIMIT_BYTES
from .request import Request
from .resources import OBJECTS, json_response, object_resource
from .store import Bucket, StoredObject

# Makes every token begin with "+//+": a client that does not encode tokens in its query cannot get the next page.
_TOKEN_MARK = b"\xfb\xff\xfe"
# No name sorts after its prefix followed by as many of the last code point as a name can hold.
_LAST = "\U0010ffff" * NAME_LIMIT_BYTES

_Position = tuple[str, int]


class _Live(Sequence[StoredObject]):
    """The live objects of a bucket in the order of their names."""

    def __init__(self, table: ObjectTable[StoredObject]) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, position: int) -> StoredObject: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[StoredObject]: ...
    def __getitem__(self, position: int | slice) -> StoredObject | Sequence[StoredObject]:
        assert isinstance(position, int), "a listing takes one object after the other"
        key = self._table.key_at(position)
        if key is None:
            raise IndexError(position)
        return self._table[key]


def _position(stored: StoredObject) -> _Position:
    return stored.name, stored.generation


def _listed(request: Request, bucket: Bucket) -> Sequence[StoredObject]:
    """Returns what is listed, in order: live objects, all generations or soft-deleted ones."""
    versions, soft_deleted = request.flag("versions"), request.flag("softDeleted")
    if versions and soft_deleted:
        raise GcsError("invalid", "versions and softDeleted exclude each other.", parameter="softDeleted")
    if soft_deleted:
        return sorted(bucket.soft_deleted, key=_position)
    if versions:
        return sorted([*_Live(bucket.objects), *bucket.noncurrent], key=_position)
    return _Live(bucket.objects)


def _token(start: _Position) -> str:
    # Reversed, so that no client reads a name from it.
    return base64.b64encode(_TOKEN_MARK + f"{start[1]}:{start[0]}".encode()[::-1]).decode()


def _start_of(token: str) -> _Position:
    try:
        decoded = base64.b64decode(token, validate=True)
        generation, _, name = decoded[len(_TOKEN_MARK) :][::-1].decode().partition(":")
        if not decoded.startswith(_TOKEN_MARK):
            raise ValueError(token)
        return name, int(generation)
    except (binascii.Error, ValueError):
        raise GcsError("invalid", "Invalid value for: pageToken", parameter="pageToken") from None


@dataclass
class _Page:
    """A page of a listing; `next_start` is set if there is another."""

    objects: list[StoredObject] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    next_start: _Position | None = None


@dataclass(frozen=True)
class _Selection:
    prefix: str
    delimiter: str | None
    end: str | None
    trailing: bool

    def group_of(self, name: str) -> str | None:
        """Returns the common prefix that a name belongs to, or None if it is an item only."""
        head, found, _ = name[len(self.prefix) :].partition(self.delimiter) if self.delimiter else ("", "", "")
        return self.prefix + head + found if found else None


def _page_of(listed: Sequence[StoredObject], start: _Position, selection: _Selection, most: int) -> _Page:
    page = _Page()
    index = bisect_left(listed, max(start, (selection.prefix, 0)), key=_position)
    while index < len(listed):
        stored = listed[index]
        if not stored.name.startswith(selection.prefix) or (selection.end and stored.name >= selection.end):
            break
        group = selection.group_of(stored.name)
        new_prefix = group is not None and group not in page.prefixes[-1:]
        is_item = group is None or (selection.trailing and group == stored.name)
        if len(page.objects) + len(page.prefixes) + new_prefix + is_item > max(most, new_prefix + is_item):
            page.next_start = _position(stored)
            break
        if group is not None and new_prefix:
            page.prefixes.append(group)
        if is_item:
            page.objects.append(stored)
            index += 1
        else:
            assert group is not None, "what is no item has a common prefix"
            index = bisect_left(listed, (group + _LAST, 0), key=_position)
    return page


def list_objects(request: Request) -> Response:
    """Lists objects in the order of their names' UTF-8 bytes; items and prefixes count together."""
    query, bucket = request.query, request.bucket
    limit = request.state.limits.max_keys
    wanted = request.number("maxResults")
    if wanted == 0:
        raise GcsError("invalid", "Invalid value for: maxResults must be positive", parameter="maxResults")
    selection = _Selection(
        query.get("prefix", ""),
        query.get("delimiter") or None,
        query.get("endOffset") or None,
        request.flag("includeTrailingDelimiter"),
    )
    start = (query.get("startOffset", ""), 0)
    if query.get("pageToken"):
        start = max(start, _start_of(query["pageToken"]))
    page = _page_of(_listed(request, bucket), start, selection, min(wanted or limit, limit))
    resource: dict[str, Any] = {"kind": "storage#objects"}
    if page.next_start is not None:
        resource["nextPageToken"] = _token(page.next_start)
    if page.prefixes:
        resource["prefixes"] = page.prefixes
    if page.objects:
        resource["items"] = [object_resource(request, bucket, stored) for stored in page.objects]
    return json_response(request, resource, OBJECTS)
