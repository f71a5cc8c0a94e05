"""One client's connection: writes, pauses, resets, lingers. Other modules decide what to write and when."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios

# How long a reset waits for the client's kernel to receive what was sent before it.
_ACKNOWLEDGE_LIMIT_S = 5.0
# A client may still send its body after an early response; limits for reading it, in seconds and bytes.
_LINGER_S = 1.0
_LINGER_BYTES = 1024 * 1024
# How often a pause checks whether the client has closed.
_GLANCE_S = 0.05


class Peer:
    """Both directions of a connection, and the ways in which a server can end it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        # drain() then waits until the kernel has all bytes, so that pauses and resets happen at the scripted position.
        # asyncio's TLS treats a buffer at its limit as full, so that a limit of 0 would block forever.
        over_tls = writer.get_extra_info("ssl_object") is not None
        writer.transport.set_write_buffer_limits(high=1 if over_tls else 0)

    def write(self, *pieces: bytes | memoryview) -> None:
        self._writer.writelines(pieces)

    async def drain(self) -> None:
        await self._writer.drain()

    async def pause(self, duration_s: float) -> None:
        """Waits for `duration_s` after everything was sent; raises ConnectionError once the client has closed."""
        await self.drain()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + duration_s
        while (left_s := end_s - loop.time()) > 0:
            await asyncio.sleep(min(left_s, _GLANCE_S))
            if self.reader.at_eof():
                raise ConnectionError("the client closed during a scripted pause")

    def close(self) -> None:
        """Closes the connection with FIN, after everything written."""
        self._writer.close()

    def abort(self) -> None:
        """Drops the connection with all unsent bytes."""
        self._writer.transport.abort()

    async def reset(self) -> None:
        """Closes the connection with RST, after everything written has arrived."""
        with contextlib.suppress(ConnectionError):
            await self._until_acknowledged()
        # A linger time of zero makes close() send RST instead of FIN.
        connected: socket.socket = self._writer.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()

    async def _until_acknowledged(self) -> None:
        """Waits until the client's kernel has every byte, since a reset would discard queued ones."""
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
        """Keeps reading for a while after responding to an unread request.

        Closing with unread bytes sends RST, which may overtake the response; a client that sends for longer gets
        the RST.
        """
        discarded_bytes = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_LINGER_S):
                while discarded_bytes < _LINGER_BYTES and (block := await self.reader.read(64 * 1024)):
                    discarded_bytes += len(block)
