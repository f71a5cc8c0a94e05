"""Serves one connection: verifies, authorises, injects faults into, performs and answers each request.

Each step is in the module named after it; this module has their order.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import traceback
from dataclasses import replace
from email.utils import formatdate

from . import sending
from .access import check_access, headers_of_every_answer
from .errors import S3Error, error_document, usual_code
from .exchange import Request, Response
from .faults import NO_FAULT, Action
from .operations import PERFORM
from .payload import open_payload
from .peer import Peer
from .routing import operation_of
from .signature import verify_head
from .state import ConnectionRecord, RequestRecord, State
from .target import parse_target
from .wire import Headers, RequestHead, read_body, read_head

# S3 accepts a copy without a length, since it has no body.
_NEED_LENGTH = ("PutObject", "UploadPart")
# Headers that must not appear in the log of a failed test run.
_SECRET_HEADERS = ("authorization", "x-amz-security-token", "x-amz-server-side-encryption-customer-key")


async def serve_connection(state: State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves until the client closes, a response closes the connection, or it breaks."""
    peer = Peer(reader, writer)
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"

    def drop() -> None:
        peer.abort()
        task.cancel()

    connection = state.traffic.accepted(peer.close, drop)
    try:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await _serve_one(state, peer, connection):
                pass
    finally:
        del state.traffic.open[connection.number]
        peer.close()


async def _serve_one(state: State, peer: Peer, connection: ConnectionRecord) -> bool:
    """Waits for a request and responds to it; returns whether the connection stays open for another."""
    connection.idle = True
    try:
        head = await read_head(peer.reader)
    except S3Error as error:
        connection.idle = False
        await _refuse_malformed(state, peer, error, connection.number)
        return False
    if head is None:
        return False
    connection.idle = False
    state.traffic.began()
    try:
        return await _Exchange(state, peer, head, connection.number).run()
    finally:
        state.traffic.in_flight -= 1


def _ids(state: State) -> tuple[str, str]:
    """Returns the two ids that S3 assigns to each request."""
    number = state.next_number()
    return f"STRICT{number:010X}", base64.b64encode(f"strict host id {number:010}".encode()).decode()


async def _refuse_malformed(state: State, peer: Peer, error: S3Error, connection: int) -> None:
    record = RequestRecord(connection, "", "", {}, time.monotonic() - state.started_s)
    state.requests.append(record)
    response = _error_response(error, record, "", has_body=True)
    await sending.send(peer, response, NO_FAULT, record, has_body=True, keep_open=False)
    await peer.linger()


def _error_response(error: S3Error, record: RequestRecord, host_id: str, *, has_body: bool) -> Response:
    record.code = error.code
    body = error_document(error, record.target, record.request_id, host_id) if has_body else b""
    described = [("Content-Type", "application/xml")] if error.status != 304 else []
    return Response(error.status, [*described, *error.headers], body)


class _Exchange:
    """One request and its response."""

    def __init__(self, state: State, peer: Peer, head: RequestHead, connection: int) -> None:
        self._state = state
        self._peer = peer
        self._head = head
        self._request: Request | None = None
        self._action = NO_FAULT
        logged = {name: head.headers.get(name) or "" for name, _ in head.headers if name not in _SECRET_HEADERS}
        received_s = time.monotonic() - state.started_s
        self._record = RequestRecord(connection, head.method, head.target, logged, received_s)
        self._record.request_id, self._host_id = _ids(state)
        state.requests.append(self._record)

    async def run(self) -> bool:
        """Returns whether the connection stays open for another request."""
        try:
            request = self._admit()
        except S3Error as error:
            return await self._refuse(error)
        self._record.fault, self._action = self._state.script.choose(request.operation, request.target.key)
        if self._action.early_response is not None:
            return await self._answer_early(self._action.early_response)
        if self._action.reset == "before_head":
            await self._peer.reset()
            return False
        if self._head.expects_continue:
            self._peer.write(sending.informational(100))
        try:
            body = await self._read_body()
        except S3Error as error:
            return await self._refuse(error)
        if self._action.reset == "after_request":
            await self._peer.reset()
            return False
        if self._action.no_answer:
            return False
        response = self._perform(request, body)
        if self._action.lose_response:
            await self._peer.reset()
            return False
        return await self._send(response, keep_open=not self._head.wants_close)

    def _admit(self) -> Request:
        """Returns the request of a head that is verified and authorised."""
        head, record = self._head, self._record
        target = parse_target(head.target, head.headers.get("host") or "", self._state.base_domain)
        record.bucket, record.key = target.bucket, target.key
        copies = head.headers.get("x-amz-copy-source") is not None
        record.operation = operation_of(head.method, target, copies=copies)
        self._request = Request(self._state, record.operation, target, dict(target.query), head.headers, None)
        if record.operation in _NEED_LENGTH and not head.has_framing:
            raise S3Error("MissingContentLength", closes=True)
        identity = verify_head(head, self._state.accounts, self._state.clock.now_s())
        self._request = replace(self._request, identity=identity)
        check_access(self._request)
        return self._request

    async def _read_body(self) -> bytes:
        body = await read_body(self._peer.reader, self._head)
        self._record.bytes_received = len(body)
        return body

    async def _refuse(self, error: S3Error) -> bool:
        """Responds to a refused request after reading its body, unless the client waits for 100 Continue."""
        response = self._error(error)
        if error.closes or self._head.expects_continue:
            await self._send(response, keep_open=False)
            await self._peer.linger()
            return False
        keep_open = not self._head.wants_close
        try:
            await self._read_body()
        except S3Error:
            # A body without a known end makes the next request unreadable.
            keep_open = False
        return await self._send(response, keep_open=keep_open)

    async def _answer_early(self, status: int) -> bool:
        scripted = replace(self._action, status=status)
        await self._send(self._scripted_error(scripted), keep_open=False)
        await self._peer.linger()
        return False

    def _perform(self, request: Request, body: bytes) -> Response:
        action = self._action
        try:
            payload = open_payload(request.headers, request.identity, body)
            if action.error_in_200 is not None:
                return self._error(S3Error(action.error_in_200, status=200))
            if action.redirect_to is not None:
                location = {"Location": action.redirect_to + self._head.target}
                return self._scripted_error(replace(action, status=307, headers=location))
            if action.status is not None:
                return self._scripted_error(action)
            headers = request.headers
            if action.ignore_range:
                headers = Headers([(name, value) for name, value in headers if name != "range"])
            request = replace(request, headers=headers, body=payload.body, trailers=payload.trailers)
            return PERFORM[request.operation](request)
        except S3Error as error:
            return self._error(error)
        except Exception as error:
            # A bug in this server must not look like a response that a test could expect.
            traceback.print_exc()
            return self._error(S3Error("StrictServerBug", repr(error), status=500))

    def _scripted_error(self, action: Action) -> Response:
        status = action.status or 500
        error = S3Error(action.code or usual_code(status), status=status, headers=list(action.headers.items()))
        response = self._error(error)
        if action.body is not None and self._has_body(status):
            names = {name.lower() for name in action.headers}
            own_type = [] if "content-type" in names else [("Content-Type", "text/plain")]
            return Response(status, [*own_type, *action.headers.items()], action.body.encode())
        return response

    def _has_body(self, status: int) -> bool:
        return self._head.method != "HEAD" and status not in (204, 304)

    def _error(self, error: S3Error) -> Response:
        has_body = self._has_body(error.status)
        return _error_response(error, self._record, self._host_id, has_body=has_body)

    async def _send(self, response: Response, *, keep_open: bool) -> bool:
        headers = [
            ("x-amz-id-2", self._host_id),
            ("x-amz-request-id", self._record.request_id),
            ("Date", formatdate(self._state.clock.now_s(), usegmt=True)),
            ("Server", "AmazonS3"),
        ]
        if self._request is not None:
            headers += headers_of_every_answer(self._request)
        return await sending.send(
            self._peer,
            replace(response, headers=headers + response.headers),
            self._action,
            self._record,
            has_body=self._has_body(response.status),
            keep_open=keep_open,
        )
