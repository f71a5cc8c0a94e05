"""Proves that answers whose head or framing is scripted to be damaged arrive damaged in just that way."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.raw_client import RawConnection, request_bytes
from tests.servers.strict.control import Control, FaultAction

pytestmark = pytest.mark.timeout(60)

BODY = bytes(range(256)) * 40

Strike = Callable[..., RawConnection]


@pytest.fixture
def struck(server: launch.Server, s3: Any, control: Control) -> Iterator[Strike]:
    """Returns a function that scripts one fault of GetObject and sends one on a new connection."""
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


def test_a_request_can_be_met_by_fin_without_an_answer(server: launch.Server, s3: Any, control: Control) -> None:
    control.faults({"operation": "PutObject", "action": {"no_answer": True}})
    with RawConnection(server) as connection:
        connection.send(request_bytes(server, "PUT", "/bucket/key", body=b"content"))
        assert connection.receive_all() == b""
    assert control.requests("PutObject")[0].bytes_received == 7
    assert s3.list_objects_v2(Bucket="bucket")["KeyCount"] == 0


def test_a_head_can_be_cut_by_fin_or_by_rst(struck: Strike) -> None:
    assert struck({"cut_head": 12}).receive_all() == b"HTTP/1.1 200"
    connection = struck({"cut_head": 12, "reset": True})
    assert connection.receive(12) == b"HTTP/1.1 200"
    with pytest.raises(ConnectionResetError):
        connection.receive(1)


def test_an_answer_can_be_no_http_at_all(struck: Strike) -> None:
    content = struck({"garbage_head": True}).receive_all()
    assert content
    assert b"HTTP/" not in content
    assert BODY not in content


@pytest.mark.parametrize("cut", [None, 0.5])
def test_an_answer_of_http_1_0_ends_with_its_connection(struck: Strike, cut: float | None) -> None:
    action: FaultAction = {"http_1_0": True} if cut is None else {"http_1_0": True, "cut_body": cut}
    head, _, body = struck(action).receive_all().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"content-length" not in head.lower()
    assert body == BODY[: len(BODY) if cut is None else len(BODY) // 2]


def test_an_etag_can_be_that_of_no_object(s3: Any, struck: Strike) -> None:
    answer = struck({"wrong_etag": True}).answer()
    assert answer.body == BODY
    assert answer.headers["etag"] != s3.head_object(Bucket="bucket", Key="key")["ETag"]


def test_a_body_can_be_another_under_the_headers_of_the_right_one(s3: Any, struck: Strike) -> None:
    answer = struck({"replace_body": "<Error/>"}).answer()
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"<Error/>", "8")
    assert answer.headers["etag"] == s3.head_object(Bucket="bucket", Key="key")["ETag"]


def test_a_body_can_be_compressed_as_by_a_proxy(struck: Strike) -> None:
    answer = struck({"gzip": True}).answer()
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert gzip.decompress(answer.body) == BODY


def test_a_redirect_names_the_same_target_at_another_host(struck: Strike) -> None:
    answer = struck({"redirect_to": "http://elsewhere.test:81"}).answer()
    assert (answer.status, answer.headers["location"]) == (307, "http://elsewhere.test:81/bucket/key")
