"""The JSON of objects and buckets, with the schemas for `fields`. The operations decide what is shown."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from ..response import Response
from .attributes import CONTENT_FIELDS, HOLDS, OUTPUT_FIELDS
from .masks import ANY, Schema, masked
from .request import Request
from .store import Bucket, StoredObject

# GCS's default; the hard deletion of a soft-deleted object is due after it.
SOFT_DELETE_S = 7 * 24 * 3600

OBJECT: Schema = {
    **dict.fromkeys([*OUTPUT_FIELDS, *CONTENT_FIELDS, *HOLDS, "storageClass", "customTime"]),
    "metadata": ANY,
    "owner": ANY,
    "acl": ANY,
}
OBJECTS: Schema = {"kind": None, "nextPageToken": None, "prefixes": None, "items": OBJECT}
BUCKET: Schema = {
    **dict.fromkeys(
        [
            "kind",
            "id",
            "selfLink",
            "name",
            "projectNumber",
            "location",
            "locationType",
            "storageClass",
            "timeCreated",
            "updated",
            "metageneration",
            "etag",
            "defaultEventBasedHold",
        ]
    ),
    **dict.fromkeys(
        [
            "versioning",
            "softDeletePolicy",
            "retentionPolicy",
            "billing",
            "encryption",
            "iamConfiguration",
            "hierarchicalNamespace",
            "autoclass",
            "labels",
            "acl",
            "owner",
            "lifecycle",
        ],
        ANY,
    ),
}
REWRITE: Schema = {
    "kind": None,
    "totalBytesRewritten": None,
    "objectSize": None,
    "done": None,
    "rewriteToken": None,
    "resource": OBJECT,
}
BUCKETS: Schema = {"kind": None, "nextPageToken": None, "items": BUCKET}
PERMISSIONS: Schema = {"kind": None, "permissions": None}


def timestamp(moment_s: float) -> str:
    """Returns the RFC 3339 form of GCS, in milliseconds; `moment_s` is in seconds since the Unix epoch."""
    return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_response(
    request: Request, resource: dict[str, Any], schema: Schema, headers: list[tuple[str, str]] | None = None
) -> Response:
    """Returns those fields of a resource that the request asks for."""
    body = json.dumps(masked(request.query.get("fields"), resource, schema), ensure_ascii=False).encode()
    return Response(200, [("Content-Type", "application/json; charset=UTF-8"), *(headers or [])], body)


def object_resource(request: Request, bucket: Bucket, stored: StoredObject) -> dict[str, Any]:
    """Returns the whole resource of an object; 64-bit numbers are text."""
    path = f"/b/{bucket.name}/o/{quote(stored.name, safe='')}"
    where = request.state.endpoint
    resource: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{bucket.name}/{stored.name}/{stored.generation}",
        "selfLink": f"{where}/storage/v1{path}",
        "mediaLink": f"{where}/download/storage/v1{path}?generation={stored.generation}&alt=media",
        "name": stored.name,
        "bucket": bucket.name,
        "generation": str(stored.generation),
        "metageneration": str(stored.metageneration),
        "size": str(len(stored.body)),
        "crc32c": stored.crc32c,
        "etag": stored.etag,
        "timeCreated": timestamp(stored.created_s),
        "updated": timestamp(stored.updated_s),
        "timeStorageClassUpdated": timestamp(stored.created_s),
        "timeFinalized": timestamp(stored.created_s),
        **stored.attributes.resource(),
    }
    if stored.md5 is not None:
        resource["md5Hash"] = stored.md5
    if stored.component_count is not None:
        resource["componentCount"] = stored.component_count
    if bucket.retention_s is not None:
        resource["retentionExpirationTime"] = timestamp(stored.created_s + bucket.retention_s)
    if stored.deleted_s is not None:
        if any(stored is old for old in bucket.soft_deleted):
            resource["softDeleteTime"] = timestamp(stored.deleted_s)
            resource["hardDeleteTime"] = timestamp(stored.deleted_s + SOFT_DELETE_S)
        else:
            resource["timeDeleted"] = timestamp(stored.deleted_s)
    return resource


def object_response(request: Request, bucket: Bucket, stored: StoredObject) -> Response:
    return json_response(request, object_resource(request, bucket, stored), OBJECT, [("ETag", stored.etag)])


def bucket_resource(request: Request, bucket: Bucket) -> dict[str, Any]:
    created = timestamp(bucket.created_s)
    resource: dict[str, Any] = {
        "kind": "storage#bucket",
        "id": bucket.name,
        "selfLink": f"{request.state.endpoint}/storage/v1/b/{bucket.name}",
        "name": bucket.name,
        "projectNumber": "123456789012",
        "location": "US",
        "locationType": "multi-region",
        "storageClass": bucket.storage_class,
        "timeCreated": created,
        "updated": created,
        "metageneration": "1",
        "etag": "CAE=",
        "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}, "publicAccessPrevention": "inherited"},
        "softDeletePolicy": {"retentionDurationSeconds": str(SOFT_DELETE_S if bucket.soft_delete else 0)},
    }
    if bucket.versioning:
        resource["versioning"] = {"enabled": True}
    if bucket.requester_pays:
        resource["billing"] = {"requesterPays": True}
    if bucket.retention_s is not None:
        resource["retentionPolicy"] = {"retentionPeriod": str(int(bucket.retention_s)), "effectiveTime": created}
    if bucket.default_event_based_hold:
        resource["defaultEventBasedHold"] = True
    if bucket.kms is not None:
        resource["encryption"] = {"defaultKmsKeyName": bucket.kms}
    return resource
