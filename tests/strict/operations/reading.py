"""GetObject, HeadObject and GetObjectTagging. `sending` injects faults into their responses."""

from __future__ import annotations

from email.utils import formatdate

from .. import conditions, encryption
from ..attributes import ARCHIVED_CLASSES
from ..documents import document, group, tag
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..store import StoredObject


def _headers_of(stored: StoredObject) -> list[tuple[str, str]]:
    return [
        ("ETag", f'"{stored.etag}"'),
        ("Last-Modified", formatdate(stored.modified_s, usegmt=True)),
        ("Accept-Ranges", "bytes"),
        *stored.attributes.response_headers(),
        *stored.encryption.response_headers(),
    ]


def _checksum_headers(request: Request, stored: StoredObject) -> list[tuple[str, str]]:
    """Returns the whole object's checksum if requested; a range does not get it, since it does not apply to a range."""
    mode = request.headers.get("x-amz-checksum-mode")
    if mode is None:
        return []
    if mode != "ENABLED":
        raise S3Error("InvalidArgument", "x-amz-checksum-mode must be ENABLED.")
    return [(stored.checksum.header, stored.checksum.value), ("x-amz-checksum-type", stored.checksum.type)]


def _read(request: Request) -> Response:
    stored = request.bucket.stored(request.key)
    encryption.check_read(stored.encryption, request.headers)
    conditions.check_read(stored, request.headers)
    headers = _headers_of(stored)
    range_header = request.headers.get("range")
    if range_header is None:
        return Response(200, headers + _checksum_headers(request, stored), stored.body)
    wanted = conditions.parse_range(range_header, len(stored.body))
    headers.append(("Content-Range", f"bytes {wanted.start}-{wanted.stop - 1}/{len(stored.body)}"))
    return Response(206, headers, memoryview(stored.body)[wanted.start : wanted.stop])


def get_object(request: Request) -> Response:
    response = _read(request)
    storage_class = request.bucket.stored(request.key).attributes.storage_class
    if storage_class in ARCHIVED_CLASSES:
        raise S3Error("InvalidObjectState", details={"StorageClass": storage_class})
    return response


def head_object(request: Request) -> Response:
    """Responds as GetObject, with the length of the body but without the body."""
    response = _read(request)
    response.promised_length_bytes, response.body = len(response.body), b""
    return response


def get_object_tagging(request: Request) -> Response:
    tags = request.bucket.stored(request.key).attributes.tags
    elements = (group("Tag", tag("Key", name), tag("Value", value)) for name, value in tags)
    return xml_response(document("Tagging", group("TagSet", *elements)))
