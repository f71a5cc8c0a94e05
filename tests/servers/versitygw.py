"""Runs versitygw, a gateway from S3 to a directory, as a child process. `install` builds the binary."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .announcement import REGION, Announcement
from .install import install_versitygw
from .lifetime import die_with_parent, when_stdin_ends

ACCESS_KEY = "versitygwtests"
SECRET_KEY = "versitygw/tests+secret"
_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 5.0
# versitygw cannot choose a free port and report it, so another process may take the port that was free a moment ago.
_PORT_ATTEMPTS = 5


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _has_extended_attributes(directory: Path) -> bool:
    """Returns whether versitygw can store its metadata beside the data; tmpfs before Linux 6.6, for example, cannot."""
    if not hasattr(os, "setxattr"):
        return False
    try:
        os.setxattr(directory, "user.torchobj.probe", b"1")
        os.removexattr(directory, "user.torchobj.probe")
    except OSError:
        return False
    return True


def _command(binary: Path, port: int, directory: Path) -> Sequence[str]:
    data = directory / "data"
    data.mkdir(exist_ok=True)
    metadata: list[str] = []
    if not _has_extended_attributes(data):
        sidecar = directory / "metadata"
        sidecar.mkdir(exist_ok=True)
        metadata = ["--sidecar", str(sidecar)]
    return [
        str(binary),
        *("--port", f"127.0.0.1:{port}"),
        *("--access", ACCESS_KEY, "--secret", SECRET_KEY, "--region", REGION),
        # Without --keep-alive, versitygw closes each connection after one response.
        *("--keep-alive", "--quiet", "--health", "/health"),
        *("posix", *metadata, str(data)),
    ]


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _started(process: subprocess.Popen[bytes], port: int) -> bool:
    """Returns whether versitygw responds; False if it exited first, for example because its port was taken."""
    deadline_s = time.monotonic() + _START_LIMIT_S
    while process.poll() is None:
        if _answers(port):
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_LIMIT_S)


def serve() -> None:
    """Serves until stdin ends; raises SystemExit if versitygw does not start or exits on its own."""
    binary = install_versitygw()
    with tempfile.TemporaryDirectory(prefix="torchobj-versitygw-") as directory:
        for _ in range(_PORT_ATTEMPTS):
            port = _free_port()
            process = subprocess.Popen(
                _command(binary, port, Path(directory)),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                preexec_fn=die_with_parent,
            )
            with contextlib.ExitStack() as running:
                running.callback(_stop, process)
                if not _started(process, port):
                    continue
                _serve_until_stdin_ends(process, port)
                return
    raise SystemExit(f"versitygw did not start; its output is above ({_PORT_ATTEMPTS} attempts)")


def _serve_until_stdin_ends(process: subprocess.Popen[bytes], port: int) -> None:
    Announcement(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY).print()
    stdin_ended = threading.Event()

    def stop() -> None:
        stdin_ended.set()
        process.terminate()

    when_stdin_ends(stop)
    status = process.wait()
    if not stdin_ended.is_set():
        raise SystemExit(f"versitygw exited on its own with status {status}")
