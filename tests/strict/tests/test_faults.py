"""Tests that each scripted fault has the documented effect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.boto_client import refusal
from tests.servers.raw_client import RawConnection, request_bytes
from tests.strict.control import Control, ControlRefused, FaultAction
from tests.strict.faults import Action
from tests.strict.tests.answers import code_in

pytestmark = pytest.mark.timeout(60)

BODY = bytes(range(256)) * 40


@pytest.fixture
def send_with_fault(
    server: launch.Server, s3: Any, control: Control
) -> Iterator[Callable[[FaultAction], RawConnection]]:
    """Returns a function that scripts one fault of GetObject and sends that request on a new connection."""
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


def serves_another_request(server: launch.Server, connection: RawConnection) -> bool:
    """Returns whether a connection serves one more request."""
    try:
        return connection.exchange(request_bytes(server, "GET", "/bucket/key")).body == BODY
    except ConnectionError:
        return False


def test_a_status_fault_returns_its_error_and_keeps_the_connection(
    server: launch.Server, send_with_fault: Strike
) -> None:
    connection = send_with_fault({"status": 503, "code": "SlowDown", "headers": {"Retry-After": "2"}})
    answer = connection.answer()
    assert (answer.status, code_in(answer.body), answer.headers["retry-after"]) == (503, "SlowDown", "2")
    assert serves_another_request(server, connection)
    answer = send_with_fault({"status": 502, "body": "<html>", "headers": {"Content-Type": "text/html"}}).answer()
    assert (answer.status, answer.body, answer.headers["content-type"]) == (502, b"<html>", "text/html")


@pytest.mark.parametrize(("cut", "left"), [(0.5, len(BODY) // 2), (100, 100), (0, 0)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_truncated_body_ends_with_fin(send_with_fault: Strike, cut: float, left: int, chunked: bool) -> None:
    answer = send_with_fault({"cut_body": cut, "chunked": chunked}).answer()
    assert (answer.status, answer.complete, answer.body) == (200, False, BODY[:left])


def test_a_truncated_body_with_reset_ends_with_rst(send_with_fault: Strike) -> None:
    connection = send_with_fault({"cut_body": 100, "reset": True})
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.receive(1)
    assert connection.receive(100) == BODY[:100]
    with pytest.raises(ConnectionResetError):
        connection.receive(1)


@pytest.mark.parametrize("when", ["before_head", "after_request"])
def test_a_reset_prevents_the_response_and_the_operation(
    server: launch.Server, s3: Any, control: Control, when: Any
) -> None:
    control.faults({"operation": "PutObject", "action": {"reset": when}})
    with RawConnection(server) as connection, pytest.raises(ConnectionResetError):
        connection.send(request_bytes(server, "PUT", "/bucket/key", body=b"content"))
        connection.receive(1)
    assert refusal(s3.head_object, Bucket="bucket", Key="key") == (404, "404")
    received = {"before_head": 0, "after_request": 7}
    assert control.requests("PutObject")[0].bytes_received == received[when]


def test_a_lost_response_follows_the_performed_operation(server: launch.Server, s3: Any, control: Control) -> None:
    control.faults({"operation": "PutObject", "action": {"lose_response": True}})
    with RawConnection(server) as connection, pytest.raises(ConnectionResetError):
        connection.send(request_bytes(server, "PUT", "/bucket/key", body=b"content"))
        connection.receive(1)
    assert s3.get_object(Bucket="bucket", Key="key")["Body"].read() == b"content"


def test_the_range_of_a_response_can_be_wrong_ignored_or_short(send_with_fault: Strike) -> None:
    wanted = {"Range": "bytes=10-19"}
    wrong = send_with_fault({"wrong_content_range": True}, **wanted).answer()
    assert (wrong.headers["content-range"], wrong.body) == (f"bytes 11-20/{len(BODY)}", BODY[10:20])
    ignored = send_with_fault({"ignore_range": True}, **wanted).answer()
    assert (ignored.status, ignored.body) == (200, BODY)
    short = send_with_fault({"shorter_length": 3}, **wanted).answer()
    assert (short.status, short.body, short.headers["content-length"]) == (206, BODY[10:17], "7")
    assert short.headers["content-range"] == f"bytes 10-19/{len(BODY)}"


def test_only_the_scripted_byte_is_corrupted(send_with_fault: Strike) -> None:
    answer = send_with_fault({"corrupt_byte_at": 5}).answer()
    assert answer.body == BODY[:5] + bytes([BODY[5] ^ 0xFF]) + BODY[6:]


def test_a_longer_body_leaves_bytes_on_the_connection(send_with_fault: Strike) -> None:
    connection = send_with_fault({"longer_body": 4})
    assert connection.answer().body == BODY
    assert connection.receive(4) == b"\xee" * 4


def test_framing_can_be_chunked_or_by_the_end_of_the_connection(server: launch.Server, send_with_fault: Strike) -> None:
    connection = send_with_fault({"chunked": True})
    answer = connection.answer()
    assert (answer.headers["transfer-encoding"], answer.body) == ("chunked", BODY)
    assert "content-length" not in answer.headers
    assert serves_another_request(server, connection)
    answer = send_with_fault({"no_length": True}).answer()
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
def test_a_slow_response_is_delayed_and_complete(send_with_fault: Strike, action: FaultAction) -> None:
    began_s = time.monotonic()
    answer = send_with_fault(action).answer()
    assert answer.body == BODY
    assert time.monotonic() - began_s >= 0.18


def test_a_stall_follows_the_bytes_before_it(send_with_fault: Strike) -> None:
    connection = send_with_fault({"stall_body_at": 100, "stall_s": 30.0})
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.receive(1)
    assert connection.receive(100) == BODY[:100]
    with pytest.raises(TimeoutError):
        connection.receive(1, timeout_s=0.1)


def test_an_error_can_have_status_200(s3: Any, control: Control) -> None:
    s3.put_object(Bucket="bucket", Key="key")
    control.faults({"operation": "CopyObject", "action": {"error_in_200": "InternalError"}})
    source = {"Bucket": "bucket", "Key": "key"}
    # boto3 recognises such responses and raises the error.
    assert refusal(s3.copy_object, Bucket="bucket", Key="copy", CopySource=source)[1] == "InternalError"
    assert control.requests("CopyObject")[0].status == 200
    assert refusal(s3.head_object, Bucket="bucket", Key="copy") == (404, "404")


def test_a_connection_can_close_after_a_response(server: launch.Server, send_with_fault: Strike) -> None:
    connection = send_with_fault({"close_after": True})
    answer = connection.answer()
    assert answer.body == BODY
    assert "connection" not in answer.headers
    assert not serves_another_request(server, connection)


@pytest.mark.parametrize("status", [100, 103])
def test_an_informational_response_can_precede(server: launch.Server, send_with_fault: Strike, status: int) -> None:
    connection = send_with_fault({"informational": status})
    answer = connection.answer()
    assert (answer.preceding, answer.status, answer.body) == ((status,), 200, BODY)
    assert serves_another_request(server, connection)


def test_an_early_response_precedes_the_request_body(server: launch.Server, control: Control) -> None:
    control.faults({"operation": "PutObject", "action": {"early_response": 503}})
    content = request_bytes(server, "PUT", "/bucket/key", body=b"x" * 1000)
    with RawConnection(server) as connection:
        connection.send(content[:-1000])
        answer = connection.answer()
    assert (answer.status, code_in(answer.body), answer.headers["connection"]) == (503, "SlowDown", "close")


def test_rules_select_by_key_skip_times_and_probability(s3: Any, control: Control) -> None:
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
def test_a_rule_that_cannot_match_any_request_is_refused(control: Control, rule: Any) -> None:
    with pytest.raises(ControlRefused):
        control.faults(rule)


def test_the_control_client_has_every_fault() -> None:
    assert set(FaultAction.__annotations__) == {spec.name for spec in fields(Action)}
