"""CreateBucket, GetBucket and TestPermissions. The control API sets a bucket's flags."""

from __future__ import annotations

from ..response import Response
from .attributes import STORAGE_CLASSES
from .errors import GcsError
from .names import is_bucket_name
from .request import Request
from .resources import BUCKET, PERMISSIONS, bucket_resource, json_response
from .store import Bucket

_FIELDS = {"name", "location", "storageClass", "versioning", "iamConfiguration", "softDeletePolicy"}


def create_bucket(request: Request) -> Response:
    resource = request.json()
    unknown = set(resource) - _FIELDS
    if unknown:
        raise GcsError("notImplemented", f"{', '.join(sorted(unknown))} of a new bucket is not implemented.")
    if "project" not in request.query:
        raise GcsError("required", "Required parameter: project", parameter="project")
    name = resource.get("name")
    if not isinstance(name, str) or not is_bucket_name(name):
        raise GcsError("invalid", f"Invalid bucket name: {name!r}")
    if name in request.project.buckets:
        raise GcsError("conflict")
    storage_class = resource.get("storageClass", "STANDARD")
    if storage_class not in STORAGE_CLASSES:
        raise GcsError("invalid", f"Invalid value for: storageClass={storage_class!r}")
    bucket = Bucket(name, request.now_s, storage_class=storage_class)
    bucket.versioning = bool((resource.get("versioning") or {}).get("enabled"))
    duration_s = (resource.get("softDeletePolicy") or {}).get("retentionDurationSeconds", 0)
    bucket.soft_delete = str(duration_s) != "0"
    request.project.buckets[name] = bucket
    return json_response(request, bucket_resource(request, bucket), BUCKET)


def get_bucket(request: Request) -> Response:
    return json_response(request, bucket_resource(request, request.bucket), BUCKET)


def test_permissions(request: Request) -> Response:
    """Returns those of the given permissions that the caller has: all but the denied ones."""
    wanted = request.target.repeated["permissions"]
    if not wanted:
        raise GcsError("required", "Required parameter: permissions", parameter="permissions")
    answer: dict[str, object] = {"kind": "storage#testIamPermissionsResponse"}
    allowed = [permission for permission in wanted if permission not in request.bucket.denied]
    # GCS omits an empty list.
    if allowed:
        answer["permissions"] = allowed
    return json_response(request, answer, PERMISSIONS)
