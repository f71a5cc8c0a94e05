"""CreateBucket, ListBuckets, GetBucket and TestPermissions. The control API sets a bucket's flags."""

from __future__ import annotations

from ..response import Response
from .attributes import STORAGE_CLASSES
from .errors import GcsError
from .names import is_bucket_name
from .request import Request
from .resources import BUCKET, BUCKETS, PERMISSIONS, bucket_resource, json_response
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


def list_buckets(request: Request) -> Response:
    """Lists the buckets of the project by name. A token is that of the last bucket, reversed."""
    query, limit = request.query, request.state.limits.max_keys
    if "project" not in query:
        raise GcsError("required", "Required parameter: project", parameter="project")
    wanted = request.number("maxResults")
    if wanted == 0:
        raise GcsError("invalid", "Invalid value for: maxResults must be positive", parameter="maxResults")
    after, prefix = query.get("pageToken", "")[::-1], query.get("prefix", "")
    found = [each for each in request.project.buckets_by_name() if each.name > after and each.name.startswith(prefix)]
    page = found[: min(wanted or limit, limit)]
    resource: dict[str, object] = {"kind": "storage#buckets"}
    if len(found) > len(page):
        resource["nextPageToken"] = page[-1].name[::-1]
    if page:
        resource["items"] = [bucket_resource(request, bucket) for bucket in page]
    return json_response(request, resource, BUCKETS)


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
