"""InsertObject: uploads of one request. `resumable` has those of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..response import Response
from .attributes import Attributes, patched
from .errors import GcsError
from .names import check_object_name
from .related import Upload, parse_related
from .request import Request
from .resources import object_response
from .store import crc32c_of, md5_of
from .writing import check_declared, hashes_of, store


def object_name(query: Mapping[str, str], resource: Mapping[str, Any]) -> str:
    """Returns the name of a new object; the query's has precedence (reference, "Objects: insert")."""
    name = query.get("name", resource.get("name"))
    if not isinstance(name, str):
        raise GcsError("required", "Required", parameter="name")
    return check_object_name(name)


def new_attributes(query: Mapping[str, str], resource: Mapping[str, Any], content_type: str | None) -> Attributes:
    """Returns the attributes of a new object; `content_type` is used if the resource has none."""
    given = dict(resource)
    if content_type and given.get("contentType") is None:
        given["contentType"] = content_type
    if "contentEncoding" in query:
        given["contentEncoding"] = query["contentEncoding"]
    return patched(Attributes(), given)


def kms_key_of(query: Mapping[str, str], resource: Mapping[str, Any], parameter: str = "kmsKeyName") -> str | None:
    """Returns the key that a request names; the query's has precedence."""
    key = query.get(parameter, resource.get("kmsKeyName"))
    return key.partition("/cryptoKeyVersions/")[0] if isinstance(key, str) else None


def insert_object(request: Request) -> Response:
    if request.query["uploadType"] == "multipart":
        upload = parse_related(request.headers, request.body)
    else:
        upload = Upload({}, request.body, request.headers.get("content-type"), {})
    name = object_name(request.query, upload.resource)
    attributes = new_attributes(request.query, upload.resource, upload.content_type)
    crc32c, md5 = crc32c_of(upload.content), md5_of(upload.content)
    for declared in (upload.resource, upload.checksums, hashes_of(request.headers.get("x-goog-hash"))):
        check_declared(declared, crc32c, md5)
    key = kms_key_of(request.query, upload.resource)
    stored = store(request, request.bucket, name, upload.content, attributes, query=request.query, kms_key=key)
    return object_response(request, request.bucket, stored)
