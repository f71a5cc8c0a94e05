"""A small S3 server for experiments: moto's server in a separate process, with all objects in memory.

In a terminal it runs until Ctrl-C, and prints the environment variables to set in another terminal:

    python examples/embedded_s3.py

In a program it runs until the end of the block, and does not change the environment:

    with embedded_s3.start() as s3:
        subprocess.run([...], env=os.environ | s3.environment)
"""

import argparse
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.datastructures import Headers
from werkzeug.serving import make_server

BUCKETS = ("digits", "digits-checkpoints")
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class EmbeddedS3:
    """A running server."""

    endpoint_url: str
    process_group: int
    """All processes of this group are killed together with the server, also if its owner is killed."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which torchobj, boto3 and the AWS CLI use the server. It accepts any keys."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": "embedded",
            "AWS_SECRET_ACCESS_KEY": "embedded",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def start(buckets: Sequence[str] = BUCKETS) -> Iterator[EmbeddedS3]:
    """Starts a server with empty buckets. It stops at the end of the block, or when this process is killed."""
    # The server stops when its stdin is closed. The kernel closes the pipe when this process exits for any reason.
    server = subprocess.Popen(
        [sys.executable, __file__, "--until-stdin-ends", *(f"--bucket={name}" for name in buckets)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    with server:
        assert server.stdin is not None
        assert server.stdout is not None
        limit = threading.Timer(START_TIMEOUT_S, server.kill)
        limit.start()
        try:
            endpoint_url = server.stdout.readline().strip()
            limit.cancel()
            if not endpoint_url:
                raise RuntimeError(f"the embedded S3 did not start: exit status {server.wait()}")
            yield EmbeddedS3(endpoint_url, process_group=server.pid)
        finally:
            limit.cancel()
            with suppress(ProcessLookupError, PermissionError):  # It may have ended by itself.
                os.killpg(server.pid, signal.SIGKILL)


@contextmanager
def start_alone() -> Iterator[EmbeddedS3]:
    """As `start`. This process and its children use this server only, and without a proxy."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1"
    with start() as s3:
        os.environ.update(s3.environment)
        print(f"1. An embedded S3 server runs at {s3.endpoint_url}.\n", flush=True)
        yield s3


class KeepAliveHandler(MotoRequestHandler):
    """Keeps connections open, as S3 does. Werkzeug's handler closes them after each request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        """Handles one request. The body is read to its end, because the next request follows on the connection."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        environ = self.make_environ()
        is_chunked = environ.get("wsgi.input_terminated", False)
        length_bytes = int(environ.get("CONTENT_LENGTH") or 0)
        received = environ["wsgi.input"].read() if is_chunked else self.rfile.read(length_bytes)
        environ["wsgi.input"] = io.BytesIO(received)
        status, headers = 500, Headers()

        def start_response(line: str, items: list[tuple[str, str]], _: object = None) -> Callable[[bytes], object]:
            nonlocal status, headers
            status, headers = int(line.split(" ", 1)[0]), Headers(items)
            return self.wfile.write

        body = b"".join(self.server.app(environ, start_response))
        has_body = self.command != "HEAD" and status not in (204, 304)
        if has_body:
            headers["Content-Length"] = str(len(body))
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002  Werkzeug's name
        """Does not log single requests."""


def create_bucket(endpoint_url: str, name: str) -> None:
    """Creates a bucket. The server does not require a signature."""
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    without_proxy.open(urllib.request.Request(f"{endpoint_url}/{name}", method="PUT"), timeout=30).close()


def main() -> None:
    """Serves until Ctrl-C, or until stdin is closed."""
    parser = argparse.ArgumentParser(description="A small in-memory S3 server for experiments.")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--bucket", action="append", dest="buckets", help="bucket to create; may be repeated")
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    buckets = arguments.buckets or list(BUCKETS)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # S3 only: finding the service of a request takes moto longer than handling the request.
    application = create_backend_app("s3")
    server = make_server("127.0.0.1", arguments.port, application, threaded=True, request_handler=KeepAliveHandler)
    threading.Thread(target=server.serve_forever, name="serving", daemon=True).start()
    endpoint_url = f"http://127.0.0.1:{server.server_port}"
    for name in buckets:
        create_bucket(endpoint_url, name)

    if arguments.until_stdin_ends:
        print(endpoint_url, flush=True)
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)  # the trainers in the group, their workers, and this process

    print(f"An in-memory S3 server with the buckets {', '.join(buckets)} runs until Ctrl-C. In another terminal:\n")
    for name, value in EmbeddedS3(endpoint_url, os.getpgrp()).environment.items():
        print(f"export {name}={value}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
