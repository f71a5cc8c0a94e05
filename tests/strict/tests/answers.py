"""Reads the strict server's responses on raw sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.servers.launch import Server
from tests.servers.raw_client import RawConnection, RawResponse, gcs_request_bytes


def code_in(body: bytes) -> str:
    return body.partition(b"<Code>")[2].partition(b"</Code>")[0].decode()


def reason_of(answer: RawResponse) -> tuple[int, str]:
    """Returns the status and reason of an error of GCS."""
    error = json.loads(answer.body)["error"]
    assert error["code"] == answer.status
    return answer.status, error["errors"][0]["reason"]


def gcs_exchange(
    server: Server,
    method: str,
    target: str,
    *,
    body: bytes = b"",
    resource: object = None,
    headers: Mapping[str, str] | None = None,
    token: str | None = None,
) -> RawResponse:
    """Sends one request of the JSON API on a new connection; `resource` is a body of JSON."""
    sent = dict(headers or {})
    if resource is not None:
        body = json.dumps(resource).encode()
        sent.setdefault("Content-Type", "application/json")
    with RawConnection(server) as connection:
        return connection.exchange(gcs_request_bytes(server, method, target, headers=sent, body=body, token=token))


def gcs_put(server: Server, name: str, body: bytes = b"content", *, query: str = "") -> dict[str, Any]:
    """Stores an object, whose name must be its own percent-encoding; returns its resource."""
    target = f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}{query}"
    answer = gcs_exchange(server, "POST", target, body=body)
    assert answer.status == 200, answer.body
    resource: dict[str, Any] = json.loads(answer.body)
    return resource
