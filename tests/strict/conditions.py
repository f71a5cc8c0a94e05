"""Conditional headers and ranges: determines which bytes of an object a request may read.

Sources: RFC 9110 sections 13 and 14; S3 API reference, GetObject, PutObject and CopyObject.
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime

from .errors import S3Error
from .store import StoredObject
from .wire import Headers

_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")


def _matches(condition: str, etag: str) -> bool:
    """Returns whether a list of ETags contains this one; S3 accepts them with and without quotes."""
    candidates = [word.strip().removeprefix("W/").strip('"') for word in condition.split(",")]
    return "*" in candidates or etag in candidates


def _moment_s(date: str) -> float | None:
    """Returns an HTTP date's time; None if it is invalid, since RFC 9110 requires to ignore the condition then."""
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None


def _failed(condition: str) -> S3Error:
    return S3Error("PreconditionFailed", details={"Condition": condition})


def check_read(stored: StoredObject, headers: Headers, *, prefix: str = "") -> None:
    """Checks If-Match and the related headers in the order of RFC 9110, 13.2.2; raises 412 or, for reads, 304.

    prefix: "x-amz-copy-source-" checks the conditions on a copy's source, of which none answers 304.
    """
    if_match, if_none_match, modified_since, unmodified_since = (
        headers.get(prefix + name) for name in ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
    )
    modified_s = float(int(stored.modified_s))
    not_modified = (
        _failed("If-None-Match") if prefix else S3Error("NotModified", headers=[("ETag", f'"{stored.etag}"')])
    )
    if if_match is not None:
        if not _matches(if_match, stored.etag):
            raise _failed("If-Match")
    elif unmodified_since is not None:
        moment_s = _moment_s(unmodified_since)
        if moment_s is not None and modified_s > moment_s:
            raise _failed("If-Unmodified-Since")
    if if_none_match is not None:
        if _matches(if_none_match, stored.etag):
            raise not_modified
    elif modified_since is not None:
        moment_s = _moment_s(modified_since)
        if moment_s is not None and modified_s <= moment_s:
            raise not_modified


def check_write(current: StoredObject | None, headers: Headers, key: str) -> None:
    """Checks the conditions on the object that a write would replace: If-None-Match: * and If-Match with an ETag."""
    if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
    if if_match is not None and if_none_match is not None:
        raise S3Error("NotImplemented", "If-Match and If-None-Match exclude each other.")
    if if_none_match is not None:
        if if_none_match != "*":
            raise S3Error("NotImplemented", "If-None-Match of a write must be *.")
        if current is not None:
            raise _failed("If-None-Match")
    if if_match is not None:
        if current is None:
            raise S3Error("NoSuchKey", details={"Key": key})
        if not _matches(if_match, current.etag):
            raise _failed("If-Match")


def parse_range(value: str, size_bytes: int) -> range:
    """Returns the bytes start..end (end excluded) that a Range or x-amz-copy-source-range requests.

    Errors: InvalidRange where no byte satisfies it, as always for an empty object; InvalidArgument where it is no
    single range (S3 itself ignores such a header and sends everything; no client of ours should ever send one).
    """
    found = _RANGE.fullmatch(value)
    if found is None or not (found[1] or found[2]) or (found[1] and found[2] and int(found[2]) < int(found[1])):
        raise S3Error("InvalidArgument", f"{value!r} is not a single range of bytes.")
    if found[1]:
        start = int(found[1])
        end = min(int(found[2]) + 1, size_bytes) if found[2] else size_bytes
    else:
        start = max(size_bytes - int(found[2]), 0)
        end = size_bytes
    if start >= end:
        raise S3Error("InvalidRange", details={"RangeRequested": value, "ActualObjectSize": str(size_bytes)})
    return range(start, end)
