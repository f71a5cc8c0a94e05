"""Buckets: create, delete, head, location, list. Other modules handle their objects."""

from __future__ import annotations

import base64
import binascii

from ..accounts import OWNER_ID
from ..documents import MalformedDocument, document, group, parse, tag, timestamp
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..store import DEFAULT_REGION, Bucket

# S3 API reference, ListBuckets.
_MAX_BUCKETS = 10_000
# Makes every token begin with "+//+": a client that does not encode tokens in its query cannot get the next page.
_TOKEN_MARK = b"\xfb\xff\xfe"


def owner(name: str = "Owner") -> str:
    """Returns the element that names the owner of all objects."""
    return group(name, tag("ID", OWNER_ID), tag("DisplayName", "torchobj"))


def list_buckets(request: Request) -> Response:
    """Lists buckets by name: in pages if the request has max-buckets, otherwise all of them."""
    query = request.query
    after, prefix = _last_of(query.get("continuation-token")), query.get("prefix", "")
    found = [each for each in request.state.buckets_by_name() if each.name > after and each.name.startswith(prefix)]
    most = len(found)
    if "max-buckets" in query:
        most = request.count_parameter("max-buckets", _MAX_BUCKETS, min(_MAX_BUCKETS, request.state.limits.max_keys))
        if most == 0:
            raise S3Error("InvalidArgument", "max-buckets must be between 1 and 10000.")
    buckets = (
        group("Bucket", tag("Name", bucket.name), tag("CreationDate", timestamp(bucket.created_s)))
        for bucket in found[:most]
    )
    token = tag("ContinuationToken", _token(found[most - 1].name)) if len(found) > most else ""
    return xml_response(document("ListAllMyBucketsResult", owner(), group("Buckets", *buckets), token))


def _token(name: str) -> str:
    return base64.b64encode(_TOKEN_MARK + name.encode()[::-1]).decode()


def _last_of(token: str | None) -> str:
    """Returns the last bucket of the page before."""
    if token is None:
        return ""
    try:
        decoded = base64.b64decode(token, validate=True)
    except binascii.Error:
        decoded = b""
    if not decoded.startswith(_TOKEN_MARK):
        raise S3Error("InvalidArgument", "The continuation token provided is incorrect")
    return decoded[len(_TOKEN_MARK) :][::-1].decode()


def create_bucket(request: Request) -> Response:
    """Creates a bucket in the LocationConstraint's region, which must agree with the region the request is signed for.

    One endpoint stands for all regional ones here, so the signature's region is what tells them apart. us-east-1's may
    create anywhere; the others only at home (API reference, CreateBucket).
    """
    constraint: str | None = None
    if request.body:
        try:
            constraint = parse(request.body, "CreateBucketConfiguration").find("LocationConstraint") or None
        except MalformedDocument as error:
            raise S3Error("MalformedXML", str(error)) from error
    signed_region = request.identity.region if request.identity is not None else DEFAULT_REGION
    if signed_region != DEFAULT_REGION and constraint != signed_region:
        raise S3Error("IllegalLocationConstraintException")
    name = request.bucket_name
    if name in request.state.buckets:
        raise S3Error("BucketAlreadyOwnedByYou", details={"BucketName": name})
    request.state.buckets[name] = Bucket(name, request.state.clock.now_s(), constraint or DEFAULT_REGION)
    return Response(headers=[("Location", f"/{name}")])


def delete_bucket(request: Request) -> Response:
    bucket = request.bucket
    if len(bucket.objects):
        raise S3Error("BucketNotEmpty", details={"BucketName": bucket.name})
    del request.state.buckets[bucket.name]
    return Response(204)


def head_bucket(request: Request) -> Response:
    """Returns no content: `access` adds x-amz-bucket-region to every response."""
    del request
    return Response(headers=[("Content-Type", "application/xml")])


def get_bucket_location(request: Request) -> Response:
    """Returns the region; us-east-1 is written as an empty LocationConstraint."""
    region = request.bucket.region
    body = document("LocationConstraint", "" if region == DEFAULT_REGION else region)
    return xml_response(body)
