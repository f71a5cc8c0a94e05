"""Authorises a verified request: region, redirects, public buckets, requester pays. Operations check keys."""

from __future__ import annotations

from .accounts import OWNER_ID
from .errors import S3Error
from .exchange import Request
from .state import RequestRecord, State
from .store import Bucket

_WITHOUT_BUCKET = ("ListBuckets", "CreateBucket")
_PUBLIC = ("GetObject", "HeadObject", "ListObjectsV2", "HeadBucket")


def check_access(request: Request) -> None:
    """Raises the error that S3 returns for a refused request; returns nothing if it is allowed."""
    identity = request.identity
    if request.operation in _WITHOUT_BUCKET:
        # One endpoint serves all regions, so these two operations accept any signed region.
        if identity is None:
            raise S3Error("AccessDenied")
        return
    bucket = request.bucket
    _check_redirect(bucket)
    if identity is None:
        if not bucket.public or request.operation not in _PUBLIC:
            raise S3Error("AccessDenied")
    elif identity.region != bucket.region:
        message = f"the region '{identity.region}' is wrong; expecting '{bucket.region}'"
        raise S3Error("AuthorizationHeaderMalformed", message, details={"Region": bucket.region})
    _check_owner(request, bucket)


def _check_redirect(bucket: Bucket) -> None:
    if bucket.elsewhere is not None:
        details = {"Endpoint": bucket.elsewhere.endpoint, "Bucket": bucket.name}
        raise S3Error("PermanentRedirect", details=details, headers=[("x-amz-bucket-region", bucket.elsewhere.region)])


def _check_owner(request: Request, bucket: Bucket) -> None:
    if request.headers.get("x-amz-expected-bucket-owner") not in (None, OWNER_ID):
        raise S3Error("AccessDenied")
    # S3 exempts the bucket's owner. This server exempts no account, because every account would be the owner.
    if bucket.requester_pays and request.headers.get("x-amz-request-payer") != "requester":
        raise S3Error("AccessDenied", "The bucket is a requester pays bucket: x-amz-request-payer is missing.")


def headers_of_every_answer(state: State, record: RequestRecord) -> list[tuple[str, str]]:
    """Returns the headers that every response about this bucket has, including errors."""
    bucket = state.buckets.get(record.bucket or "")
    if bucket is None or record.operation is None:
        return []
    headers = []
    if record.operation in ("HeadBucket", "ListObjectsV2") and bucket.elsewhere is None:
        headers.append(("x-amz-bucket-region", bucket.home_region))
    if bucket.requester_pays and record.headers.get("x-amz-request-payer") == "requester":
        headers.append(("x-amz-request-charged", "requester"))
    return headers
