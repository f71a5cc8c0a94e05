"""One client's connection: writing, pausing, resetting, lingering. Leaves what is written, and when, to others."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios

# How long a reset waits for the client's kernel to take what was sent before it.
_ACKNOWLEDGE_LIMIT_S = 5.0
# A client that got an early answer may still be sending; it is listened to for so long, and no more than so much.
_LINGER_S = 1.0
_LINGER_BYTES = 1024 * 1024
# How soon a pause notices that its client has gone.
_GLANCE_S = 0.05


class Peer:
    """The two directions of a connection, and the ways in which a server can end it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        # drain() then waits until all is handed to the kernel, so that pauses and resets come where they are scripted.
        # asyncio's TLS takes a buffer that reached its limit for full, so that a limit of 0 would make it wait for ever.
        over_tls = writer.get_extra_info("ssl_object") is not None
        writer.transport.set_write_buffer_limits(high=1 if over_tls else 0)

    def write(self, *pieces: bytes | memoryview) -> None:
        self._writer.writelines(pieces)

    async def drain(self) -> None:
        await self._writer.drain()

    async def pause(self, duration_s: float) -> None:
        """Waits so long after all that was written is on its way; ConnectionError once the client has closed."""
        await self.drain()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + duration_s
        while (left_s := end_s - loop.time()) > 0:
            await asyncio.sleep(min(left_s, _GLANCE_S))
            if self.reader.at_eof():
                raise ConnectionError("the client closed during a scripted pause")

    def close(self) -> None:
        """Ends the connection by FIN, after all that was written."""
        self._writer.close()

    def abort(self) -> None:
        """Drops the connection with all that was not yet sent."""
        self._writer.transport.abort()

    async def reset(self) -> None:
        """Ends the connection by RST, after all that was written has arrived."""
        with contextlib.suppress(ConnectionError):
            await self._until_acknowledged()
        # Lingering for zero seconds makes closing send RST instead of FIN.
        connected: socket.socket = self._writer.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    async def _until_acknowledged(self) -> None:
        """Waits until the client's kernel has every byte, since a reset would throw away those still queued here."""
        await self.drain()
        descriptor = self._writer.get_extra_info("socket").fileno()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _ACKNOWLEDGE_LIMIT_S
        while loop.time() < end_s:
            queued = fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0" * 4)
            if struct.unpack("i", queued) == (0,):
                return
            await asyncio.sleep(0.001)

    async def linger(self) -> None:
        """Reads on for a while after an answer to an unread request.

        Closing with unread bytes sends RST, which may overtake the answer; that is what a client meets that goes on
        sending for longer than this.
        """
        discarded_bytes = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_LINGER_S):
                while discarded_bytes < _LINGER_BYTES and (block := await self.reader.read(64 * 1024)):
                    discarded_bytes += len(block)
