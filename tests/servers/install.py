"""Builds versitygw from its Go module once and keeps it. `versitygw` runs it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

VERSION = "v1.8.0"
MODULE = "github.com/versity/versitygw/cmd/versitygw"
# A cold build downloads and compiles about 300 packages.
_BUILD_LIMIT_S = 20 * 60.0


class InstallFailed(Exception):
    """versitygw could not be built; the message names what is missing or contains Go's output."""


def cache_directory() -> Path:
    """Returns $TORCHOBJ_CACHE, or torchobj's folder in the user's cache directory."""
    chosen = os.environ.get("TORCHOBJ_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchobj"


def versitygw_path() -> Path:
    """Returns the path of this version's binary, whether or not it exists yet."""
    return cache_directory() / "bin" / f"versitygw-{VERSION}"


def _build(target: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise InstallFailed(f"go is not on PATH; it is needed once, to build {MODULE}@{VERSION} (https://go.dev/dl)")
    # Build in the same folder, so that a rename publishes the finished binary.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as directory:
        command = [go, "install", f"{MODULE}@{VERSION}"]
        environment = os.environ | {"GOBIN": directory}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=_BUILD_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InstallFailed(f"{' '.join(command)}: not done after {_BUILD_LIMIT_S:.0f} s") from error
        if done.returncode != 0:
            raise InstallFailed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-4000:]}")
        os.replace(Path(directory) / "versitygw", target)


def install_versitygw() -> Path:
    """Returns the binary's path; builds it first if it is missing.

    Raises InstallFailed if Go is missing or fails. Concurrent processes build once.
    """
    target = versitygw_path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f"{target.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(target)
    return target
