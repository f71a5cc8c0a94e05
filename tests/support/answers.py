"""A small server of HTTP whose answers a test returns: for answers that the strict servers do not send."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import torchobj
from torchobj import GCSOptions, S3Options, StoreConfig


class Sent(NamedTuple):
    """A request that the server received."""

    method: str
    path: str
    headers: Mapping[str, str]
    """With names in lower case."""
    body: bytes


Answer = tuple[int, Mapping[str, str], bytes]


class Answers(ThreadingHTTPServer):
    """A server that answers requests by a function: status, headers and body."""

    def __init__(self, answer: Callable[[Sent], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.requests: list[Sent] = []

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_port}"

    def store(self, scheme: str, *, force_sdk: bool = False) -> torchobj.Store:
        """The store of a bucket on this server."""
        config = StoreConfig(
            s3=S3Options(endpoint_url=self.url, anonymous=True, region="us-east-1", force_sdk=force_sdk),
            gcs=GCSOptions(endpoint_url=self.url, anonymous=True, force_sdk=force_sdk),
        )
        return torchobj.Store(f"{scheme}://bucket", config=config)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Answers

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        sent = Sent(self.command, self.path, headers, body)
        self.server.requests.append(sent)
        status, answered, content = self.server.answer(sent)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **answered}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  the names of the base class

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@contextmanager
def answering(answer: Callable[[Sent], Answer]) -> Iterator[Answers]:
    """Starts a server, and stops it at the end."""
    server = Answers(answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
