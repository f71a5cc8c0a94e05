"""RewriteObject: copies an object, in several calls if it is larger than the limit `rewrite_bytes`."""

from __future__ import annotations

from typing import Any

from ..response import Response
from . import conditions
from .access import require
from .attributes import Attributes, patched
from .errors import GcsError
from .inserting import kms_key_of
from .names import check_object_name
from .request import Request
from .resources import REWRITE, json_response, object_resource
from .store import Bucket, Rewrite, StoredObject
from .writing import DECRYPT, check_key, check_replaceable, store

_MEBIBYTE = 1024**2


def _source_of(request: Request) -> StoredObject:
    bucket, name = request.bucket, request.name
    source = bucket.version(name, request.number("sourceGeneration"))
    if source is None:
        raise GcsError("notFound", f"No such object: {bucket.name}/{name}")
    conditions.check(request.query, bucket.objects.get(name), addressed=source, prefix="ifSource")
    check_key(bucket, DECRYPT, source.attributes.kms_key)
    return source


def _limit_of(request: Request) -> int:
    """Returns how many bytes this call may copy."""
    wanted = request.number("maxBytesRewrittenPerCall")
    if wanted is not None and (wanted == 0 or wanted % _MEBIBYTE):
        raise GcsError("invalid", "maxBytesRewrittenPerCall must be a multiple of 1 MiB.")
    limit = request.state.limits.rewrite_bytes
    return min(wanted or limit, limit)


def _rewrite_of(request: Request, identity: tuple[object, ...]) -> tuple[str, Rewrite]:
    """Returns the copy that a request begins or continues."""
    token = request.query.get("rewriteToken")
    if token is None:
        return f"Strict+rewrite/{request.state.next_number():013d}==", Rewrite(identity, 0)
    known = request.project.rewrites.get(token)
    if known is None or known.identity != identity:
        raise GcsError("invalid", "Invalid value for: rewriteToken", parameter="rewriteToken")
    return token, known


def _attributes_of(source: StoredObject, resource: dict[str, Any]) -> Attributes:
    """Returns the source's attributes; a resource replaces all of them but the type of the content."""
    kept = source.attributes
    if not resource:
        return Attributes(kept.content, kept.metadata, None, kept.custom_time)
    content_type = kept.content["contentType"]
    return patched(Attributes({"contentType": content_type}), resource)


def rewrite_object(request: Request) -> Response:
    source, resource = _source_of(request), request.json()
    bucket: Bucket = request.bucket_named(request.target.names["bucket2"])
    name = check_object_name(request.target.names["object2"])
    require(bucket, "storage.objects.create")
    attributes = _attributes_of(source, resource)
    check_replaceable(request, bucket, name, request.query)
    identity = (request.bucket.name, source.name, source.generation, bucket.name, name, repr(resource))
    token, rewrite = _rewrite_of(request, identity)
    size_bytes = len(source.body)
    rewrite.rewritten_bytes = min(rewrite.rewritten_bytes + _limit_of(request), size_bytes)
    answer: dict[str, Any] = {
        "kind": "storage#rewriteResponse",
        "totalBytesRewritten": str(rewrite.rewritten_bytes),
        "objectSize": str(size_bytes),
        "done": rewrite.rewritten_bytes == size_bytes,
    }
    if not answer["done"]:
        request.project.rewrites[token] = rewrite
        return json_response(request, answer | {"rewriteToken": token}, REWRITE)
    request.project.rewrites.pop(token, None)
    key = kms_key_of(request.query, resource, "destinationKmsKeyName")
    stored = store(request, bucket, name, source.body, attributes, query=request.query, kms_key=key, like=source)
    return json_response(request, answer | {"resource": object_resource(request, bucket, stored)}, REWRITE)
