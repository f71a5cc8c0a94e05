"""Starts a test server as a process and stops it. The command that it runs does the serving."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from . import announcement
from .announcement import Announcement
from .install import BINARIES, EMULATORS, install

_REPOSITORY = Path(__file__).resolve().parents[2]
_STOP_LIMIT_S = 10.0
_STDERR_SHOWN_BYTES = 4000


class StartFailed(Exception):
    """A server did not start; the message has its command, what happened and the end of its stderr."""


class Server:
    """A running server; `close`, the end of a `with` block, or the end of this process stops it."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes], where: Announcement) -> None:
        self._process = process
        self._stderr = stderr
        self.endpoint = where.endpoint
        self.access_key = where.access_key
        self.secret_key = where.secret_key
        self.region = where.region
        self.control = where.control
        self.pid = where.pid
        self.ca_file = where.ca_file
        self.token = where.token

    def stderr_text(self) -> str:
        """Returns the end of what the server wrote to stderr so far."""
        return _end_of(self._stderr)

    def close(self) -> None:
        """Stops the server and waits for it; kills it after 10 s. Idempotent."""
        _end(self._process)
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _end_of(stderr: IO[bytes]) -> str:
    size_bytes = os.fstat(stderr.fileno()).st_size
    start = max(size_bytes - _STDERR_SHOWN_BYTES, 0)
    return os.pread(stderr.fileno(), _STDERR_SHOWN_BYTES, start).decode(errors="replace")


def _first_line(descriptor: int, timeout_s: float) -> bytes | None:
    """Returns the first line, or what was read before the end of the stream; None after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(deadline_s - time.monotonic(), 0.0)):
                return None
            block = os.read(descriptor, 4096)
            if not block:
                break
            line += block
    return line


def start(kind: str, *options: str, timeout_s: float = 30.0) -> Server:
    """Starts a server in its own process and returns when it accepts connections.

    kind: "strict", "strict-gcs", "moto", "versitygw", "fake-gcs-server" or one of EMULATORS; options: those of
        `python -m tests.servers serve <kind>`.
    timeout_s: maximum start time; installing a missing server does not count.
    Errors: StartFailed with the end of the server's stderr.
    """
    if kind in BINARIES or kind in EMULATORS:
        install(kind)
    command = [sys.executable, "-m", "tests.servers", "serve", kind, *options]
    # A file instead of a pipe: nothing reads it while the server runs, and a full pipe would block the server.
    stderr = tempfile.TemporaryFile()  # it lives as long as the Server that gets it
    process = subprocess.Popen(command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    started = False
    try:
        assert process.stdout is not None, "stdout=PIPE was passed above"
        line = _first_line(process.stdout.fileno(), timeout_s)
        if line is None or not line.endswith(b"\n"):
            what = f"printed nothing within {timeout_s:g} s" if line is None else "exited before it was ready"
            raise StartFailed(f"{' '.join(command)}: {what}\n{_end_of(stderr)}")
        server = Server(process, stderr, announcement.parse(line.decode()))
        started = True
        return server
    finally:
        if not started:
            _end(process)
            stderr.close()
