"""Tests the strict server's keys, listings, objects and buckets through boto3."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from botocore import UNSIGNED  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

from tests.servers import launch
from tests.servers.boto_client import boto_client, refusal
from tests.servers.raw_client import RawConnection, request_bytes
from tests.strict.control import BucketFlags, Control
from tests.strict.tests.answers import code_in

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]

UNUSUAL_KEYS = [
    "plain.txt",
    "a//b",
    "/lead",
    "trail/",
    "//",
    ".",
    "..",
    "a/../b",
    "a/./b",
    "with space and  two",
    "plus+plus",
    "100%25 %zz",
    "what?a=b&c",
    "hash#tag",
    "ünïcode/😀/é",
    "<xml>&\"quotes'",
    "semi;colon:at@=,$!*()~",
    "back\\slash|pipe^`{}[]",
    "k" * 1024,
    "é" * 512,
]


# --- Keys, listings and objects


@pytest.mark.parametrize("key", UNUSUAL_KEYS, ids=lambda key: repr(key[:20]))
def test_an_unusual_key_is_put_read_copied_listed_and_deleted_unchanged(s3: Any, control: Control, key: str) -> None:
    s3.put_object(Bucket="bucket", Key=key, Body=b"content", Metadata={"a": "b"})
    assert s3.get_object(Bucket="bucket", Key=key)["Body"].read() == b"content"
    assert s3.head_object(Bucket="bucket", Key=key)["ContentLength"] == 7
    s3.copy_object(Bucket="bucket", Key="copy", CopySource={"Bucket": "bucket", "Key": key})
    assert s3.get_object(Bucket="bucket", Key="copy")["Metadata"] == {"a": "b"}
    listed = s3.list_objects_v2(Bucket="bucket", Prefix=key)["Contents"]
    assert [entry["Key"] for entry in listed] == [key]
    assert control.requests("PutObject")[0].key == key
    deleted = s3.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": key}, {"Key": "copy"}]})
    assert [entry["Key"] for entry in deleted["Deleted"]] == [key, "copy"]
    assert refusal(s3.get_object, Bucket="bucket", Key=key) == (404, "NoSuchKey")


def test_a_key_of_1025_bytes_is_too_long(s3: Any) -> None:
    assert refusal(s3.put_object, Bucket="bucket", Key="é" * 512 + "k") == (400, "KeyTooLongError")


@pytest.mark.parametrize("delimiter", ["", "/", "//", "-"])
@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "z"])
@pytest.mark.parametrize("page_keys", [1, 2, 1000])
def test_pages_of_any_size_add_up_to_the_same_listing(s3: Any, prefix: str, delimiter: str, page_keys: int) -> None:
    keys = ["a", "a/", "a//x", "a/b", "a/b-1", "a/b/c", "a/b/d", "a0", "b/é", "b/😀", "b/\uffee", "c d", "c+d"]
    for key in keys:
        s3.put_object(Bucket="bucket", Key=key)
    expected_keys: set[str] = set()
    expected_prefixes: set[str] = set()
    for key in (key for key in keys if key.startswith(prefix)):
        head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        (expected_prefixes if found else expected_keys).add(prefix + head + found if found else key)
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket="bucket", Prefix=prefix, Delimiter=delimiter, MaxKeys=page_keys
    )
    listed, prefixes = [], []
    for page in pages:
        assert page["KeyCount"] <= page_keys
        listed += [entry["Key"] for entry in page.get("Contents", [])]
        prefixes += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
    assert listed == sorted(expected_keys, key=str.encode)
    assert prefixes == sorted(expected_prefixes, key=str.encode)


def test_start_after_excludes_its_key_and_a_bad_token_is_refused(s3: Any) -> None:
    for key in "abc":
        s3.put_object(Bucket="bucket", Key=key)
    listed = s3.list_objects_v2(Bucket="bucket", StartAfter="a")["Contents"]
    assert [entry["Key"] for entry in listed] == ["b", "c"]
    assert refusal(s3.list_objects_v2, Bucket="bucket", ContinuationToken="b") == (400, "InvalidArgument")


def test_a_listing_is_url_encoded_only_on_request(server: launch.Server, s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="a b+c&é\x01/")
    with RawConnection(server) as connection:
        plain = connection.exchange(request_bytes(server, "GET", "/bucket?list-type=2")).body.decode()
        encoded = connection.exchange(request_bytes(server, "GET", "/bucket?list-type=2&encoding-type=url"))
    assert "<Key>a b+c&amp;é&#x1;/</Key>" in plain and "EncodingType" not in plain
    assert b"<Key>a+b%2Bc%26%C3%A9%01/</Key>" in encoded.body
    assert b"<EncodingType>url</EncodingType>" in encoded.body


def test_the_page_limit_can_be_lowered(s3: Any, control: Control) -> None:
    control.limits(max_keys=2)
    for key in "abc":
        s3.put_object(Bucket="bucket", Key=key)
    page = s3.list_objects_v2(Bucket="bucket")
    assert (page["KeyCount"], page["MaxKeys"], page["IsTruncated"]) == (2, 2, True)


@pytest.mark.parametrize(
    ("wanted", "body", "content_range"),
    [
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=8-99", b"89", "bytes 8-9/10"),
        ("bytes=-99", b"0123456789", "bytes 0-9/10"),
    ],
)
def test_a_range_returns_206_with_its_bytes(s3: Any, wanted: str, body: bytes, content_range: str) -> None:
    s3.put_object(Bucket="bucket", Key="key", Body=b"0123456789")
    answer = s3.get_object(Bucket="bucket", Key="key", Range=wanted)
    assert (answer["Body"].read(), answer["ContentRange"]) == (body, content_range)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert s3.head_object(Bucket="bucket", Key="key", Range=wanted)["ContentLength"] == len(body)


@pytest.mark.parametrize(("content", "wanted"), [(b"0123", "bytes=4-"), (b"", "bytes=0-"), (b"", "bytes=-1")])
def test_a_range_beyond_the_object_returns_416(s3: Any, content: bytes, wanted: str) -> None:
    s3.put_object(Bucket="bucket", Key="key", Body=content)
    assert refusal(s3.get_object, Bucket="bucket", Key="key", Range=wanted) == (416, "InvalidRange")


def test_failed_conditions_return_304_and_412(s3: Any) -> None:
    etag = s3.put_object(Bucket="bucket", Key="key", Body=b"1", IfNoneMatch="*")["ETag"]
    named = {"Bucket": "bucket", "Key": "key"}
    assert s3.get_object(**named, IfMatch=etag)["ETag"] == etag == f'"{hashlib.md5(b"1").hexdigest()}"'
    assert refusal(s3.get_object, **named, IfMatch='"other"') == (412, "PreconditionFailed")
    assert refusal(s3.get_object, **named, IfNoneMatch=etag) == (304, "304")
    assert refusal(s3.put_object, **named, IfNoneMatch="*") == (412, "PreconditionFailed")
    assert refusal(s3.put_object, **named, IfMatch='"other"') == (412, "PreconditionFailed")
    assert refusal(s3.put_object, Bucket="bucket", Key="none", IfMatch=etag) == (404, "NoSuchKey")
    source = {"Bucket": "bucket", "Key": "key"}
    copy = {"Bucket": "bucket", "Key": "copy", "CopySource": source}
    assert refusal(s3.copy_object, **copy, CopySourceIfMatch='"other"') == (412, "PreconditionFailed")
    s3.put_object(**named, Body=b"2", IfMatch=etag)


def test_attributes_are_kept_and_copied_or_replaced(s3: Any) -> None:
    said = {
        "ContentType": "text/plain",
        "CacheControl": "no-cache",
        "ContentDisposition": "inline",
        "ContentEncoding": "gzip",
        "ContentLanguage": "de",
        "StorageClass": "STANDARD_IA",
        "Metadata": {"one": "1", "two": "zwei  zwei"},
    }
    s3.put_object(Bucket="bucket", Key="key", Body=b"1", Tagging="a=b&c=d%20e", **said)
    head = s3.head_object(Bucket="bucket", Key="key")
    assert {name: head[name] for name in said} == said
    tags = s3.get_object_tagging(Bucket="bucket", Key="key")["TagSet"]
    assert tags == [{"Key": "a", "Value": "b"}, {"Key": "c", "Value": "d e"}]
    source = {"Bucket": "bucket", "Key": "key"}
    s3.copy_object(Bucket="bucket", Key="copy", CopySource=source)
    assert s3.head_object(Bucket="bucket", Key="copy")["Metadata"] == said["Metadata"]
    s3.copy_object(Bucket="bucket", Key="copy", CopySource=source, MetadataDirective="REPLACE", Metadata={"x": "y"})
    replaced = s3.head_object(Bucket="bucket", Key="copy")
    assert (replaced["Metadata"], replaced["ContentType"]) == ({"x": "y"}, "binary/octet-stream")
    onto_itself = {**source, "CopySource": source, "StorageClass": "STANDARD_IA"}
    assert refusal(s3.copy_object, **onto_itself) == (400, "InvalidRequest")


# --- Buckets


def test_buckets_are_created_located_listed_and_deleted_when_empty(server: launch.Server, s3: Any) -> None:
    s3.create_bucket(Bucket="europe", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    assert refusal(s3.create_bucket, Bucket="europe") == (409, "BucketAlreadyOwnedByYou")
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["bucket", "europe"]
    first = s3.list_buckets(MaxBuckets=1)
    rest = s3.list_buckets(MaxBuckets=1, ContinuationToken=first["ContinuationToken"])
    assert [page["Buckets"][0]["Name"] for page in (first, rest)] == ["bucket", "europe"]
    assert "ContinuationToken" not in rest and s3.list_buckets(Prefix="eu")["Buckets"] == rest["Buckets"]
    assert refusal(s3.list_buckets, MaxBuckets=1, ContinuationToken="x") == (400, "InvalidArgument")
    europe = boto_client(server, region_name="eu-west-1")
    assert europe.get_bucket_location(Bucket="europe")["LocationConstraint"] == "eu-west-1"
    assert s3.get_bucket_location(Bucket="bucket")["LocationConstraint"] is None
    europe.put_object(Bucket="europe", Key="key")
    assert refusal(europe.delete_bucket, Bucket="europe") == (409, "BucketNotEmpty")
    europe.delete_object(Bucket="europe", Key="key")
    europe.delete_bucket(Bucket="europe")
    assert refusal(europe.list_objects_v2, Bucket="europe") == (404, "NoSuchBucket")


def test_a_bucket_elsewhere_redirects_and_a_wrong_region_error_names_the_right_one(
    server: launch.Server, s3: Any, control: Control
) -> None:
    elsewhere = {"region": "eu-west-1", "endpoint": "s3.eu-west-1.example.com"}
    control.bucket("moved", BucketFlags(elsewhere=elsewhere))
    control.bucket("europe", BucketFlags(region="eu-west-1"))
    with RawConnection(server) as connection:
        moved = connection.exchange(request_bytes(server, "GET", "/moved/key"))
        moved_head = connection.exchange(request_bytes(server, "HEAD", "/moved"))
        wrong = connection.exchange(request_bytes(server, "GET", "/europe/key"))
        unsigned = connection.exchange(request_bytes(server, "HEAD", "/europe", signed=False))
    assert (moved.status, code_in(moved.body)) == (301, "PermanentRedirect")
    assert b"<Endpoint>s3.eu-west-1.example.com</Endpoint>" in moved.body
    assert moved.headers["x-amz-bucket-region"] == moved_head.headers["x-amz-bucket-region"] == "eu-west-1"
    assert (wrong.status, code_in(wrong.body)) == (400, "AuthorizationHeaderMalformed")
    assert b"<Region>eu-west-1</Region>" in wrong.body
    assert (unsigned.status, unsigned.body, unsigned.headers["x-amz-bucket-region"]) == (403, b"", "eu-west-1")
    assert s3.head_bucket(Bucket="bucket")["BucketRegion"] == "us-east-1"


def test_requester_pays_and_public_access_are_flags_of_a_bucket(
    server: launch.Server, s3: Any, control: Control
) -> None:
    control.bucket("bucket", BucketFlags(requester_pays=True))
    assert refusal(s3.put_object, Bucket="bucket", Key="key") == (403, "AccessDenied")
    paid = s3.put_object(Bucket="bucket", Key="key", Body=b"1", RequestPayer="requester")
    assert paid["RequestCharged"] == "requester"
    anonymous = boto_client(server, config=Config(signature_version=UNSIGNED))
    control.bucket("bucket", BucketFlags(requester_pays=False))
    assert refusal(anonymous.get_object, Bucket="bucket", Key="key") == (403, "AccessDenied")
    control.bucket("bucket", BucketFlags(public=True))
    assert anonymous.get_object(Bucket="bucket", Key="key")["Body"].read() == b"1"
    assert refusal(anonymous.put_object, Bucket="bucket", Key="key") == (403, "AccessDenied")


# --- Buckets that behave as those of other servers


def test_a_bucket_may_ignore_the_conditions_of_writes(s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="key", Body=b"first")
    control.bucket("bucket", {"ignores_conditions": True})
    s3.put_object(Bucket="bucket", Key="key", Body=b"second", IfNoneMatch="*")
    upload_id = s3.create_multipart_upload(Bucket="bucket", Key="key")["UploadId"]
    named = {"Bucket": "bucket", "Key": "key", "UploadId": upload_id}
    etag = s3.upload_part(**named, PartNumber=1, Body=b"third")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    s3.complete_multipart_upload(**named, MultipartUpload=parts, IfMatch='"other"')
    assert s3.get_object(Bucket="bucket", Key="key")["Body"].read() == b"third"


def test_a_bucket_may_refuse_bulk_deletes(s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="key")
    control.bucket("bucket", {"no_bulk_delete": True})
    delete = {"Objects": [{"Key": "key"}]}
    assert refusal(s3.delete_objects, Bucket="bucket", Delete=delete) == (501, "NotImplemented")
    s3.delete_object(Bucket="bucket", Key="key")
