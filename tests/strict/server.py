"""Listens and serves until stopped. `connection` and `control_api` serve each connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from functools import partial

from .connection import serve_connection
from .control_api import serve_control
from .protocol import Protocol
from .state import State

HOST = "127.0.0.1"
# asyncio's stream buffer: larger than any line of a head, and large enough to read a body without many pauses.
_BUFFER_BYTES = 1024 * 1024
# Clients open many connections at once; none may be refused.
_BACKLOG = 1024

Serve = Callable[[State, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """One listening port and the tasks that serve its connections; `close` cancels them."""

    def __init__(self, state: State, serve: Serve) -> None:
        self._state = state
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """Listens on a free port of the loopback interface."""
        self._server = await asyncio.start_server(
            self._accepted, HOST, 0, limit=_BUFFER_BYTES, backlog=_BACKLOG, ssl=tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(self._state, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve(
    protocol: Protocol,
    announce: Callable[[int, int], None],
    stopped: Callable[[], Awaitable[None]],
    *,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serves a protocol and its control API until `stopped` returns.

    announce: called once with the two ports, the protocol's and the control API's, when both accept connections.
    tls: makes the protocol's port speak TLS; the control API's never does.
    """
    state = State()
    listener = Listener(state, partial(serve_connection, protocol))
    control = Listener(state, partial(serve_control, protocol.control))
    try:
        await listener.open(tls)
        await control.open(None)
        state.endpoint = f"{'https' if tls else 'http'}://{HOST}:{listener.port}"
        announce(listener.port, control.port)
        await stopped()
    finally:
        await listener.close()
        await control.close()
