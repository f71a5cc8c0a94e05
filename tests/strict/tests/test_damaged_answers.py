"""Tests faults that damage a response's head or framing: the response arrives with exactly the scripted damage."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.raw_client import RawConnection, request_bytes
from tests.strict.control import Control, FaultAction

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]

BODY = bytes(range(256)) * 40

Strike = Callable[..., RawConnection]


@pytest.fixture
def send_with_fault(server: launch.Server, s3: Any, control: Control) -> Iterator[Strike]:
    """Returns a function that scripts one fault of GetObject and sends that request on a new connection."""
    s3.put_object(Bucket="bucket", Key="key", Body=BODY)
    connections: list[RawConnection] = []

    def strike(action: FaultAction) -> RawConnection:
        control.faults({"operation": "GetObject", "times": 1, "action": action})
        connections.append(RawConnection(server))
        connections[-1].send(request_bytes(server, "GET", "/bucket/key"))
        return connections[-1]

    yield strike
    for connection in connections:
        connection.close()


def test_a_request_can_end_with_fin_and_no_response(server: launch.Server, s3: Any, control: Control) -> None:
    control.faults({"operation": "PutObject", "action": {"no_answer": True}})
    with RawConnection(server) as connection:
        connection.send(request_bytes(server, "PUT", "/bucket/key", body=b"content"))
        assert connection.receive_all() == b""
    assert control.requests("PutObject")[0].bytes_received == 7
    assert s3.list_objects_v2(Bucket="bucket")["KeyCount"] == 0


def test_a_head_can_be_truncated_by_fin_or_rst(send_with_fault: Strike) -> None:
    assert send_with_fault({"cut_head": 12}).receive_all() == b"HTTP/1.1 200"
    connection = send_with_fault({"cut_head": 12, "reset": True})
    assert connection.receive(12) == b"HTTP/1.1 200"
    with pytest.raises(ConnectionResetError):
        connection.receive(1)


def test_a_response_can_be_invalid_http(send_with_fault: Strike) -> None:
    content = send_with_fault({"garbage_head": True}).receive_all()
    assert content
    assert b"HTTP/" not in content
    assert BODY not in content


@pytest.mark.parametrize("cut", [None, 0.5])
def test_an_http_1_0_response_ends_with_its_connection(send_with_fault: Strike, cut: float | None) -> None:
    action: FaultAction = {"http_1_0": True} if cut is None else {"http_1_0": True, "cut_body": cut}
    head, _, body = send_with_fault(action).receive_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"content-length" not in head.lower()
    assert body == BODY[: len(BODY) if cut is None else len(BODY) // 2]


def test_a_response_can_have_a_wrong_etag(s3: Any, send_with_fault: Strike) -> None:
    answer = send_with_fault({"wrong_etag": True}).answer()
    assert answer.body == BODY
    assert answer.headers["etag"] != s3.head_object(Bucket="bucket", Key="key")["ETag"]


def test_a_body_can_be_replaced_under_the_original_headers(s3: Any, send_with_fault: Strike) -> None:
    answer = send_with_fault({"replace_body": "<Error/>"}).answer()
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"<Error/>", "8")
    assert answer.headers["etag"] == s3.head_object(Bucket="bucket", Key="key")["ETag"]


def test_a_body_can_be_compressed_as_proxies_do(send_with_fault: Strike) -> None:
    answer = send_with_fault({"gzip": True}).answer()
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert gzip.decompress(answer.body) == BODY


def test_a_redirect_names_the_same_target_at_another_host(send_with_fault: Strike) -> None:
    answer = send_with_fault({"redirect_to": "http://elsewhere.test:81"}).answer()
    assert (answer.status, answer.headers["location"]) == (307, "http://elsewhere.test:81/bucket/key")
