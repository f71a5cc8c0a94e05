"""The checkpoint benchmark runs, and its origin implements S3 as far as the clients need it."""

import http.client
import io
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from benchmarks.lab import origin

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the origin is for Linux")


@pytest.fixture(scope="module")
def running():
    with origin.running() as found:
        yield found


def test_the_origin_keeps_objects_in_memory(running):
    location, content = running.memory, os.urandom(20_000_000)
    s3 = location.boto3()
    s3.upload_fileobj(io.BytesIO(content), location.bucket, "a folder/in parts")
    s3.put_object(Bucket=location.bucket, Key="a folder/whole", Body=content[:1000])
    whole = io.BytesIO()
    s3.download_fileobj(location.bucket, "a folder/in parts", whole)
    assert whole.getvalue() == content
    for text, expected in (
        ("bytes=-5", content[995:1000]),
        ("bytes=990-", content[990:1000]),
        ("bytes=3-4", content[3:5]),
    ):
        answer = s3.get_object(Bucket=location.bucket, Key="a folder/whole", Range=text)
        assert answer["Body"].read() == expected
        assert answer["ContentRange"].endswith("/1000")
    with pytest.raises(ClientError, match="InvalidRange"):
        s3.get_object(Bucket=location.bucket, Key="a folder/whole", Range="bytes=1000-")
    listed = s3.list_objects_v2(Bucket=location.bucket, Prefix="a folder/")["Contents"]
    assert {entry["Key"]: entry["Size"] for entry in listed} == {
        "a folder/in parts": 20_000_000,
        "a folder/whole": 1000,
    }
    s3.delete_object(Bucket=location.bucket, Key="a folder/whole")
    with pytest.raises(ClientError, match="404"):
        s3.head_object(Bucket=location.bucket, Key="a folder/whole")


def test_the_origin_copies_objects_and_deletes_several_at_once(running):
    location = running.memory
    s3 = location.boto3()
    s3.put_object(Bucket=location.bucket, Key="copies/a b", Body=b"content")
    s3.copy_object(Bucket=location.bucket, Key="copies/c", CopySource={"Bucket": location.bucket, "Key": "copies/a b"})
    assert s3.get_object(Bucket=location.bucket, Key="copies/c")["Body"].read() == b"content"
    with pytest.raises(ClientError, match="NoSuchKey"):
        s3.copy_object(Bucket=location.bucket, Key="copies/d", CopySource={"Bucket": location.bucket, "Key": "absent"})
    keys = [{"Key": key} for key in ("copies/a b", "copies/c")]
    s3.delete_objects(Bucket=location.bucket, Delete={"Objects": keys, "Quiet": True})
    assert "Contents" not in s3.list_objects_v2(Bucket=location.bucket, Prefix="copies/")


def test_a_request_of_the_origin_may_name_a_whole_url(running):
    location = running.memory
    location.boto3().put_object(Bucket=location.bucket, Key="whole url", Body=b"content")
    connection = http.client.HTTPConnection(urlsplit(location.endpoint_url).netloc)
    connection.request("GET", f"{location.endpoint_url}/{location.bucket}/whole%20url")
    assert connection.getresponse().read() == b"content"
    connection.close()


def test_the_origins_other_bucket_keeps_only_sizes(running):
    location, before = running.discard, origin.counters(running.discard)
    s3 = location.boto3()
    s3.upload_fileobj(io.BytesIO(bytes(20_000_000)), location.bucket, "parts")
    s3.put_object(Bucket=location.bucket, Key="whole", Body=bytes(1000))
    assert s3.head_object(Bucket=location.bucket, Key="parts")["ContentLength"] == 20_000_000
    assert s3.head_object(Bucket=location.bucket, Key="whole")["ContentLength"] == 1000
    counted = origin.counters(location) - before
    assert 20_001_000 <= counted.pop("received_bytes") <= 20_010_000
    assert counted == {"begin": 1, "part": 3, "complete": 1, "put": 1, "metadata": 2}


def test_the_origin_computes_the_checksums_of_google_cloud_storage(running):
    content = os.urandom(20_000_000)
    for location in (running.on("gs").memory, running.on("gs").discard):
        location.enter()
        before, store = origin.counters(location), location.store()
        # Parts that are composed, and one request. Both are verified by what the responses show, without another request.
        store.put("composed", content)
        store.put("whole", content[:1000], metadata={"a": "b"})
        counted = origin.counters(location) - before
        assert (counted["compose"], counted["metadata"]) == (1, 0)
        assert store.head("whole").metadata == {"a": "b"}
    assert bytes(running.on("gs").memory.store().get("composed")) == content


def test_an_aborted_upload_leaves_no_object(running):
    location = running.memory
    s3 = location.boto3()
    begun = s3.create_multipart_upload(Bucket=location.bucket, Key="begun")
    upload = {"Bucket": location.bucket, "Key": "begun", "UploadId": begun["UploadId"]}
    s3.upload_part(**upload, PartNumber=1, Body=b"abc")
    s3.abort_multipart_upload(**upload)
    with pytest.raises(ClientError, match="404"):
        s3.head_object(Bucket=location.bucket, Key="begun")
    with pytest.raises(ClientError, match="NoSuchUpload"):
        s3.upload_part(**upload, PartNumber=2, Body=b"abc")


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Transfer-Encoding": "chunked"}, b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"),
        (
            {"Content-Encoding": "aws-chunked", "X-Amz-Decoded-Content-Length": "11", "Content-Length": "57"},
            b"5\r\nhello\r\n6\r\n world\r\n0\r\nx-amz-checksum-crc32:DUoRhQ==\r\n\r\n",
        ),
    ],
    ids=["chunked", "aws-chunked"],
)
@pytest.mark.parametrize("bucket", ["memory", "discard"])
def test_the_origin_unwraps_bodies_in_chunks(running, bucket, headers, body):
    connection = http.client.HTTPConnection(urlsplit(running.memory.endpoint_url).netloc)
    for _ in range(2):
        connection.request("PUT", f"/{bucket}/chunks", body=iter([body]), headers=headers | {"Expect": "100-continue"})
        assert connection.getresponse().read() == b""
        connection.request("HEAD", f"/{bucket}/chunks")
        answer = connection.getresponse()
        answer.read()
        assert answer.headers["Content-Length"] == "11"
    if bucket == "memory":
        connection.request("GET", f"/{bucket}/chunks")
        assert connection.getresponse().read() == b"hello world"
    connection.close()


def verdicts_of_a_quick_run(*options):
    command = [sys.executable, "benchmarks/checkpoint.py", "--quick", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    _, verdicts = done.stdout.split("against the targets\n")
    assert "not measured" not in verdicts
    assert "small tensors" in verdicts
    assert "of the bytes" in verdicts
    assert "beside an upload" in verdicts
    return verdicts


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_quick_run_of_selected_cases_ends_with_their_verdicts():
    assert "memcpy" not in verdicts_of_a_quick_run("--only", "dcp", "--only", "loop")


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_quick_run_of_the_benchmark_ends_with_its_verdicts():
    assert "sharded: <= 1.2x one memcpy" in verdicts_of_a_quick_run()
