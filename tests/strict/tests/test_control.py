"""Tests the control API, and how the server processes start and stop."""

from __future__ import annotations

import io
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.boto_client import boto_client, refusal
from tests.servers.raw_client import RawConnection, request_bytes
from tests.strict.control import Control

pytestmark = pytest.mark.timeout(60)

REPOSITORY = Path(__file__).resolve().parents[3]


# --- The control API


def test_the_log_has_each_request_and_its_response(s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="a b", Body=b"0123456789")
    control.clear_requests()
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


def test_trailers_that_boto3_sends_over_tls_are_verified() -> None:
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


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["moto", "versitygw"])
def test_moto_and_versitygw_start_and_keep_connections_open(kind: str) -> None:
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
            # The body of a refused request must not be read as the next request.
            assert connection.exchange(request_bytes(server, "PUT", "/none/key", body=b"content")).status == 404
            assert connection.exchange(request_bytes(server, "GET", "/bucket/dir/key")).body == b"content"


def test_a_server_stops_at_the_end_of_its_stdin_and_removes_its_files() -> None:
    command = [sys.executable, "-m", "tests.servers", "serve", "strict", "--tls"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said["pid"] == process.pid and os.path.exists(said["ca_file"])
    assert process.communicate(timeout=10)[0] == ""
    assert process.returncode == 0
    assert not os.path.exists(said["ca_file"])


def test_a_server_that_cannot_start_reports_the_reason() -> None:
    with pytest.raises(launch.StartFailed, match="unrecognized arguments: --no-such-option"):
        launch.start("strict", "--no-such-option")
