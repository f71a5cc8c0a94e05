"""Tests the GCS mode's uploads byte by byte: multipart bodies and resumable sessions."""

from __future__ import annotations

import base64
import json
import os
from urllib.parse import urlsplit

import google_crc32c
import pytest

from tests.servers import launch
from tests.servers.raw_client import RawConnection, RawResponse, gcs_request_bytes
from tests.strict.control import Control
from tests.strict.tests.answers import gcs_exchange, gcs_put, reason_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]

UPLOAD = "/upload/storage/v1/b/bucket/o"
BLOCK = 256 * 1024
CONTENT = os.urandom(BLOCK + 1000)


def crc32c_of(content: bytes) -> str:
    return base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()


# --- Multipart


def related(*parts: tuple[str | None, bytes], boundary: str = "b") -> bytes:
    """Returns a multipart body of (Content-Type, content)."""
    body = b""
    for kind, content in parts:
        described = f"Content-Type: {kind}\r\n" if kind is not None else ""
        body += f"--{boundary}\r\n{described}\r\n".encode() + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


def insert(
    server: launch.Server, body: bytes, query: str = "", kind: str = "multipart/related; boundary=b"
) -> RawResponse:
    return gcs_exchange(
        server, "POST", f"{UPLOAD}?uploadType=multipart{query}", body=body, headers={"Content-Type": kind}
    )


def test_a_multipart_upload_has_metadata_content_and_possibly_checksums(
    gcs_server: launch.Server, gcs_control: Control
) -> None:
    content = b"\r\n--a\r\n\r\nbinary\x00" * 3
    metadata = json.dumps({"name": "a/b", "metadata": {"k": "v"}, "crc32c": crc32c_of(content)}).encode()
    answer = insert(gcs_server, related(("application/json; charset=UTF-8", metadata), ("text/x", content)))
    resource = json.loads(answer.body)
    assert (resource["name"], resource["contentType"], resource["metadata"]) == ("a/b", "text/x", {"k": "v"})
    assert gcs_control.requests()[0].key == "a/b"
    # As the Rust client sends it, whose media part has no type.
    checksums = ("application/json", json.dumps({"crc32c": crc32c_of(content)}).encode())
    body = related(("application/json", b"{}"), (None, content), checksums)
    quoted = 'multipart/related; boundary="b"'
    assert json.loads(insert(gcs_server, body, "&name=c", quoted).body)["contentType"] == "application/octet-stream"
    for name in ("a%2Fb", "c"):
        assert gcs_exchange(gcs_server, "GET", f"/storage/v1/b/bucket/o/{name}?alt=media").body == content


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\n\r\n{}\r\n--b--",
        related(("application/json", b"{}")),
        related(("text/plain", b"{}"), (None, b"content")),
        related(("application/json", b"{"), (None, b"content")),
        related(("application/json", b"[]"), (None, b"content")),
        related(("application/json", b'{"colour": "red"}'), (None, b"content")),
        related(("application/json", b'{"metadata": {"a": 1}}'), (None, b"content")),
        related(("application/json", b'{"storageClass": "GLACIER"}'), (None, b"content")),
        related(("application/json", b'{"crc32c": "AAAAAA=="}'), (None, b"content")),
        related(("application/json", b'{"md5Hash": "AAAAAAAAAAAAAAAAAAAAAA=="}'), (None, b"content")),
        related(("application/json", b"{}"), (None, b"content"), ("application/json", b'{"crc32c": "AAAAAA=="}')),
        related(("application/json", b"{}"), (None, b"content"), ("application/json", b'{"name": "a"}')),
        related(("application/json", b"{}"), (None, b"content"), boundary="other"),
        related(("application/json", b"{}"), (None, b"content"))[:-6],
    ],
)
def test_a_malformed_or_damaged_multipart_upload_stores_nothing(
    gcs_server: launch.Server, gcs_control: Control, body: bytes
) -> None:
    assert insert(gcs_server, body, "&name=name").status == 400
    assert gcs_control.buckets()[0]["objects"] == 0


def test_an_upload_needs_a_name(gcs_server: launch.Server, gcs_control: Control) -> None:
    del gcs_control
    answer = insert(gcs_server, related(("application/json", b"{}"), (None, b"content")))
    assert reason_of(answer) == (400, "required")


def test_a_media_upload_may_be_chunked(gcs_server: launch.Server, gcs_control: Control) -> None:
    del gcs_control
    content = gcs_request_bytes(gcs_server, "POST", f"{UPLOAD}?uploadType=media&name=a")
    content = content.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\n\r\n"
    with RawConnection(gcs_server) as connection:
        assert json.loads(connection.exchange(content).body)["size"] == "3"


# --- Resumable


def start(server: launch.Server, query: str = "&name=name", **resource: object) -> str:
    """Starts a session; returns its target."""
    answer = gcs_exchange(server, "POST", f"{UPLOAD}?uploadType=resumable{query}", resource=resource)
    assert answer.status == 200, answer.body
    location = answer.headers["location"]
    assert location.startswith(server.endpoint + "/")
    return location.removeprefix(server.endpoint)


def put(
    server: launch.Server, session: str, content_range: str | None, body: bytes = b"", **headers: str
) -> RawResponse:
    sent = {"Content-Range": content_range, **headers} if content_range is not None else headers
    # The session's URL authorises.
    return gcs_exchange(server, "PUT", session, body=body, headers=sent, token="")


def persisted(answer: RawResponse) -> str | None:
    assert (answer.status, answer.body) == (308, b"")
    return answer.headers.get("range")


def test_a_resumable_upload_persists_chunks_and_ends_with_the_last(
    gcs_server: launch.Server, gcs_control: Control
) -> None:
    session = start(gcs_server, contentType="text/x", metadata={"k": "v"})
    assert gcs_control.buckets()[0]["uploads"] == 1
    assert persisted(put(gcs_server, session, "bytes */*")) is None
    assert persisted(put(gcs_server, session, f"bytes 0-{BLOCK - 1}/*", CONTENT[:BLOCK])) == f"bytes=0-{BLOCK - 1}"
    assert persisted(put(gcs_server, session, f"bytes */{len(CONTENT)}")) == f"bytes=0-{BLOCK - 1}"
    assert gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket/o/name").status == 404
    last = f"bytes {BLOCK}-{len(CONTENT) - 1}/{len(CONTENT)}"
    resource = json.loads(put(gcs_server, session, last, CONTENT[BLOCK:]).body)
    assert (resource["size"], resource["contentType"], resource["metadata"]) == (
        str(len(CONTENT)),
        "text/x",
        {"k": "v"},
    )
    # A completed session returns its object, as after a lost response.
    assert json.loads(put(gcs_server, session, "bytes */*").body)["generation"] == resource["generation"]
    assert json.loads(put(gcs_server, session, last, CONTENT[BLOCK:]).body)["generation"] == resource["generation"]
    assert gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket/o/name?alt=media").body == CONTENT
    operations = [request.operation for request in gcs_control.requests() if request.method == "PUT"]
    assert (operations.count("ResumableStatus"), operations.count("ResumableChunk")) == (3, 3)
    assert {request.key for request in gcs_control.requests("ResumableChunk")} == {"name"}


@pytest.mark.parametrize(
    ("content_range", "body"),
    [(None, CONTENT), ("bytes 0-*/*", CONTENT), ("bytes */0", b""), (f"bytes 0-*/{len(CONTENT)}", CONTENT)],
)
def test_one_request_may_send_the_whole_object(
    gcs_server: launch.Server, gcs_control: Control, content_range: str | None, body: bytes
) -> None:
    del gcs_control
    assert put(gcs_server, start(gcs_server), content_range, body).status == 200
    assert gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket/o/name?alt=media").body == body


@pytest.mark.parametrize(
    ("content_range", "size_bytes", "expected"),
    [
        (f"bytes 0-{BLOCK}/*", BLOCK + 1, (400, "invalid")),
        (f"bytes 0-{BLOCK - 2}/{3 * BLOCK}", BLOCK - 1, (400, "invalid")),
        (f"bytes 0-{BLOCK - 1}/*", BLOCK - 1, (400, "invalid")),
        (f"bytes {2 * BLOCK}-{3 * BLOCK - 1}/*", BLOCK, (503, "backendError")),
        (f"bytes 0-{BLOCK - 1}/*", BLOCK, (400, "invalid")),
        (f"bytes {BLOCK}-{2 * BLOCK - 1}/{BLOCK + 1}", BLOCK, (400, "invalid")),
        (f"bytes */{BLOCK - 1}", 0, (400, "invalid")),
        ("bytes */*", 1, (400, "invalid")),
        ("bytes=0-1/2", 2, (400, "invalid")),
    ],
)
def test_a_chunk_that_does_not_continue_the_upload_is_refused(
    gcs_server: launch.Server, gcs_control: Control, content_range: str, size_bytes: int, expected: tuple[int, str]
) -> None:
    del gcs_control
    session = start(gcs_server)
    put(gcs_server, session, f"bytes 0-{BLOCK - 1}/*", bytes(BLOCK))
    assert reason_of(put(gcs_server, session, content_range, bytes(size_bytes))) == expected
    assert persisted(put(gcs_server, session, "bytes */*")) == f"bytes=0-{BLOCK - 1}"


def test_the_total_size_may_not_change(gcs_server: launch.Server, gcs_control: Control) -> None:
    del gcs_control
    headers = {"X-Upload-Content-Length": "10", "X-Upload-Content-Type": "text/y"}
    answer = gcs_exchange(gcs_server, "POST", f"{UPLOAD}?uploadType=resumable&name=name", headers=headers)
    session = urlsplit(answer.headers["location"])
    target = f"{session.path}?{session.query}"
    assert put(gcs_server, target, "bytes 0-10/11", bytes(11)).status == 400
    assert json.loads(put(gcs_server, target, "bytes 0-9/10", bytes(10)).body)["contentType"] == "text/y"


def test_a_fault_persists_only_a_part_of_a_chunk(gcs_server: launch.Server, gcs_control: Control) -> None:
    content = os.urandom(3 * BLOCK)
    session = start(gcs_server)
    gcs_control.faults({"operation": "ResumableChunk", "times": 1, "action": {"persist_bytes": BLOCK}})
    partly = put(gcs_server, session, f"bytes 0-{3 * BLOCK - 1}/{3 * BLOCK}", content)
    assert persisted(partly) == f"bytes=0-{BLOCK - 1}"
    rest = put(gcs_server, session, f"bytes {BLOCK}-{3 * BLOCK - 1}/{3 * BLOCK}", content[BLOCK:])
    assert json.loads(rest.body)["crc32c"] == crc32c_of(content)


def test_a_cancelled_session_is_gone_and_an_unknown_one_not_found(
    gcs_server: launch.Server, gcs_control: Control
) -> None:
    session = start(gcs_server)
    assert gcs_exchange(gcs_server, "DELETE", session, token="").status == 499
    assert gcs_control.buckets()[0]["uploads"] == 0
    assert reason_of(put(gcs_server, session, "bytes */*")) == (410, "gone")
    unknown = f"{UPLOAD}?uploadType=resumable&upload_id=unknown"
    assert reason_of(put(gcs_server, unknown, "bytes */*")) == (404, "notFound")


def test_conditions_and_checksums_are_checked_at_the_end_too(gcs_server: launch.Server, gcs_control: Control) -> None:
    del gcs_control
    guarded = start(gcs_server, "&name=name&ifGenerationMatch=0")
    gcs_put(gcs_server, "name")
    assert reason_of(put(gcs_server, guarded, "bytes 0-2/3", b"abc")) == (412, "conditionNotMet")
    refused = gcs_exchange(gcs_server, "POST", f"{UPLOAD}?uploadType=resumable&name=name&ifGenerationMatch=0")
    assert reason_of(refused) == (412, "conditionNotMet")
    declared = start(gcs_server, crc32c="AAAAAA==")
    assert put(gcs_server, declared, "bytes 0-2/3", b"abc").status == 400
    late = start(gcs_server)
    hashes = {"X-Goog-Hash": "crc32c=AAAAAA=="}
    assert put(gcs_server, late, "bytes 0-2/3", b"abc", **hashes).status == 400
    assert gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket/o/name?alt=media").body == b"content"
