"""Runs fake-gcs-server, an emulator of the JSON API of GCS. `install` builds the binary, `child` runs it."""

from __future__ import annotations

from collections.abc import Sequence

from . import child
from .install import install


def _command(binary: str, port: int) -> Sequence[str]:
    host = f"127.0.0.1:{port}"
    return [
        binary,
        *("-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
        # The host of media and self links. The Location of a resumable upload has the host and port of the request.
        *("-public-host", host, "-external-url", f"http://{host}", "-log-level", "error"),
    ]


def serve() -> None:
    """Serves until stdin ends; raises SystemExit if fake-gcs-server does not start or exits on its own."""
    binary = str(install("fake-gcs-server"))
    child.serve("fake-gcs-server", lambda port: _command(binary, port), "/_internal/healthcheck")
