"""Runs a server as a child process on a free port, until stdin ends. The module of each server builds its command."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from .announcement import Announcement
from .lifetime import die_with_parent, when_stdin_ends

_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 5.0
# These servers cannot choose a free port and report it, so another process may take the port that was free a moment ago.
_PORT_ATTEMPTS = 5


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int, health_path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", health_path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _started(process: subprocess.Popen[bytes], port: int, health_path: str) -> bool:
    """Returns whether the server responds; False if it exited first, for example because its port was taken."""
    deadline_s = time.monotonic() + _START_LIMIT_S
    while process.poll() is None:
        if _answers(port, health_path):
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


def serve(
    name: str, command: Callable[[int], Sequence[str]], health_path: str, *, access_key: str = "", secret_key: str = ""
) -> None:
    """Announces the server at 127.0.0.1 and returns at the end of stdin.

    name: for messages; command: returns the arguments of the process for a port; health_path: answers 200 once the
    server is ready; access_key, secret_key: the server's account, if it has one.
    Errors: SystemExit if the server does not start or exits on its own.
    """
    for _ in range(_PORT_ATTEMPTS):
        port = _free_port()
        process = subprocess.Popen(
            command(port), stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=die_with_parent
        )
        with contextlib.ExitStack() as running:
            running.callback(_stop, process)
            if not _started(process, port, health_path):
                continue
            Announcement(f"http://127.0.0.1:{port}", access_key, secret_key).print()
            _until_stdin_ends(name, process)
            return
    raise SystemExit(f"{name} did not start; its output is above ({_PORT_ATTEMPTS} attempts)")


def _until_stdin_ends(name: str, process: subprocess.Popen[bytes]) -> None:
    stdin_ended = threading.Event()

    def stop() -> None:
        stdin_ended.set()
        process.terminate()

    when_stdin_ends(stop)
    status = process.wait()
    if not stdin_ended.is_set():
        raise SystemExit(f"{name} exited on its own with status {status}")
