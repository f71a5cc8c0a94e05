"""Changes the content of a response as a fault's Action says; its framing stays right. `sending` damages the framing."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .faults import Action
from .response import Response

_OTHER_ETAG = f'"{"0" * 32}"'


def _shifted(content_range: str) -> str:
    """Returns a Content-Range of the same length that begins one byte later."""
    bounds, _, size = content_range.removeprefix("bytes ").partition("/")
    start, _, last = bounds.partition("-")
    return f"bytes {int(start) + 1}-{int(last) + 1}/{size}"


def _other_digest(value: str) -> str:
    """Returns the base64 of another digest of the same size; "-N" of a composed one stays."""
    digest, separator, count = value.partition("-")
    decoded = base64.b64decode(digest)
    return base64.b64encode(bytes([decoded[0] ^ 0xFF]) + decoded[1:]).decode() + separator + count


def _other_hashes(header: str) -> str:
    """Returns an x-goog-hash whose checksums are all wrong."""
    entries = (entry.partition("=") for entry in header.split(","))
    return ",".join(f"{name}={_other_digest(value)}" for name, _, value in entries)


def _next(generation: str) -> str:
    return str(int(generation) + 1)


def _header_changes(action: Action) -> Mapping[str, Callable[[str], str]]:
    """Returns what happens to which headers."""
    changes: dict[str, Callable[[str], str]] = {}
    if action.wrong_etag:
        changes["etag"] = lambda _: _OTHER_ETAG
    if action.wrong_content_range:
        changes["content-range"] = _shifted
    if action.wrong_generation:
        changes["x-goog-generation"] = _next
    if action.wrong_checksum:
        changes["x-goog-hash"] = _other_hashes
        for algorithm in ("crc32", "crc32c", "crc64nvme", "sha1", "sha256"):
            changes[f"x-amz-checksum-{algorithm}"] = _other_digest
    return changes


def _field_changes(action: Action) -> Mapping[str, Callable[[str], str]]:
    """Returns what happens to which fields of JSON resources."""
    changes: dict[str, Callable[[str], str]] = {}
    if action.wrong_etag:
        changes["etag"] = lambda _: _OTHER_ETAG
    if action.wrong_generation:
        changes["generation"] = _next
    if action.wrong_checksum:
        changes["crc32c"] = changes["md5Hash"] = _other_digest
    return changes


def _changed(value: Any, changes: Mapping[str, Callable[[str], str]]) -> Any:
    if isinstance(value, list):
        return [_changed(element, changes) for element in value]
    if not isinstance(value, dict):
        return value
    return {
        name: changes[name](content) if name in changes and isinstance(content, str) else _changed(content, changes)
        for name, content in value.items()
    }


def _is_resource(response: Response) -> bool:
    """Returns whether the body is JSON of GCS itself, and not an object of this type."""
    headers = {name.lower(): value for name, value in response.headers}
    return headers.get("content-type", "").startswith("application/json") and "x-goog-generation" not in headers


def damaged(response: Response, action: Action) -> Response:
    """Returns the response with changed headers and content."""
    body = response.body
    header_changes, field_changes = _header_changes(action), _field_changes(action)
    headers = [
        (name, header_changes[name.lower()](value) if name.lower() in header_changes else value)
        for name, value in response.headers
    ]
    if field_changes and body and _is_resource(response):
        body = json.dumps(_changed(json.loads(bytes(body)), field_changes), ensure_ascii=False).encode()
    if action.replace_body is not None:
        body = action.replace_body.encode()
    if action.corrupt_byte_at is not None and action.corrupt_byte_at < len(body):
        changed = bytearray(body)
        changed[action.corrupt_byte_at] ^= 0xFF
        body = bytes(changed)
    if action.shorter_length:
        body = body[: -action.shorter_length]
    if action.gzip:
        body = gzip.compress(body, mtime=0)
        headers.append(("Content-Encoding", "gzip"))
    return replace(response, headers=headers, body=body)
