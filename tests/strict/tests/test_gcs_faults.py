"""Tests that the fault engine works on operations of GCS, and that the server runs over TLS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers import launch
from tests.servers.raw_client import RawConnection, gcs_request_bytes
from tests.strict.control import Control, ControlRefused, FaultAction
from tests.strict.faults import OPERATIONS
from tests.strict.gcs.operations import PERFORM
from tests.strict.gcs.routing import OPERATIONS as GCS_OPERATIONS
from tests.strict.tests.answers import gcs_exchange, gcs_put, reason_of

pytestmark = pytest.mark.timeout(60)

MEDIA = "/storage/v1/b/bucket/o/name?alt=media"
BODY = bytes(range(256)) * 40

Strike = Callable[..., RawConnection]


@pytest.fixture
def send_with_fault(gcs_server: launch.Server, gcs_control: Control) -> Iterator[Strike]:
    """Returns a function that scripts one fault of GetMedia and sends that request on a new connection."""
    gcs_put(gcs_server, "name", BODY)
    connections: list[RawConnection] = []

    def strike(action: FaultAction, **headers: str) -> RawConnection:
        gcs_control.faults({"operation": "GetMedia", "times": 1, "action": action})
        connections.append(RawConnection(gcs_server))
        connections[-1].send(gcs_request_bytes(gcs_server, "GET", MEDIA, headers=headers))
        return connections[-1]

    yield strike
    for connection in connections:
        connection.close()


def test_every_operation_is_performed_and_can_be_scripted() -> None:
    assert set(PERFORM) == GCS_OPERATIONS
    assert GCS_OPERATIONS <= OPERATIONS


@pytest.mark.parametrize(
    ("status", "reason"),
    [(429, "rateLimitExceeded"), (503, "backendError"), (500, "internalError"), (408, "requestTimeout")],
)
def test_a_status_fault_has_the_usual_reason(send_with_fault: Strike, status: int, reason: str) -> None:
    assert reason_of(send_with_fault({"status": status}).answer()) == (status, reason)
    answer = send_with_fault({"status": status, "code": "other", "headers": {"Retry-After": "1"}}).answer()
    assert (reason_of(answer), answer.headers["retry-after"]) == ((status, "other"), "1")


def test_a_body_can_be_cut_changed_or_sent_without_a_length(send_with_fault: Strike) -> None:
    cut = send_with_fault({"cut_body": 100}).answer()
    assert (cut.complete, cut.body) == (False, BODY[:100])
    assert send_with_fault({"corrupt_byte_at": 0}).answer().body[:2] == b"\xff\x01"
    chunked = send_with_fault({"chunked": True}).answer()
    assert (chunked.body, chunked.headers["transfer-encoding"]) == (BODY, "chunked")
    assert send_with_fault({"http_1_0": True}).receive_all().endswith(BODY)


def test_the_range_of_a_response_can_be_wrong_or_ignored(send_with_fault: Strike) -> None:
    wrong = send_with_fault({"wrong_content_range": True}, Range="bytes=10-19").answer()
    assert (wrong.headers["content-range"], wrong.body) == (f"bytes 11-20/{len(BODY)}", BODY[10:20])
    ignored = send_with_fault({"ignore_range": True}, Range="bytes=10-19").answer()
    assert (ignored.status, ignored.body) == (200, BODY)


def test_generation_etag_and_checksums_of_a_response_can_be_wrong(
    gcs_server: launch.Server, gcs_control: Control, send_with_fault: Strike
) -> None:
    right = send_with_fault({"informational": 103}).answer().headers
    for action, header in [
        ("wrong_generation", "x-goog-generation"),
        ("wrong_checksum", "x-goog-hash"),
        ("wrong_etag", "etag"),
    ]:
        wrong: Any = {action: True}
        answer = send_with_fault(wrong).answer()
        assert {name for name in right if answer.headers[name] != right[name]} - {"date", "x-guploader-uploadid"} == {
            header
        }
        assert answer.body == BODY
    target = "/storage/v1/b/bucket/o/name"
    resource = json.loads(gcs_exchange(gcs_server, "GET", target).body)
    gcs_control.faults({"operation": "GetObject", "action": {"wrong_generation": True, "wrong_checksum": True}})
    changed = json.loads(gcs_exchange(gcs_server, "GET", target).body)
    assert {name for name in resource if changed[name] != resource[name]} == {"generation", "crc32c", "md5Hash"}


def test_a_rule_matches_a_name_that_only_the_body_has(gcs_server: launch.Server, gcs_control: Control) -> None:
    target = "/upload/storage/v1/b/bucket/o?uploadType=resumable"
    gcs_control.faults({"operation": "StartResumable", "key": "^struck$", "action": {"early_response": 503}})
    assert gcs_exchange(gcs_server, "POST", target, resource={"name": "other"}).status == 200
    assert reason_of(gcs_exchange(gcs_server, "POST", target, resource={"name": "struck"})) == (503, "backendError")
    assert [request.key for request in gcs_control.requests()] == ["other", "struck"]


def test_a_lost_response_follows_the_performed_operation(gcs_server: launch.Server, gcs_control: Control) -> None:
    gcs_control.faults({"operation": "InsertObject", "times": 1, "action": {"lose_response": True}})
    with pytest.raises(ConnectionResetError):
        gcs_put(gcs_server, "name")
    assert gcs_exchange(gcs_server, "GET", MEDIA).body == b"content"


def test_only_multiples_of_256_kib_can_be_persisted(gcs_control: Control) -> None:
    with pytest.raises(ControlRefused):
        gcs_control.faults({"operation": "ResumableChunk", "action": {"persist_bytes": 1000}})


def test_a_malformed_head_is_answered_in_json(gcs_server: launch.Server, gcs_control: Control) -> None:
    del gcs_control
    with RawConnection(gcs_server) as connection:
        answer = connection.exchange(b"GET / HTTP/1.1\r\nHost : a\r\n\r\n")
    assert (reason_of(answer), answer.headers["connection"]) == ((400, "badRequest"), "close")


def test_a_server_runs_over_tls() -> None:
    with launch.start("strict-gcs", "--tls") as server:
        assert server.control is not None
        Control(server.control).bucket("bucket")
        gcs_put(server, "name")
        answer = gcs_exchange(server, "POST", "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=a")
        assert answer.headers["location"].startswith(f"{server.endpoint}/upload/")
        assert server.endpoint.startswith("https://")
