"""Parses multipart/related bodies: a JSON part, a media part and optionally a JSON part with checksums.

Sources: RFC 2387; GCS documentation, "Upload objects from memory"; the third part is what google-cloud-storage sends
after content whose checksums it did not know before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..wire import Headers
from .errors import GcsError
from .request import json_object

# RFC 2046, 5.1.1: the characters of a boundary, quoted if one is not a token's.
_BOUNDARY = re.compile(
    r"""multipart/related\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))""", re.IGNORECASE
)


@dataclass(frozen=True)
class Upload:
    """An upload of one request; `content_type` is that of the media part, `checksums` has fields of the resource."""

    resource: Mapping[str, Any]
    content: bytes
    content_type: str | None
    checksums: Mapping[str, Any]


@dataclass(frozen=True)
class _Part:
    headers: Mapping[str, str]
    content: bytes


def _malformed(why: str) -> GcsError:
    return GcsError("invalid", f"Malformed multipart body: {why}.")


def _part_of(raw: bytes) -> _Part:
    head, separator, content = raw.partition(b"\r\n\r\n")
    if not raw.startswith(b"\r\n") or not separator:
        raise _malformed("a part has no end of its headers")
    headers = {}
    for line in head.split(b"\r\n")[1:]:
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon:
            raise _malformed(f"no header: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip()
    return _Part(headers, content)


def _parts_of(content_type: str, body: bytes) -> list[_Part]:
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise _malformed(f"Content-Type is {content_type!r}")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
    before, *raw = (b"\r\n" + body).split(delimiter)
    # The last delimiter is followed by two hyphens and nothing else.
    if before or not raw or raw[-1].rstrip() != b"--":
        raise _malformed("it does not begin and end with its boundary")
    return [_part_of(part) for part in raw[:-1]]


def _json_of(part: _Part) -> dict[str, Any]:
    kind = part.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise _malformed(f"a part of JSON has Content-Type {kind!r}")
    return json_object(part.content)


def parse_related(headers: Headers, body: bytes) -> Upload:
    """Returns the parts of a body; raises GcsError if it is malformed."""
    parts = _parts_of(headers.get("content-type") or "", body)
    if len(parts) not in (2, 3):
        raise _malformed(f"{len(parts)} parts, 2 or 3 are allowed")
    metadata, media, *trailing = parts
    checksums = _json_of(trailing[0]) if trailing else {}
    unknown = set(checksums) - {"crc32c", "md5Hash"}
    if unknown:
        raise _malformed(f"the third part has {sorted(unknown)}")
    return Upload(_json_of(metadata), media.content, media.headers.get("content-type"), checksums)


def named_resource(headers: Headers, body: bytes) -> dict[str, Any]:
    """Returns the JSON that names the object: the first part, or the whole body of another type; {} if it is empty."""
    if not (headers.get("content-type") or "").lower().startswith("multipart/"):
        return json_object(body) if body else {}
    head, _, rest = body.partition(b"\r\n\r\n")
    return json_object(rest.partition(b"\r\n--")[0]) if head else {}
