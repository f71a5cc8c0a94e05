"""Tests the strict server's encryption, checksums and multipart uploads."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.boto_client import refusal
from tests.servers.raw_client import RawConnection, request_bytes
from tests.strict.control import BucketFlags, Control
from tests.strict.tests.answers import code_in

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]


def test_an_object_encrypted_with_a_customer_key_is_readable_only_with_that_key(s3: Any) -> None:
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


def test_a_bucket_can_require_kms_and_echoes_its_headers(s3: Any, control: Control) -> None:
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
    # boto3 computes the checksum too and raises if it differs.
    answer = s3.get_object(**named, ChecksumMode="ENABLED")
    assert (answer["Body"].read(), answer[f"Checksum{algorithm}"]) == (b"content", value)
    wrong = {f"Checksum{algorithm}": value}
    assert refusal(s3.put_object, **named, Body=b"other", **wrong) == (400, "BadDigest")


def test_a_wrong_md5_or_a_changed_signed_body_is_refused(server: launch.Server, s3: Any) -> None:
    md5 = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    assert refusal(s3.put_object, Bucket="bucket", Key="key", Body=b"1", ContentMD5=md5) == (400, "BadDigest")
    with RawConnection(server) as connection:
        sent = request_bytes(server, "PUT", "/bucket/key", body=b"signed")
        answer = connection.exchange(sent.replace(b"\r\n\r\nsigned", b"\r\n\r\nforged"))
    assert (answer.status, code_in(answer.body)) == (400, "XAmzContentSHA256Mismatch")


def test_deleting_many_objects_needs_a_checksum(server: launch.Server, s3: Any) -> None:
    del s3
    body = b"<Delete><Object><Key>key</Key></Object></Delete>"
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, "POST", "/bucket?delete=", body=body))
    assert (answer.status, code_in(answer.body)) == (400, "InvalidRequest")


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("CRC32", "COMPOSITE"), ("CRC32C", "FULL_OBJECT"), ("CRC64NVME", "FULL_OBJECT"), ("SHA256", "COMPOSITE")],
)
def test_a_completed_multipart_upload_is_one_object(s3: Any, control: Control, algorithm: str, kind: str) -> None:
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


def test_a_wrong_list_of_parts_does_not_complete_the_upload(s3: Any, control: Control) -> None:
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
