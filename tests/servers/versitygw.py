"""Runs versitygw, a gateway from S3 to a directory. `install` builds the binary, `child` runs it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import child
from .announcement import REGION
from .install import install

ACCESS_KEY = "versitygwtests"
SECRET_KEY = "versitygw/tests+secret"


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


def serve() -> None:
    """Serves until stdin ends; raises SystemExit if versitygw does not start or exits on its own."""
    binary = install("versitygw")
    with tempfile.TemporaryDirectory(prefix="torchobj-versitygw-") as directory:
        child.serve(
            "versitygw",
            lambda port: _command(binary, port, Path(directory)),
            "/health",
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
        )
