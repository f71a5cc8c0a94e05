"""Runs emulators of S3 and of GCS that programs of other people are tested with. `install` installs them, `child` runs them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from . import child
from .install import install

_HOST = "127.0.0.1"
# The keys that s3rver and s3proxy expect; the others accept any.
_ACCESS_KEY = "S3RVER"
_SECRET_KEY = "S3RVER"


class _Emulator(NamedTuple):
    """How an emulator is run. `command` takes what is installed, a port and an empty folder; it returns the arguments."""

    command: Callable[[Path, int, Path], Sequence[str]]
    health_path: str = "/"


def _ministack(package: Path, port: int, folder: Path) -> Sequence[str]:
    variables = [f"PYTHONPATH={package.parent}", f"BIND_HOST={_HOST}", f"GATEWAY_PORT={port}", "SERVICES=s3"]
    variables += [f"S3_DATA_DIR={folder}", f"TMPDIR={folder}", "LOG_LEVEL=ERROR"]
    return ["env", *variables, sys.executable, "-m", "ministack"]


def _s3rver(script: Path, port: int, folder: Path) -> Sequence[str]:
    where = ("--address", _HOST, "--port", str(port), "--directory", str(folder))
    return ["node", str(script), *where, "--silent", "--no-vhost-buckets"]


def _gofakes3(binary: Path, port: int, folder: Path) -> Sequence[str]:
    del folder
    return [str(binary), "-backend", "memory", "-host", f"{_HOST}:{port}", "-quiet"]


def _s3proxy(jar: Path, port: int, folder: Path) -> Sequence[str]:
    settings = folder / "s3proxy.conf"
    values = {
        "s3proxy.endpoint": f"http://{_HOST}:{port}",
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": _ACCESS_KEY,
        "s3proxy.credential": _SECRET_KEY,
        # Objects in memory: those in files need a file system with extended attributes.
        "jclouds.provider": "transient-nio2",
    }
    settings.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return ["java", "-XX:TieredStopAtLevel=1", "-jar", str(jar), "--properties", str(settings)]


def _gcp_storage_emulator(package: Path, port: int, folder: Path) -> Sequence[str]:
    variables = [f"PYTHONPATH={package.parent}", f"STORAGE_BASE={folder}"]
    where = ("--host", _HOST, "--port", str(port))
    return ["env", *variables, sys.executable, "-m", package.name, "start", *where, "--in-memory", "--quiet"]


_EMULATORS = {
    "ministack": _Emulator(_ministack, "/_ministack/health"),
    "s3rver": _Emulator(_s3rver),
    "gofakes3": _Emulator(_gofakes3),
    "s3proxy": _Emulator(_s3proxy, "/healthz"),
    "gcp-storage-emulator": _Emulator(_gcp_storage_emulator),
}


def serve(kind: str) -> None:
    """Serves until stdin ends; raises SystemExit if the emulator does not start or exits on its own."""
    command, health_path = _EMULATORS[kind]
    keys = {} if kind == "gcp-storage-emulator" else {"access_key": _ACCESS_KEY, "secret_key": _SECRET_KEY}
    installed = install(kind)
    with tempfile.TemporaryDirectory(prefix=f"torchobj-{kind}-") as folder:
        child.serve(kind, lambda port: command(installed, port, Path(folder)), health_path, **keys)
