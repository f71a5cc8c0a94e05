"""Determines the operation from method, target and query. `operations` performs it.

A query parameter that the operation does not list is answered with 501, so that no client relies on it being ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import S3Error
from .target import Target

# SDKs add it to distinguish operations in logs; S3 ignores it.
_IGNORED = frozenset({"x-id"})
SERVICE, BUCKET, OBJECT = "service", "bucket", "object"


@dataclass(frozen=True)
class Route:
    """One operation: it matches if all `required` parameters are present, and no others than the `optional` ones."""

    operation: str
    method: str
    level: str
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    copies: bool = False


def _route(
    operation: str, method: str, level: str, required: str = "", optional: str = "", copies: bool = False
) -> Route:
    return Route(operation, method, level, frozenset(required.split()), frozenset(optional.split()), copies)


ROUTES = (
    _route("ListBuckets", "GET", SERVICE, optional="prefix max-buckets continuation-token"),
    _route("CreateBucket", "PUT", BUCKET),
    _route("DeleteBucket", "DELETE", BUCKET),
    _route("HeadBucket", "HEAD", BUCKET),
    _route("GetBucketLocation", "GET", BUCKET, "location"),
    _route(
        "ListObjectsV2",
        "GET",
        BUCKET,
        "list-type",
        "prefix delimiter start-after continuation-token max-keys encoding-type fetch-owner",
    ),
    _route(
        "ListMultipartUploads", "GET", BUCKET, "uploads", "prefix key-marker upload-id-marker max-uploads encoding-type"
    ),
    _route("DeleteObjects", "POST", BUCKET, "delete"),
    _route("GetObject", "GET", OBJECT),
    _route("GetObjectTagging", "GET", OBJECT, "tagging"),
    _route("HeadObject", "HEAD", OBJECT),
    _route("PutObject", "PUT", OBJECT),
    _route("CopyObject", "PUT", OBJECT, copies=True),
    _route("DeleteObject", "DELETE", OBJECT),
    _route("CreateMultipartUpload", "POST", OBJECT, "uploads"),
    _route("UploadPart", "PUT", OBJECT, "partNumber uploadId"),
    _route("UploadPartCopy", "PUT", OBJECT, "partNumber uploadId", copies=True),
    _route("ListParts", "GET", OBJECT, "uploadId", "max-parts part-number-marker"),
    _route("CompleteMultipartUpload", "POST", OBJECT, "uploadId"),
    _route("AbortMultipartUpload", "DELETE", OBJECT, "uploadId"),
)
OPERATIONS = frozenset(route.operation for route in ROUTES)


def operation_of(method: str, target: Target, *, copies: bool) -> str:
    """Returns the operation's name; `copies` is whether the request has an x-amz-copy-source.

    Errors: MethodNotAllowed where nothing at this level has that method; NotImplemented where no operation takes
    exactly these parameters; InvalidArgument where one is given twice.
    """
    level = SERVICE if target.bucket is None else BUCKET if target.key is None else OBJECT
    names = [name for name, _ in target.query if name not in _IGNORED]
    if len(set(names)) != len(names):
        raise S3Error("InvalidArgument", "A query parameter is given twice.")
    candidates = [route for route in ROUTES if route.method == method and route.level == level]
    if not candidates:
        raise S3Error("MethodNotAllowed", details={"Method": method, "ResourceType": level.upper()})
    for route in candidates:
        if route.copies == copies and route.required <= set(names) <= route.required | route.optional:
            return route.operation
    raise S3Error("NotImplemented", f"{method} of a {level} with the query parameters {names} is not implemented.")
