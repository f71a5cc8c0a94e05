"""Authorises requests: bearer tokens, public buckets, permissions, requester pays."""

from __future__ import annotations

import re

from .errors import GcsError
from .request import Request
from .routing import METADATA_OPERATIONS
from .store import Bucket

# The permission that each operation needs on the bucket of its path; others need none, or several (see `writing`).
_PERMISSIONS = {
    "GetMedia": "storage.objects.get",
    "GetObject": "storage.objects.get",
    "ListObjects": "storage.objects.list",
    "InsertObject": "storage.objects.create",
    "StartResumable": "storage.objects.create",
    "ComposeObject": "storage.objects.create",
    "RewriteObject": "storage.objects.get",
    "DeleteObject": "storage.objects.delete",
    "PatchObject": "storage.objects.update",
    "GetBucket": "storage.buckets.get",
}
# Permissions on the project.
_OF_PROJECT = {"CreateBucket": "storage.buckets.create", "ListBuckets": "storage.buckets.list"}
# What a public bucket permits without a token, as roles/storage.objectViewer of allUsers.
_PUBLIC = ("GetMedia", "GetObject", "ListObjects")
# The URL of a session permits its use.
_BY_SESSION = ("ResumableChunk", "ResumableStatus", "CancelResumable")
_CHALLENGE = ("WWW-Authenticate", 'Bearer realm="https://accounts.google.com/"')
_CALLER = "strict@torchobj.iam.gserviceaccount.com"


def check_access(request: Request) -> None:
    """Raises the error that GCS returns for a refused request; returns nothing if it is allowed."""
    if request.operation in METADATA_OPERATIONS:
        return
    authorised = _has_token(request)
    if request.operation in _OF_PROJECT:
        if not authorised:
            raise _anonymous(_OF_PROJECT[request.operation])
        return
    bucket = request.bucket
    permission = _PERMISSIONS.get(request.operation)
    is_public = bucket.public and request.operation in _PUBLIC
    if not (authorised or is_public or request.operation in _BY_SESSION):
        raise _anonymous(permission or "storage.buckets.getIamPolicy")
    if permission is not None:
        require(bucket, permission)
    if request.operation not in _BY_SESSION:
        check_payer(request, bucket)


def require(bucket: Bucket, permission: str) -> None:
    """Raises forbidden if the permission is denied on this bucket."""
    if permission in bucket.denied:
        what = "bucket" if ".buckets." in permission else "object"
        raise GcsError(
            "forbidden",
            f"{_CALLER} does not have {permission} access to the Google Cloud Storage {what}. Permission "
            f"'{permission}' denied on resource (or it may not exist).",
        )


def check_payer(request: Request, bucket: Bucket) -> None:
    """Raises an error if a requester pays bucket is used without a project to bill."""
    project = request.query.get("userProject") or request.headers.get("x-goog-user-project")
    if bucket.requester_pays and not project:
        message = "Bucket is a requester pays bucket but no user project provided."
        raise GcsError("required", message, parameter="userProject")


def _has_token(request: Request) -> bool:
    """Returns whether a request has a valid token; raises authError if it has an invalid one."""
    sent = request.headers.get("authorization")
    if sent is None:
        return False
    found = re.fullmatch(r"Bearer ([A-Za-z0-9\-._~+/]+=*)", sent)
    if found is None or not request.project.tokens.is_valid(found[1], request.now_s):
        name, challenge = _CHALLENGE
        raise GcsError("authError", headers=[(name, challenge + ', error="invalid_token"')])
    return True


def _anonymous(permission: str) -> GcsError:
    message = (
        f"Anonymous caller does not have {permission} access to the Google Cloud Storage resource. Permission "
        f"'{permission}' denied on resource (or it may not exist)."
    )
    return GcsError("required", message, status=401, headers=[_CHALLENGE])
