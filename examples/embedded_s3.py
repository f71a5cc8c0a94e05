"""A small S3 to try things out with: moto's server, in a process of its own, with all objects in memory.

In a terminal, until Ctrl-C; prints what another terminal needs to reach it:

    python examples/embedded_s3.py

In a program, until the end of the block; sets nothing in the environment by itself:

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
START_LIMIT_S = 60.0


@dataclass(frozen=True)
class EmbeddedS3:
    """An S3 that was started."""

    endpoint_url: str
    process_group: int
    """Whatever is in this process group is killed together with the server, in whatever way its owner ends."""

    @property
    def environment(self) -> dict[str, str]:
        """What makes torchobj, boto3 and the AWS CLI use it. It takes any pair of keys."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": "embedded",
            "AWS_SECRET_ACCESS_KEY": "embedded",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def start(buckets: Sequence[str] = BUCKETS) -> Iterator[EmbeddedS3]:
    """Starts an S3 with empty buckets, and ends it with the block, or with this process if that is killed."""
    # The pipe to its stdin is what tells the server how long to live: the kernel closes it, however this process ends.
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
        limit = threading.Timer(START_LIMIT_S, server.kill)
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
    """As `start`; this process, and those that it starts, reach no other store, and this one without a proxy."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1"
    with start() as s3:
        os.environ.update(s3.environment)
        print(f"1. An embedded S3 runs at {s3.endpoint_url}, in a process of its own.\n", flush=True)
        yield s3


class KeepAliveHandler(MotoRequestHandler):
    """Keeps connections open, as S3 does. Werkzeug's own handler closes each after one request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        """Answers one request. Its body is read to the end, so that the next request begins where it ends."""
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
        """Says nothing about single requests."""


def make_bucket(endpoint_url: str, name: str) -> None:
    """Makes a bucket. The server asks for no signature."""
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    without_proxy.open(urllib.request.Request(f"{endpoint_url}/{name}", method="PUT"), timeout=30).close()


def main() -> None:
    """Serves until Ctrl-C, or until stdin ends."""
    parser = argparse.ArgumentParser(description="A small S3 in memory, to try things out.")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--bucket", action="append", dest="buckets", help="to be made; may be repeated")
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    buckets = arguments.buckets or list(BUCKETS)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # S3 alone: moto's own way of finding out for which of its services a request is takes longer than to answer it.
    application = create_backend_app("s3")
    server = make_server("127.0.0.1", arguments.port, application, threaded=True, request_handler=KeepAliveHandler)
    threading.Thread(target=server.serve_forever, name="serving", daemon=True).start()
    endpoint_url = f"http://127.0.0.1:{server.server_port}"
    for name in buckets:
        make_bucket(endpoint_url, name)

    if arguments.until_stdin_ends:
        print(endpoint_url, flush=True)
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)  # the trainers that joined the group, their workers, and this process

    print(f"An S3 in memory, with the buckets {', '.join(buckets)}, until Ctrl-C. To use it from another terminal:\n")
    for name, value in EmbeddedS3(endpoint_url, os.getpgrp()).environment.items():
        print(f"export {name}={value}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
