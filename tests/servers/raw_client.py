"""Sends requests byte by byte, signed by botocore, to test what no HTTP client sends. Tests check the responses."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from .launch import Server

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RawResponse:
    """A response as it was received.

    Header names are in lower case; `complete` tells whether the whole body arrived; `preceding` has the statuses of the
    1xx responses before it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    complete: bool = True
    preceding: tuple[int, ...] = ()


def request_bytes(
    server: Server,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    host: str | None = None,
    region: str | None = None,
    signed: bool = True,
) -> bytes:
    """Returns a whole request; adds Content-Length if there is a body or the method is PUT or POST."""
    where = urlsplit(server.endpoint)
    host = host or where.netloc
    request = AWSRequest(method, f"{where.scheme}://{host}{target}", headers=dict(headers or {}), data=body)
    if signed:
        credentials = Credentials(server.access_key, server.secret_key)
        S3SigV4Auth(credentials, "s3", region or server.region).add_auth(request)
    sent = {"Host": host, **dict(request.headers.items())}
    if body or method in ("PUT", "POST"):
        sent.setdefault("Content-Length", str(len(body)))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def gcs_request_bytes(
    server: Server,
    method: str,
    target: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    token: str | None = None,
) -> bytes:
    """Returns a whole request with a bearer token, by default the server's; "" sends none."""
    token = server.token if token is None else token
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    return request_bytes(server, method, target, headers={**authorization, **(headers or {})}, body=body, signed=False)


class RawConnection:
    """One connection to a server."""

    def __init__(self, server: Server) -> None:
        where = urlsplit(server.endpoint)
        self._socket = socket.create_connection((where.hostname, where.port), _TIMEOUT_S)
        if where.scheme == "https":
            self._socket = ssl.create_default_context(cafile=server.ca_file).wrap_socket(
                self._socket, server_hostname=where.hostname, suppress_ragged_eofs=False
            )

    def send(self, content: bytes) -> None:
        self._socket.sendall(content)

    def receive_all(self) -> bytes:
        """Returns all bytes until the server closes; raises ConnectionResetError if it resets."""
        content = bytearray()
        while block := self._socket.recv(65536):
            content += block
        return bytes(content)

    def finish_sending(self) -> None:
        """Closes the sending half of the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def receive(self, size_bytes: int, *, timeout_s: float = _TIMEOUT_S) -> bytes:
        """Returns `size_bytes` bytes, or fewer if the server closes first; raises TimeoutError after `timeout_s`."""
        self._socket.settimeout(timeout_s)
        content = bytearray()
        while len(content) < size_bytes and (block := self._socket.recv(min(size_bytes - len(content), 1024 * 1024))):
            content += block
        return bytes(content)

    def answer(self, method: str = "GET") -> RawResponse:
        """Reads exactly one response, with the 1xx responses before it."""
        preceding: list[int] = []
        while True:
            status, headers = self._head()
            if status >= 200:
                break
            preceding.append(status)
        if method == "HEAD" or status in (204, 304):
            return RawResponse(status, headers, b"", preceding=tuple(preceding))
        body, complete = self._body(headers)
        return RawResponse(status, headers, body, complete, tuple(preceding))

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            byte = self._socket.recv(1)
            if not byte:
                raise ConnectionError(f"closed after {line!r}")
            line += byte
        return line[:-2]

    def _head(self) -> tuple[int, dict[str, str]]:
        status = int(self._line().split(b" ")[1])
        headers = {}
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(": ")
            headers[name.lower()] = value
        return status, headers

    def _body(self, headers: Mapping[str, str]) -> tuple[bytes, bool]:
        if "content-length" in headers:
            size_bytes = int(headers["content-length"])
            body = self.receive(size_bytes)
            return body, len(body) == size_bytes
        if headers.get("transfer-encoding") != "chunked":
            return self.receive_all(), True
        body = b""
        try:
            while size_bytes := int(self._line(), 16):
                chunk = self.receive(size_bytes)
                body += chunk
                if len(chunk) < size_bytes or self._line():
                    return body, False
            return body, not self._line()
        except ConnectionError:
            return body, False

    def exchange(self, content: bytes) -> RawResponse:
        """Sends a whole request and reads its response."""
        self.send(content)
        return self.answer(content.split(b" ", 1)[0].decode())

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
