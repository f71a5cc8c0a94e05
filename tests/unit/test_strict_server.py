"""Proves the strict server with boto3 as the independent oracle, and with raw sockets. Leaves our own client to others."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore import UNSIGNED  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

from tests.servers import launch
from tests.servers.boto_client import boto_client, refusal
from tests.servers.install import versitygw_path
from tests.servers.raw_client import RawConnection, request_bytes
from tests.servers.strict.accounts import Account, Accounts
from tests.servers.strict.control import BucketFlags, Control, ControlRefused, FaultAction
from tests.servers.strict.errors import S3Error
from tests.servers.strict.faults import Action
from tests.servers.strict.signature import verify_head
from tests.servers.strict.wire import Headers, RequestHead

pytestmark = pytest.mark.timeout(60)

NASTY_KEYS = [
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
REPOSITORY = Path(__file__).resolve().parents[2]
# The published examples of the S3 API reference, "Signature Calculations for the Authorization Header".
EXAMPLE_KEYS = ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
EXAMPLE_MOMENT = datetime(2013, 5, 24, tzinfo=UTC)


@pytest.fixture(scope="module")
def server() -> Iterator[launch.Server]:
    with launch.start("strict") as started:
        yield started


@pytest.fixture(scope="module")
def shared_client(server: launch.Server) -> Any:
    return boto_client(server)


@pytest.fixture
def control(server: launch.Server) -> Control:
    assert server.control is not None
    control = Control(server.control)
    control.reset()
    control.bucket("bucket")
    return control


@pytest.fixture
def s3(shared_client: Any, control: Control) -> Any:
    del control  # It has reset the server and made the bucket.
    return shared_client


def code_in(body: bytes) -> str:
    return body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()


# --- Keys, listings and objects, as boto3 sees them


@pytest.mark.parametrize("key", NASTY_KEYS, ids=lambda key: repr(key[:20]))
def test_a_nasty_key_is_put_read_copied_listed_and_deleted_as_it_is(s3: Any, control: Control, key: str) -> None:
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
def test_pages_of_any_size_make_up_the_same_listing(s3: Any, prefix: str, delimiter: str, page_keys: int) -> None:
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


def test_a_listing_is_url_encoded_only_where_that_is_asked_for(server: launch.Server, s3: Any) -> None:
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
def test_a_range_answers_206_with_its_bytes(s3: Any, wanted: str, body: bytes, content_range: str) -> None:
    s3.put_object(Bucket="bucket", Key="key", Body=b"0123456789")
    answer = s3.get_object(Bucket="bucket", Key="key", Range=wanted)
    assert (answer["Body"].read(), answer["ContentRange"]) == (body, content_range)
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert s3.head_object(Bucket="bucket", Key="key", Range=wanted)["ContentLength"] == len(body)


@pytest.mark.parametrize(("content", "wanted"), [(b"0123", "bytes=4-"), (b"", "bytes=0-"), (b"", "bytes=-1")])
def test_a_range_beyond_the_object_answers_416(s3: Any, content: bytes, wanted: str) -> None:
    s3.put_object(Bucket="bucket", Key="key", Body=content)
    assert refusal(s3.get_object, Bucket="bucket", Key="key", Range=wanted) == (416, "InvalidRange")


def test_conditions_are_met_or_answered_304_and_412(s3: Any) -> None:
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


def test_what_is_said_about_an_object_is_kept_and_copied_or_replaced(s3: Any) -> None:
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


def test_buckets_are_made_located_listed_and_deleted_when_empty(server: launch.Server, s3: Any) -> None:
    s3.create_bucket(Bucket="europe", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    assert refusal(s3.create_bucket, Bucket="europe") == (409, "BucketAlreadyOwnedByYou")
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["bucket", "europe"]
    europe = boto_client(server, region_name="eu-west-1")
    assert europe.get_bucket_location(Bucket="europe")["LocationConstraint"] == "eu-west-1"
    assert s3.get_bucket_location(Bucket="bucket")["LocationConstraint"] is None
    europe.put_object(Bucket="europe", Key="key")
    assert refusal(europe.delete_bucket, Bucket="europe") == (409, "BucketNotEmpty")
    europe.delete_object(Bucket="europe", Key="key")
    europe.delete_bucket(Bucket="europe")
    assert refusal(europe.list_objects_v2, Bucket="europe") == (404, "NoSuchBucket")


def test_a_bucket_elsewhere_redirects_and_a_wrong_region_names_the_right_one(
    server: launch.Server, s3: Any, control: Control
) -> None:
    place = {"region": "eu-west-1", "endpoint": "s3.eu-west-1.example.com"}
    control.bucket("moved", BucketFlags(elsewhere={"region": place["region"], "endpoint": place["endpoint"]}))
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


def test_who_pays_and_who_may_read_unsigned_are_flags_of_a_bucket(
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


# --- Encryption, checksums and parts


def test_an_object_of_a_customers_key_is_read_only_with_that_key(s3: Any) -> None:
    key, other = ({"SSECustomerAlgorithm": "AES256", "SSECustomerKey": letter * 32} for letter in "ab")
    named = {"Bucket": "bucket", "Key": "key"}
    stored = s3.put_object(**named, Body=b"secret", **key)
    assert stored["SSECustomerKeyMD5"] == base64.b64encode(hashlib.md5(b"a" * 32).digest()).decode()
    assert stored["ETag"] != f'"{hashlib.md5(b"secret").hexdigest()}"'
    assert s3.get_object(**named, **key)["Body"].read() == b"secret"
    assert refusal(s3.get_object, **named) == (400, "InvalidRequest")
    assert refusal(s3.get_object, **named, **other) == (403, "AccessDenied")
    assert refusal(s3.head_object, **named) == (400, "400")
    upload = s3.create_multipart_upload(**named, **key)["UploadId"]
    part = {**named, "UploadId": upload, "PartNumber": 1, "Body": b"part"}
    assert refusal(s3.upload_part, **part) == (400, "InvalidRequest")
    assert refusal(s3.upload_part, **part, **other) == (400, "InvalidRequest")
    s3.upload_part(**part, **key)


def test_a_bucket_may_require_kms_whose_headers_are_echoed(s3: Any, control: Control) -> None:
    control.bucket("bucket", BucketFlags(requires_sse_kms=True))
    named = {"Bucket": "bucket", "Key": "key"}
    assert refusal(s3.put_object, **named) == (403, "AccessDenied")
    assert refusal(s3.create_multipart_upload, **named) == (403, "AccessDenied")
    s3.put_object(**named, ServerSideEncryption="aws:kms", SSEKMSKeyId="key-id")
    head = s3.head_object(**named)
    assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "key-id")


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_each_checksum_is_verified_kept_and_returned(s3: Any, algorithm: str) -> None:
    named = {"Bucket": "bucket", "Key": "key"}
    put = s3.put_object(**named, Body=b"content", ChecksumAlgorithm=algorithm)
    value = put[f"Checksum{algorithm}"]
    # boto3 computes it for itself and raises where it is not that of the body.
    answer = s3.get_object(**named, ChecksumMode="ENABLED")
    assert (answer["Body"].read(), answer[f"Checksum{algorithm}"]) == (b"content", value)
    wrong = {f"Checksum{algorithm}": value}
    assert refusal(s3.put_object, **named, Body=b"other", **wrong) == (400, "BadDigest")


def test_a_wrong_md5_or_a_body_other_than_the_signed_one_is_refused(server: launch.Server, s3: Any) -> None:
    md5 = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    assert refusal(s3.put_object, Bucket="bucket", Key="key", Body=b"1", ContentMD5=md5) == (400, "BadDigest")
    with RawConnection(server) as connection:
        sent = request_bytes(server, "PUT", "/bucket/key", body=b"signed")
        answer = connection.exchange(sent.replace(b"\r\n\r\nsigned", b"\r\n\r\nforged"))
    assert (answer.status, code_in(answer.body)) == (400, "XAmzContentSHA256Mismatch")


def test_deleting_many_needs_a_checksum(server: launch.Server, s3: Any) -> None:
    del s3
    body = b"<Delete><Object><Key>key</Key></Object></Delete>"
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, "POST", "/bucket?delete=", body=body))
    assert (answer.status, code_in(answer.body)) == (400, "InvalidRequest")


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("CRC32", "COMPOSITE"), ("CRC32C", "FULL_OBJECT"), ("CRC64NVME", "FULL_OBJECT"), ("SHA256", "COMPOSITE")],
)
def test_a_multipart_upload_ends_as_one_object(s3: Any, control: Control, algorithm: str, kind: str) -> None:
    control.limits(min_part_bytes=10)
    named = {"Bucket": "bucket", "Key": "dir//ü +%"}
    bodies = [b"a" * 10, b"b" * 11, b"c"]
    upload = s3.create_multipart_upload(**named, ChecksumAlgorithm=algorithm, ChecksumType=kind, Metadata={"a": "b"})[
        "UploadId"
    ]
    s3.upload_part(**named, UploadId=upload, PartNumber=2, Body=b"replaced", ChecksumAlgorithm=algorithm)
    parts = []
    for number, body in enumerate(bodies, start=1):
        part = s3.upload_part(**named, UploadId=upload, PartNumber=number, Body=body, ChecksumAlgorithm=algorithm)
        element = f"Checksum{algorithm}"
        parts.append({"PartNumber": number, "ETag": part["ETag"], element: part[element]})
    listed = s3.list_parts(**named, UploadId=upload, MaxParts=2)
    assert ([part["Size"] for part in listed["Parts"]], listed["IsTruncated"]) == ([10, 11], True)
    assert [entry["Key"] for entry in s3.list_multipart_uploads(Bucket="bucket")["Uploads"]] == [named["Key"]]
    done = s3.complete_multipart_upload(**named, UploadId=upload, MultipartUpload={"Parts": parts})
    md5s = b"".join(hashlib.md5(body).digest() for body in bodies)
    assert done["ETag"] == f'"{hashlib.md5(md5s).hexdigest()}-3"'
    assert done[element].endswith("-3") == (kind == "COMPOSITE")
    answer = s3.get_object(**named, ChecksumMode="ENABLED")
    assert (answer["Body"].read(), answer["Metadata"]) == (b"".join(bodies), {"a": "b"})
    again = {**named, "UploadId": upload, "MultipartUpload": {"Parts": parts}}
    assert refusal(s3.complete_multipart_upload, **again) == (404, "NoSuchUpload")


def test_a_list_of_parts_that_is_wrong_completes_nothing(s3: Any, control: Control) -> None:
    named = {"Bucket": "bucket", "Key": "key"}
    upload = s3.create_multipart_upload(**named, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT")["UploadId"]
    parts = [
        {"PartNumber": n, "ETag": s3.upload_part(**named, UploadId=upload, PartNumber=n, Body=b"small")["ETag"]}
        for n in (1, 2)
    ]

    def complete(listed: list[dict[str, Any]], **more: Any) -> tuple[int, str]:
        return refusal(
            s3.complete_multipart_upload, **named, UploadId=upload, MultipartUpload={"Parts": listed}, **more
        )

    assert complete(parts) == (400, "EntityTooSmall")
    control.limits(min_part_bytes=1)
    assert complete(parts[::-1]) == (400, "InvalidPartOrder")
    assert complete([parts[0], {"PartNumber": 3, "ETag": "none"}]) == (400, "InvalidPart")
    assert complete([]) == (400, "MalformedXML")
    assert complete([{**parts[0], "ChecksumCRC32": "AAAAAA=="}]) == (400, "InvalidPart")
    assert complete(parts, ChecksumCRC32="AAAAAA==") == (400, "BadDigest")
    s3.put_object(**named, Body=b"there")
    assert complete(parts, IfNoneMatch="*") == (412, "PreconditionFailed")
    s3.abort_multipart_upload(**named, UploadId=upload)
    assert complete(parts) == (404, "NoSuchUpload")
    assert s3.get_object(**named)["Body"].read() == b"there"


def test_parts_are_copied_from_ranges_of_objects(s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="source key", Body=b"0123456789")
    named = {"Bucket": "bucket", "Key": "key"}
    upload = s3.create_multipart_upload(**named)["UploadId"]
    source = {"CopySource": {"Bucket": "bucket", "Key": "source key"}, "CopySourceRange": "bytes=2-5"}
    copied = s3.upload_part_copy(**named, UploadId=upload, PartNumber=1, **source)["CopyPartResult"]
    parts = [{"PartNumber": 1, "ETag": copied["ETag"]}]
    s3.complete_multipart_upload(**named, UploadId=upload, MultipartUpload={"Parts": parts})
    assert s3.get_object(**named)["Body"].read() == b"2345"


# --- Signatures


def test_a_wrong_secret_an_unknown_key_and_no_signature_are_refused(server: launch.Server, s3: Any) -> None:
    del s3
    named = {"Bucket": "bucket", "Key": "key"}
    wrong = boto_client(server, aws_secret_access_key="wrong")
    assert refusal(wrong.put_object, **named) == (403, "SignatureDoesNotMatch")
    unknown = boto_client(server, aws_access_key_id="AKIAUNKNOWN")
    assert refusal(unknown.put_object, **named) == (403, "InvalidAccessKeyId")
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, "GET", "/bucket/key", signed=False))
    assert (answer.status, code_in(answer.body)) == (403, "AccessDenied")
    assert f"<RequestId>{answer.headers['x-amz-request-id']}</RequestId>".encode() in answer.body


@pytest.mark.parametrize(
    ("signed", "sent", "refused"),
    [
        ("/bucket/key", "/bucket/other", "SignatureDoesNotMatch"),
        ("GET /", "HEAD /", ""),
        ("x-amz-meta-a: b", "x-amz-meta-a: c", "SignatureDoesNotMatch"),
        ("x-amz-meta-a: b", "x-amz-meta-a: b\r\nx-amz-meta-c: d", "AccessDenied"),
        ("Host: 127", "Host: x127", "SignatureDoesNotMatch"),
        ("/s3/aws4_request", "/ec2/aws4_request", "AuthorizationHeaderMalformed"),
        ("SignedHeaders=host;", "SignedHeaders=", "AccessDenied"),
        ("AWS4-HMAC-SHA256 C", "AWS2-HMAC-SHA256 C", "InvalidRequest"),
    ],
)
def test_a_head_that_was_tampered_with_is_refused(
    server: launch.Server, control: Control, signed: str, sent: str, refused: str
) -> None:
    del control
    content = request_bytes(server, "GET", "/bucket/key", headers={"x-amz-meta-a": "b"})
    assert signed.encode() in content
    with RawConnection(server) as connection:
        answer = connection.exchange(content.replace(signed.encode(), sent.encode(), 1))
    assert answer.status in (400, 403)
    assert code_in(answer.body) == refused


def test_temporary_credentials_need_their_token_until_they_expire(server: launch.Server, control: Control) -> None:
    control.account("ASIATEMPORARY", "temporary secret", token="to/ken+=", expires_in_s=600)
    keys = {"aws_access_key_id": "ASIATEMPORARY", "aws_secret_access_key": "temporary secret"}
    temporary = boto_client(server, **keys, aws_session_token="to/ken+=")
    temporary.put_object(Bucket="bucket", Key="key")
    for token in (None, "other"):
        other = boto_client(server, **keys, aws_session_token=token)
        assert refusal(other.get_object, Bucket="bucket", Key="key") == (403, "InvalidToken")
    control.clock(offset_s=601)
    assert refusal(temporary.get_object, Bucket="bucket", Key="key") == (400, "ExpiredToken")


def test_a_clock_more_than_15_minutes_off_is_refused(s3: Any, control: Control) -> None:
    for offset_s in (-890.0, 890.0):
        control.clock(offset_s)
        s3.put_object(Bucket="bucket", Key="key")
    for offset_s in (-910.0, 910.0):
        control.clock(offset_s)
        assert refusal(s3.put_object, Bucket="bucket", Key="key") == (403, "RequestTimeTooSkewed")


EMPTY_SHA256 = hashlib.sha256().hexdigest()
ON_BUCKET = "host:examplebucket.s3.amazonaws.com"
CHUNKED = (
    "PUT /examplebucket/chunkObject.txt",
    "host:s3.amazonaws.com",
    "content-encoding:aws-chunked",
    "x-amz-decoded-content-length:66560",
    "x-amz-storage-class:REDUCED_REDUNDANCY",
)
# name: (request line's first words and the headers but x-amz-date, the signature)
EXAMPLES = {
    "GetObject": (
        ["GET /test.txt", ON_BUCKET, "range:bytes=0-9", f"x-amz-content-sha256:{EMPTY_SHA256}"],
        "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
    "PutObject": (
        [
            "PUT /test%24file.text",
            "date:Fri, 24 May 2013 00:00:00 GMT",
            ON_BUCKET,
            "x-amz-storage-class:REDUCED_REDUNDANCY",
            f"x-amz-content-sha256:{hashlib.sha256(b'Welcome to Amazon S3.').hexdigest()}",
        ],
        "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
    ),
    "ListObjects": (
        ["GET /?max-keys=2&prefix=J", ON_BUCKET, f"x-amz-content-sha256:{EMPTY_SHA256}"],
        "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
    "chunks": (
        [*CHUNKED, "content-length:66824", "x-amz-content-sha256:STREAMING-AWS4-HMAC-SHA256-PAYLOAD"],
        "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
    ),
    "chunks and trailer": (
        [
            *CHUNKED,
            "x-amz-content-sha256:STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
            "x-amz-trailer:x-amz-checksum-crc32c",
        ],
        "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
    ),
}
EXAMPLE_CHUNKS = {
    "chunks": [
        "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ],
    "chunks and trailer": [
        "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
    ],
}
EXAMPLE_TRAILER = (
    "x-amz-checksum-crc32c:sOO8/Q==\r\n"
    "x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n"
)


def example_head(name: str) -> tuple[str, list[tuple[str, str]]]:
    """Returns the request line's first two words and the headers of a published example, all of them signed."""
    described, signature = EXAMPLES[name]
    line, *headers = [*described, "x-amz-date:20130524T000000Z"]
    items = [(header, value) for header, _, value in (text.partition(":") for text in headers)]
    signed = ";".join(sorted(header for header, _ in items))
    scope = f"{EXAMPLE_KEYS[0]}/20130524/us-east-1/s3/aws4_request"
    authorization = f"AWS4-HMAC-SHA256 Credential={scope},SignedHeaders={signed},Signature={signature}"
    return line, [*items, ("authorization", authorization)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_published_example_is_verified_and_one_altered_is_not(name: str) -> None:
    line, items = example_head(name)
    method, target = line.split()
    accounts = Accounts()
    accounts.add(Account(*EXAMPLE_KEYS))
    identity = verify_head(RequestHead(method, target, Headers(items)), accounts, EXAMPLE_MOMENT.timestamp())
    assert identity is not None and identity.account.access_key == EXAMPLE_KEYS[0]
    with pytest.raises(S3Error, match="does not match"):
        verify_head(RequestHead(method, target + "x", Headers(items)), accounts, EXAMPLE_MOMENT.timestamp())


@pytest.mark.parametrize(
    ("name", "altered"),
    [
        *((name, altered) for name in EXAMPLE_CHUNKS for altered in ("nothing", "a byte", "a signature")),
        ("chunks and trailer", "the trailer"),
    ],
)
def test_published_chunks_are_verified_and_altered_ones_are_not(
    server: launch.Server, control: Control, name: str, altered: str
) -> None:
    control.account(*EXAMPLE_KEYS)
    control.clock((EXAMPLE_MOMENT - datetime.now(UTC)).total_seconds())
    control.bucket("examplebucket", BucketFlags(public=True))
    line, items = example_head(name)
    chunks = [b"a" * 65536, b"a" * 1024, b""]
    framed = (
        b"%x;chunk-signature=%s\r\n%s" % (len(chunk), signature.encode(), chunk and chunk + b"\r\n")
        for chunk, signature in zip(chunks, EXAMPLE_CHUNKS[name], strict=True)
    )
    trailer = EXAMPLE_TRAILER.encode() if "trailer" in name else b""
    body = b"".join(framed) + trailer + b"\r\n"
    if altered == "a byte":
        body = body.replace(b"aaaaa", b"aabaa", 1)
    if altered == "a signature":
        body = body.replace(EXAMPLE_CHUNKS[name][2].encode(), EXAMPLE_CHUNKS[name][1].encode())
    if altered == "the trailer":
        body = body.replace(b"sOO8", b"sOO9")
    headers = dict(items) | {"content-length": str(len(body))}
    head = "\r\n".join([f"{line} HTTP/1.1", *(f"{header}: {value}" for header, value in headers.items()), "", ""])
    with RawConnection(server) as connection:
        answer = connection.exchange(head.encode() + body)
        refused = (403, "SignatureDoesNotMatch")
        assert (answer.status, code_in(answer.body)) == ((200, "") if altered == "nothing" else refused)
        if altered == "nothing":
            read = connection.exchange(request_bytes(server, "GET", "/examplebucket/chunkObject.txt", signed=False))
            assert read.body == b"a" * 66560
            assert "content-encoding" not in read.headers


# --- HTTP


@pytest.mark.parametrize(
    "head",
    [
        b"GET /bucket/key HTTP/1.1\n\n",
        b"GET /bucket/key HTTP/1.1\r\n\r\n",
        b"GET /bucket/key\r\nHost: a\r\n\r\n",
        b"GET  /bucket/key HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /bucket/a b HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /bucket/a#b HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /bucket/%zz HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /bucket/\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://a/bucket HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nLong: " + b"x" * 9000 + b"\r\n\r\n",
    ],
)
def test_a_malformed_head_is_answered_400_and_closes(server: launch.Server, head: bytes) -> None:
    with RawConnection(server) as connection:
        answer = connection.exchange(head)
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        connection.finish_sending()
        assert connection.receive_all() == b""


def test_a_put_needs_a_length_and_no_transfer_encoding(server: launch.Server, control: Control) -> None:
    del control
    content = request_bytes(server, "PUT", "/bucket/key")
    with RawConnection(server) as connection:
        answer = connection.exchange(content.replace(b"Content-Length: 0\r\n", b""))
    assert (answer.status, code_in(answer.body)) == (411, "MissingContentLength")
    with RawConnection(server) as connection:
        answer = connection.exchange(content.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
    assert (answer.status, code_in(answer.body)) == (501, "NotImplemented")


def test_a_copy_which_has_no_body_needs_no_length(server: launch.Server, s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="key")
    content = request_bytes(server, "PUT", "/bucket/copy", headers={"x-amz-copy-source": "bucket/key"})
    with RawConnection(server) as connection:
        assert connection.exchange(content.replace(b"Content-Length: 0\r\n", b"")).status == 200


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/bucket?acl"),
        ("GET", "/bucket"),
        ("GET", "/bucket/key?versionId=1"),
        ("PUT", "/bucket/key?tagging"),
        ("GET", "/bucket/key?partNumber=1"),
        ("POST", "/bucket/key?restore"),
    ],
)
def test_what_is_not_implemented_is_answered_501(
    server: launch.Server, control: Control, method: str, target: str
) -> None:
    del control
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, method, target))
        assert (answer.status, code_in(answer.body)) == (501, "NotImplemented")
        # The connection goes on, and SDKs' x-id is no unknown parameter.
        assert connection.exchange(request_bytes(server, "GET", "/bucket/key?x-id=GetObject")).status == 404


def test_a_client_that_expects_100_gets_it_or_the_refusal_without_sending(
    server: launch.Server, control: Control
) -> None:
    del control
    content = request_bytes(server, "PUT", "/bucket/key", headers={"Expect": "100-continue"}, body=b"content")
    head, body = content[:-7], content[-7:]
    with RawConnection(server) as connection:
        connection.send(head)
        assert connection.receive(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.send(body)
        assert connection.answer().status == 200
    with RawConnection(server) as connection:
        connection.send(head.replace(b"/bucket/key", b"/bucket/other"))
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")


def test_an_error_of_head_has_no_body_and_keeps_the_connection(server: launch.Server, control: Control) -> None:
    del control
    with RawConnection(server) as connection:
        for _ in range(2):
            answer = connection.exchange(request_bytes(server, "HEAD", "/bucket/none"))
            assert (answer.status, answer.body) == (404, b"")


def test_a_bucket_may_be_named_by_the_host(server: launch.Server, s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="a//b", Body=b"content")
    control.bucket("dotted.bucket")
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, "GET", "/a//b", host="bucket.s3.localhost:9"))
        dotted = connection.exchange(request_bytes(server, "GET", "/?location", host="dotted.bucket.s3.localhost"))
    assert answer.body == b"content"
    assert dotted.status == 200


# --- Faults: each does what it says

BODY = bytes(range(256)) * 40


@pytest.fixture
def struck(server: launch.Server, s3: Any, control: Control) -> Iterator[Callable[[FaultAction], RawConnection]]:
    """Returns a function that scripts one fault of GetObject and sends one on a new connection."""
    s3.put_object(Bucket="bucket", Key="key", Body=BODY)
    connections: list[RawConnection] = []

    def strike(action: FaultAction, **headers: str) -> RawConnection:
        control.faults({"operation": "GetObject", "times": 1, "action": action})
        connections.append(RawConnection(server))
        connections[-1].send(request_bytes(server, "GET", "/bucket/key", headers=headers))
        return connections[-1]

    yield strike
    for connection in connections:
        connection.close()


Strike = Callable[..., RawConnection]


def serves_on(server: launch.Server, connection: RawConnection) -> bool:
    """Whether a connection answers one more request, as it should."""
    try:
        return connection.exchange(request_bytes(server, "GET", "/bucket/key")).body == BODY
    except ConnectionError:
        return False


def test_a_status_fault_answers_its_error_and_no_more_than_it_should(server: launch.Server, struck: Strike) -> None:
    connection = struck({"status": 503, "code": "SlowDown", "headers": {"Retry-After": "2"}})
    answer = connection.answer()
    assert (answer.status, code_in(answer.body), answer.headers["retry-after"]) == (503, "SlowDown", "2")
    assert serves_on(server, connection)
    answer = struck({"status": 502, "body": "<html>", "headers": {"Content-Type": "text/html"}}).answer()
    assert (answer.status, answer.body, answer.headers["content-type"]) == (502, b"<html>", "text/html")


@pytest.mark.parametrize(("cut", "left"), [(0.5, len(BODY) // 2), (100, 100), (0, 0)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_cut_body_ends_early_with_fin(struck: Strike, cut: float, left: int, chunked: bool) -> None:
    answer = struck({"cut_body": cut, "chunked": chunked}).answer()
    assert (answer.status, answer.complete, answer.body) == (200, False, BODY[:left])


def test_a_cut_body_with_reset_ends_early_with_rst(struck: Strike) -> None:
    connection = struck({"cut_body": 100, "reset": True})
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.receive(1)
    assert connection.receive(100) == BODY[:100]
    with pytest.raises(ConnectionResetError):
        connection.receive(1)


@pytest.mark.parametrize("when", ["before_head", "after_request"])
def test_a_reset_comes_without_an_answer_and_without_the_operation(
    server: launch.Server, s3: Any, control: Control, when: Any
) -> None:
    control.faults({"operation": "PutObject", "action": {"reset": when}})
    with RawConnection(server) as connection, pytest.raises(ConnectionResetError):
        connection.send(request_bytes(server, "PUT", "/bucket/key", body=b"content"))
        connection.receive(1)
    assert refusal(s3.head_object, Bucket="bucket", Key="key") == (404, "404")
    received = {"before_head": 0, "after_request": 7}
    assert control.requests("PutObject")[0].bytes_received == received[when]


def test_a_lost_response_comes_after_the_operation(server: launch.Server, s3: Any, control: Control) -> None:
    control.faults({"operation": "PutObject", "action": {"lose_response": True}})
    with RawConnection(server) as connection, pytest.raises(ConnectionResetError):
        connection.send(request_bytes(server, "PUT", "/bucket/key", body=b"content"))
        connection.receive(1)
    assert s3.get_object(Bucket="bucket", Key="key")["Body"].read() == b"content"


def test_the_range_of_an_answer_can_be_wrong_ignored_or_short(struck: Strike) -> None:
    wanted = {"Range": "bytes=10-19"}
    wrong = struck({"wrong_content_range": True}, **wanted).answer()
    assert (wrong.headers["content-range"], wrong.body) == (f"bytes 11-20/{len(BODY)}", BODY[10:20])
    ignored = struck({"ignore_range": True}, **wanted).answer()
    assert (ignored.status, ignored.body) == (200, BODY)
    short = struck({"shorter_length": 3}, **wanted).answer()
    assert (short.status, short.body, short.headers["content-length"]) == (206, BODY[10:17], "7")
    assert short.headers["content-range"] == f"bytes 10-19/{len(BODY)}"


def test_a_corrupt_byte_is_the_only_one(struck: Strike) -> None:
    answer = struck({"corrupt_byte_at": 5}).answer()
    assert answer.body == BODY[:5] + bytes([BODY[5] ^ 0xFF]) + BODY[6:]


def test_a_longer_body_leaves_bytes_on_the_connection(struck: Strike) -> None:
    connection = struck({"longer_body": 4})
    assert connection.answer().body == BODY
    assert connection.receive(4) == b"\xee" * 4


def test_framing_can_be_chunked_or_by_the_end_of_the_connection(server: launch.Server, struck: Strike) -> None:
    connection = struck({"chunked": True})
    answer = connection.answer()
    assert (answer.headers["transfer-encoding"], answer.body) == ("chunked", BODY)
    assert "content-length" not in answer.headers
    assert serves_on(server, connection)
    answer = struck({"no_length": True}).answer()
    assert (answer.body, answer.headers["connection"]) == (BODY, "close")
    assert not {"content-length", "transfer-encoding"} & set(answer.headers)


@pytest.mark.parametrize(
    "action",
    [
        FaultAction(delay_first_byte_s=0.2),
        FaultAction(stall_body_at=100, stall_s=0.2),
        FaultAction(stall_body_at=len(BODY), stall_s=0.2, chunked=True),
        FaultAction(slow_drip=len(BODY) * 4.0),
    ],
)
def test_a_slow_answer_is_late_and_whole(struck: Strike, action: FaultAction) -> None:
    began_s = time.monotonic()
    answer = struck(action).answer()
    assert answer.body == BODY
    assert time.monotonic() - began_s >= 0.18


def test_a_stall_comes_after_the_bytes_before_it(struck: Strike) -> None:
    connection = struck({"stall_body_at": 100, "stall_s": 30.0})
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.receive(1)
    assert connection.receive(100) == BODY[:100]
    with pytest.raises(TimeoutError):
        connection.receive(1, timeout_s=0.1)


def test_an_error_may_come_with_status_200(s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="key")
    control.faults({"operation": "CopyObject", "action": {"error_in_200": "InternalError"}})
    source = {"Bucket": "bucket", "Key": "key"}
    # boto3 knows of such answers and makes them the errors that they are.
    assert refusal(s3.copy_object, Bucket="bucket", Key="copy", CopySource=source)[1] == "InternalError"
    assert control.requests("CopyObject")[0].status == 200
    assert refusal(s3.head_object, Bucket="bucket", Key="copy") == (404, "404")


def test_a_connection_may_go_stale_after_an_answer(server: launch.Server, struck: Strike) -> None:
    connection = struck({"close_after": True})
    answer = connection.answer()
    assert answer.body == BODY
    assert "connection" not in answer.headers
    assert not serves_on(server, connection)


@pytest.mark.parametrize("status", [100, 103])
def test_an_informational_answer_may_precede(server: launch.Server, struck: Strike, status: int) -> None:
    connection = struck({"informational": status})
    answer = connection.answer()
    assert (answer.preceding, answer.status, answer.body) == ((status,), 200, BODY)
    assert serves_on(server, connection)


def test_an_early_response_comes_before_the_body_is_sent(server: launch.Server, control: Control) -> None:
    control.faults({"operation": "PutObject", "action": {"early_response": 503}})
    content = request_bytes(server, "PUT", "/bucket/key", body=b"x" * 1000)
    with RawConnection(server) as connection:
        connection.send(content[:-1000])
        answer = connection.answer()
    assert (answer.status, code_in(answer.body), answer.headers["connection"]) == (503, "SlowDown", "close")


def test_rules_choose_by_key_skip_times_and_probability(s3: Any, control: Control) -> None:
    action: FaultAction = {"status": 503}
    control.faults(
        {"operation": "HeadObject", "key": "^a", "skip": 1, "times": 2, "action": action},
        {"key": "^p", "probability": 0.5, "seed": 7, "action": action},
    )
    statuses = [refusal(s3.head_object, Bucket="bucket", Key=key)[0] for key in "abaaa"]
    assert statuses == [404, 404, 503, 503, 404]
    drawn = [refusal(s3.head_object, Bucket="bucket", Key="p")[0] for _ in range(20)]
    assert set(drawn) == {404, 503}
    report = control.fault_report()
    assert [(rule["matched"], rule["fired"]) for rule in report] == [(4, 2), (20, drawn.count(503))]
    control.faults({"key": "^p", "probability": 0.5, "seed": 7, "action": action})
    assert [refusal(s3.head_object, Bucket="bucket", Key="p")[0] for _ in range(20)] == drawn
    control.clear_faults()
    assert refusal(s3.head_object, Bucket="bucket", Key="p")[0] == 404


@pytest.mark.parametrize(
    "rule",
    [{"operation": "GetObjekt", "action": {"status": 503}}, {"action": {"cut_bodi": 1}}, {"action": {"cut_body": 1.5}}],
)
def test_a_rule_that_no_request_could_meet_is_refused(control: Control, rule: Any) -> None:
    with pytest.raises(ControlRefused):
        control.faults(rule)


def test_the_client_of_the_control_api_knows_every_fault() -> None:
    assert set(FaultAction.__annotations__) == {spec.name for spec in fields(Action)}


# --- What the control API tells


def test_the_log_tells_each_request_and_how_it_was_answered(s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="a b", Body=b"0123456789")
    control.forget_requests()
    s3.get_object(Bucket="bucket", Key="a b", Range="bytes=0-3")["Body"].read()
    refusal(s3.get_object, Bucket="bucket", Key="none")
    first, second = control.requests()
    assert (first.operation, first.method, first.target, first.bucket, first.key) == (
        ("GetObject", "GET", "/bucket/a%20b", "bucket", "a b")
    )
    assert (first.status, first.bytes_sent, first.headers["range"]) == (206, 4, "bytes=0-3")
    assert (second.status, second.code, second.fault) == (404, "NoSuchKey", None)
    assert first.headers["user-agent"].startswith("Boto3") and "authorization" not in first.headers


def test_idle_connections_are_counted_and_can_be_closed(server: launch.Server, control: Control) -> None:
    before = control.connections()
    with RawConnection(server) as one, RawConnection(server) as other:
        for connection in (one, other):
            connection.exchange(request_bytes(server, "GET", "/bucket/none"))
        counted = control.connections()
        assert (counted.total_accepted - before.total_accepted, counted.open - before.open) == (2, 2)
        assert control.close_idle() >= 2
        assert one.receive(1) == other.receive(1) == b""
    assert control.connections().open == 0


# --- Processes


def test_tls_makes_boto3_send_trailers_which_are_verified() -> None:
    with launch.start("strict", "--tls") as server:
        s3 = boto_client(server)
        s3.create_bucket(Bucket="bucket")
        s3.put_object(Bucket="bucket", Key="key", Body=io.BytesIO(b"content"), ContentEncoding="gzip")
        answer = s3.get_object(Bucket="bucket", Key="key", ChecksumMode="ENABLED")
        assert (answer["Body"].read(), answer["ContentEncoding"]) == (b"content", "gzip")
        assert server.control is not None
        put = Control(server.control).requests("PutObject")[0]
        assert put.headers["x-amz-content-sha256"] == "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
        Control(server.control).faults({"operation": "GetObject", "action": {"cut_body": 3, "reset": True}})
        with RawConnection(server) as connection:
            connection.send(request_bytes(server, "GET", "/bucket/key"))
            with pytest.raises((ConnectionResetError, ssl.SSLEOFError)):
                connection.receive_all()


@pytest.mark.parametrize("kind", ["moto", "versitygw"])
def test_the_other_servers_start_and_keep_connections(kind: str) -> None:
    if kind == "versitygw" and not versitygw_path().exists():
        pytest.skip("python -m tests.servers install")
    with launch.start(kind) as server:
        s3 = boto_client(server)
        s3.create_bucket(Bucket="bucket")
        s3.put_object(Bucket="bucket", Key="dir/key", Body=b"content", Metadata={"a": "b"})
        answer = s3.get_object(Bucket="bucket", Key="dir/key")
        assert (answer["Body"].read(), answer["Metadata"]) == (b"content", {"a": "b"})
        assert [entry["Key"] for entry in s3.list_objects_v2(Bucket="bucket")["Contents"]] == ["dir/key"]
        with RawConnection(server) as connection:
            for _ in range(2):
                assert connection.exchange(request_bytes(server, "GET", "/bucket/dir/key")).body == b"content"
            # What is in a refused request's body must not be taken for the next request.
            assert connection.exchange(request_bytes(server, "PUT", "/none/key", body=b"content")).status == 404
            assert connection.exchange(request_bytes(server, "GET", "/bucket/dir/key")).body == b"content"


def test_a_server_ends_with_its_stdin_and_removes_what_it_made() -> None:
    command = [sys.executable, "-m", "tests.servers", "serve", "strict", "--tls"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said["pid"] == process.pid and os.path.exists(said["ca_file"])
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 0
    assert not os.path.exists(said["ca_file"])


def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(launch.StartFailed, match="unrecognized arguments: --no-such-option"):
        launch.start("strict", "--no-such-option")
