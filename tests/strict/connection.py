"""Serves one connection: admits, injects faults into, performs and answers each request, in this order.

The protocol, S3 or GCS, admits and performs; `sending` sends the responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from dataclasses import replace
from email.utils import formatdate

from . import sending
from .errors import RequestError
from .faults import NO_FAULT, Action
from .peer import Peer
from .protocol import Admitted, Protocol
from .response import Response
from .state import ConnectionRecord, RequestRecord, State
from .wire import RequestHead, read_body, read_head

# Headers that must not appear in the log of a failed test run.
_SECRET_HEADERS = ("authorization", "x-amz-security-token", "x-amz-server-side-encryption-customer-key")


async def serve_connection(
    protocol: Protocol, state: State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
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
            while await _serve_one(protocol, state, peer, connection):
                pass
    finally:
        del state.traffic.open[connection.number]
        peer.close()


async def _serve_one(protocol: Protocol, state: State, peer: Peer, connection: ConnectionRecord) -> bool:
    """Waits for a request and responds to it; returns whether the connection stays open for another."""
    connection.idle = True
    try:
        head = await read_head(peer.reader, accepts_chunks=protocol.accepts_chunks)
    except RequestError as error:
        connection.idle = False
        malformed = RequestHead.empty()
        return await _Exchange(protocol, state, peer, malformed, connection.number).refuse_malformed(error)
    if head is None:
        return False
    connection.idle = False
    state.traffic.began()
    try:
        return await _Exchange(protocol, state, peer, head, connection.number).run()
    finally:
        state.traffic.in_flight -= 1


class _Exchange:
    """One request and its response."""

    def __init__(self, protocol: Protocol, state: State, peer: Peer, head: RequestHead, connection: int) -> None:
        self._protocol = protocol
        self._state = state
        self._peer = peer
        self._head = head
        self._action = NO_FAULT
        self._body: bytes | None = None
        logged = {name: head.headers.get(name) or "" for name, _ in head.headers if name not in _SECRET_HEADERS}
        received_s = time.monotonic() - state.started_s
        self._record = RequestRecord(connection, head.method, head.target, logged, received_s)
        self._record.request_id = protocol.request_id(state.next_number())
        state.requests.append(self._record)

    async def run(self) -> bool:
        """Returns whether the connection stays open for another request."""
        try:
            admitted = self._protocol.admit(self._state, self._head, self._record)
            operation = self._record.operation
            assert operation is not None, "admit sets it"
            if admitted.key_is_in_body and self._state.script.needs_key(operation):
                # Before the fault is chosen, which therefore cannot come before the body.
                self._record.key = admitted.key_in(await self._read_body())
        except RequestError as error:
            return await self._refuse(error)
        self._record.fault, self._action = self._state.script.choose(operation, self._record.key)
        if self._action.early_response is not None:
            return await self._answer_early(self._action.early_response)
        if self._action.reset == "before_head":
            await self._peer.reset()
            return False
        try:
            body = await self._read_body()
        except RequestError as error:
            return await self._refuse(error)
        if self._action.reset == "after_request":
            await self._peer.reset()
            return False
        if self._action.no_answer:
            return False
        if admitted.key_is_in_body:
            self._record.key = admitted.key_in(body)
        response = self._perform(admitted, body)
        if self._action.lose_response:
            await self._peer.reset()
            return False
        return await self._send(response, keep_open=not self._head.wants_close)

    async def refuse_malformed(self, error: RequestError) -> bool:
        """Responds to a request whose head cannot be read, and ends the connection."""
        await self._send(self._error(error), keep_open=False)
        await self._peer.linger()
        return False

    async def _read_body(self) -> bytes:
        """Reads the body, once, after the 100 Continue that the client may wait for."""
        if self._body is None:
            if self._head.expects_continue:
                self._peer.write(sending.informational(100))
            self._body = await read_body(self._peer.reader, self._head)
            self._record.bytes_received = len(self._body)
        return self._body

    async def _refuse(self, error: RequestError) -> bool:
        """Responds to a refused request after reading its body, unless the client waits for 100 Continue."""
        response = self._error(error)
        if error.closes or self._head.expects_continue:
            await self._send(response, keep_open=False)
            await self._peer.linger()
            return False
        keep_open = not self._head.wants_close
        try:
            await self._read_body()
        except RequestError:
            # A body without a known end makes the next request unreadable.
            keep_open = False
        return await self._send(response, keep_open=keep_open)

    async def _answer_early(self, status: int) -> bool:
        scripted = replace(self._action, status=status)
        await self._send(self._scripted_error(scripted), keep_open=False)
        await self._peer.linger()
        return False

    def _perform(self, admitted: Admitted, body: bytes) -> Response:
        action = self._action
        try:
            admitted.receive(body)
            if action.error_in_200 is not None:
                return self._error(self._protocol.scripted_error(200, action.error_in_200, []))
            if action.redirect_to is not None:
                location = {"Location": action.redirect_to + self._head.target}
                return self._scripted_error(replace(action, status=307, headers=location))
            if action.status is not None:
                return self._scripted_error(action)
            return admitted.perform(action)
        except RequestError as error:
            return self._error(error)
        except Exception as error:
            # A bug in this server must not look like a response that a test could expect.
            traceback.print_exc()
            return self._error(RequestError(500, "StrictServerBug", repr(error)))

    def _scripted_error(self, action: Action) -> Response:
        status = action.status or 500
        response = self._error(self._protocol.scripted_error(status, action.code, list(action.headers.items())))
        if action.body is not None and self._has_body(status):
            names = {name.lower() for name in action.headers}
            own_type = [] if "content-type" in names else [("Content-Type", "text/plain")]
            return Response(status, [*own_type, *action.headers.items()], action.body.encode())
        return response

    def _has_body(self, status: int) -> bool:
        return self._head.method != "HEAD" and status not in (204, 304)

    def _error(self, error: RequestError) -> Response:
        self._record.code = error.code
        return self._protocol.error_response(error, self._record, has_body=self._has_body(error.status))

    async def _send(self, response: Response, *, keep_open: bool) -> bool:
        date = ("Date", formatdate(self._state.clock.now_s(), usegmt=True))
        headers = [date, *self._protocol.common_headers(self._state, self._record)]
        return await sending.send(
            self._peer,
            replace(response, headers=headers + response.headers),
            self._action,
            self._record,
            has_body=self._has_body(response.status),
            keep_open=keep_open,
        )
