"""Runs moto's S3 in this process with keep-alive connections. moto implements S3."""

from __future__ import annotations

import logging
from collections.abc import Callable
from io import BytesIO

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.datastructures import Headers
from werkzeug.serving import make_server

from .announcement import Announcement
from .lifetime import when_stdin_ends

# moto accepts any pair of keys and verifies no signature.
ACCESS_KEY = "mototests"
SECRET_KEY = "moto/tests+secret"


class _KeepAliveHandler(MotoRequestHandler):
    """Keeps connections open, which Werkzeug's own handler does not."""

    protocol_version = "HTTP/1.1"
    # Headers and body are sent in two writes; Nagle's algorithm would hold the second until the client's delayed ACK.
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        """Runs the application for one request, after reading the whole body so that the next request follows it."""
        environ = self.make_environ()
        # Werkzeug's input stream decodes a chunked body.
        chunked = environ.get("wsgi.input_terminated", False)
        length_bytes = int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read() if chunked else self.rfile.read(length_bytes))
        status, headers = 500, Headers()

        def start_response(line: str, items: list[tuple[str, str]], error: object = None) -> Callable[[bytes], object]:
            nonlocal status, headers
            del error  # Nothing was sent yet: an application may change its mind.
            status, headers = int(line.split(" ", 1)[0]), Headers(items)
            return self.wfile.write

        parts = self.server.app(environ, start_response)
        body = b"".join(parts)
        if self.command != "HEAD" and status not in (204, 304):
            headers["Content-Length"] = str(len(body))
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log(self, type: str, message: str, *args: object) -> None:
        """Logs nothing: a line per request would hide the output of a failing test."""


def serve() -> None:
    """Serves until stdin ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_KeepAliveHandler)
    when_stdin_ends(server.shutdown)
    Announcement(f"http://127.0.0.1:{server.server_port}", ACCESS_KEY, SECRET_KEY).print()
    server.serve_forever()
