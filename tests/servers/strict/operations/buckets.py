"""Buckets: create, delete, head, location, list. Other modules handle their objects."""

from __future__ import annotations

from ..accounts import OWNER_ID
from ..documents import MalformedDocument, document, group, parse, tag, timestamp
from ..errors import S3Error
from ..exchange import Request, xml_response
from ..response import Response
from ..store import DEFAULT_REGION, Bucket


def owner(name: str = "Owner") -> str:
    """Returns the element that names the owner of all objects."""
    return group(name, tag("ID", OWNER_ID), tag("DisplayName", "torchobj"))


def list_buckets(request: Request) -> Response:
    buckets = (
        group("Bucket", tag("Name", bucket.name), tag("CreationDate", timestamp(bucket.created_s)))
        for bucket in request.state.buckets_by_name()
    )
    return xml_response(document("ListAllMyBucketsResult", owner(), group("Buckets", *buckets)))


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
