"""Tests the strict server's HTTP with raw sockets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers import launch
from tests.servers.raw_client import RawConnection, request_bytes
from tests.strict.control import Control
from tests.strict.tests.answers import code_in

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]


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
def test_a_malformed_head_returns_400_and_closes_the_connection(server: launch.Server, head: bytes) -> None:
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


def test_a_copy_needs_no_length(server: launch.Server, s3: Any) -> None:
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
def test_an_unimplemented_operation_returns_501(
    server: launch.Server, control: Control, method: str, target: str
) -> None:
    del control
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, method, target))
        assert (answer.status, code_in(answer.body)) == (501, "NotImplemented")
        # The connection stays open, and the x-id parameter of SDKs is accepted.
        assert connection.exchange(request_bytes(server, "GET", "/bucket/key?x-id=GetObject")).status == 404


def test_a_client_that_expects_100_gets_it_or_an_error_before_sending_the_body(
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


def test_an_error_of_a_head_request_has_no_body_and_keeps_the_connection(
    server: launch.Server, control: Control
) -> None:
    del control
    with RawConnection(server) as connection:
        for _ in range(2):
            answer = connection.exchange(request_bytes(server, "HEAD", "/bucket/none"))
            assert (answer.status, answer.body) == (404, b"")


def test_the_host_header_can_name_the_bucket(server: launch.Server, s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="a//b", Body=b"content")
    control.bucket("dotted.bucket")
    with RawConnection(server) as connection:
        answer = connection.exchange(request_bytes(server, "GET", "/a//b", host="bucket.s3.localhost:9"))
        dotted = connection.exchange(request_bytes(server, "GET", "/?location", host="dotted.bucket.s3.localhost"))
    assert answer.body == b"content"
    assert dotted.status == 200
