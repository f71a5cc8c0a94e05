"""Passes the descriptor of a ring to other processes of this machine and user, through a socket without a file.

The socket has an abstract name of the network namespace. Both sides compare the user of the other, and a secret, which
is not in the name.
"""

import hmac
import os
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from typing import Self

__all__ = ["Offer", "receive"]

#: Maximum time for one message.
_TIMEOUT_S = 1.0

#: Time between two attempts to connect.
_PAUSE_S = 0.01


class Offer:
    """A thread that sends a descriptor to each process that asks for it, until `close`.

    Args:
        name: Name of the socket.
        secret: What a process that asks must send: 32 bytes.
        descriptor: The descriptor that it receives.

    Raises:
        OSError: The name is in use, or the system refuses sockets.
    """

    def __init__(self, name: str, secret: bytes, descriptor: int) -> None:
        self._secret, self._descriptor = secret, descriptor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind("\0" + name)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise
        self._is_closed = False
        _offers.add(self)
        self._thread = threading.Thread(target=self._serve, name="torchobj-handshake", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                # Closed; or there is no descriptor left for a connection, until another one is closed.
                time.sleep(_PAUSE_S)
                continue
            with connection, suppress(OSError):
                connection.settimeout(_TIMEOUT_S)
                if _user_of(connection) == os.geteuid() and hmac.compare_digest(connection.recv(32), self._secret):
                    socket.send_fds(connection, [b"ring"], [self._descriptor])

    def close(self) -> None:
        """Ends the thread, and frees the name."""
        self._is_closed = True
        with suppress(OSError):
            # Wakes `accept`.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: The offers of this process. A forked child closes its copies of the sockets, which would hold the names.
_offers: "weakref.WeakSet[Offer]" = weakref.WeakSet()


def _close_in_child() -> None:
    for offer in list(_offers):
        offer._socket.close()


os.register_at_fork(after_in_child=_close_in_child)


def receive(name: str, secret: bytes, *, patience_s: float = 0) -> int | None:
    """Returns a descriptor that another process offers, which the caller closes; None if it does not arrive.

    Args:
        name, secret: As for `Offer`.
        patience_s: Time to wait for the offer.
    """
    until = time.monotonic() + patience_s
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            connection.connect("\0" + name)
            if _user_of(connection) != os.geteuid():
                return None
            connection.send(secret)
            _, descriptors, _, _ = socket.recv_fds(connection, 16, 1)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # noqa: FBT003  of the standard library
            return next(iter(descriptors), None)
        if time.monotonic() >= until:
            return None
        time.sleep(_PAUSE_S)


def _user_of(connection: socket.socket) -> int:
    """Returns the user of the process at the other end, as the system has recorded it."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
