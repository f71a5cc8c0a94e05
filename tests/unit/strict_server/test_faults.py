"""Proves that each fault that can be scripted does what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.boto_client import refusal
from tests.servers.raw_client import RawConnection, request_bytes
from tests.servers.strict.control import Control, ControlRefused, FaultAction
from tests.servers.strict.faults import Action
from tests.unit.strict_server.answers import code_in

pytestmark = pytest.mark.timeout(60)

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
