"""Keeps torch's iterator from waiting for a worker that was killed: for a lock that it held, or for the rest of a
message that it was sending. torch finds that a worker has exited, and raises.

torch's workers share an event, by which the iterator ends them, and a queue of results. Both are objects of
multiprocessing, whose locks a killed process keeps. The iterator reports the death of a worker once, and waits without
a limit when it is deleted after that.
"""

import contextlib
import multiprocessing.queues
import multiprocessing.synchronize
import os
import struct
import time
from typing import Any

#: Time after which the lock of the event is taken from a worker, which holds it for microseconds.
_LOCKED_S = 1.0

#: The length of a message, and that of a longer one, as `multiprocessing.connection.Connection` sends them.
_LENGTH, _LONG_LENGTH = struct.Struct("!i"), struct.Struct("!iQ")


def not_waiting_for_killed_workers(iterator: Any) -> Any:
    """Changes an iterator of torch, or torchdata, that has started its workers. Returns it."""
    event, queue = getattr(iterator, "_workers_done_event", None), getattr(iterator, "_worker_result_queue", None)
    if isinstance(event, multiprocessing.synchronize.Event):
        iterator._workers_done_event = _DoneEvent(event)
    if isinstance(queue, multiprocessing.queues.Queue) and os.name == "posix":
        received = _WholeMessages(queue._reader)  # type: ignore[attr-defined]
        queue._poll, queue._recv_bytes = received.poll, received.recv_bytes  # type: ignore[attr-defined]
    return iterator


class _DoneEvent:
    """An event that only this process sets."""

    def __init__(self, event: Any) -> None:
        self._event, self._is_set = event, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        lock, flag = self._event._cond, self._event._flag
        # Released in any case: workers that wait for it can end.
        lock.acquire(timeout=_LOCKED_S)
        flag.acquire(block=False)
        flag.release()
        # The worker may have released it since.
        with contextlib.suppress(ValueError):
            lock.release()


class _WholeMessages:
    """Receives the messages of a connection, each when it has arrived as a whole."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._content = connection, bytearray()

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether a whole message has arrived, or does so within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (missing := self._missing()) > 0:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            chunk = os.read(self._connection.fileno(), missing)
            if not chunk:
                raise EOFError
            self._content += chunk
        return True

    def recv_bytes(self) -> memoryview:
        """The next message."""
        while not self.poll(_LOCKED_S):
            pass
        start, content = self._length().size, self._content
        self._content = bytearray()
        return memoryview(content)[start:]

    def _length(self) -> struct.Struct:
        """What precedes the message."""
        return _LONG_LENGTH if self._content.startswith(_LENGTH.pack(-1)) else _LENGTH

    def _missing(self) -> int:
        length, arrived = self._length(), len(self._content)
        if arrived < length.size:
            return length.size - arrived
        size: int = length.unpack_from(self._content)[-1]
        return length.size + size - arrived
