"""Versions and limits of this machine for a bug report: no secrets, no values of variables, no paths. Needs no click.

`doctor` judges some of them; here they are only found.
"""

import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path

from torchobj import _torchobj
from torchobj.cli.output import human_size, rows
from torchobj.workers.memory_budget import memory_bytes

SHARED_MEMORY = "/dev/shm"  # noqa: S108  it is only measured

#: Packages that torchobj uses, and those that use it and change its behaviour.
_PACKAGES = (
    *("torch", "numpy", "pyarrow", "fsspec", "pillow", "torchvision", "torchcodec", "torchdata", "accelerate"),
    *("lightning", "datasets", "pandas", "s3torchconnector"),
)

#: The packages of the extras that users install, as in pyproject.toml.
EXTRAS = {
    "cli": ("click", "rich"),
    "manifest": ("pyarrow",),
    "otel": ("opentelemetry-api",),
    "torch-checkpointing": ("torch_checkpointing",),
    "transformers": ("transformers",),
    "webdataset": ("webdataset",),
}

#: Instructions that the checksums of crc-fast use, by their names in /proc/cpuinfo.
_CHECKSUM_FEATURES = ("sse4_1", "sse4_2", "pclmulqdq", "avx512vl", "vpclmulqdq", "crc32", "pmull", "sha3")


def version(package: str) -> str:
    """The version of a package, without importing it, or "is not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


def system() -> str:
    """The system, its kernel and the architecture."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def processors() -> str:
    """Number of processors that the process may use, of those of the machine, and the quota of its cgroup."""
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else machine
    try:
        # cgroups(7), version 2: microseconds of CPU time in each period, or "max".
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limited = f", quota of {int(quota) / int(period):.4g}"
    except (OSError, ValueError):
        limited = ""
    return f"{usable} of {machine} cores{limited}"


def limit_text(value: int) -> str:
    """A limit of `resource.getrlimit`."""
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def open_files() -> str:
    """The limit on open files, and the one to which it may be raised."""
    soft, hard = map(limit_text, resource.getrlimit(resource.RLIMIT_NOFILE))
    return f"{soft} files, may be raised to {hard}"


def shared_memory() -> tuple[int, int]:
    """Returns the free and the total bytes of `/dev/shm`.

    Raises:
        OSError: The system has no `/dev/shm`.
    """
    state = os.statvfs(SHARED_MEMORY)
    return state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize


def shared_memory_text(free: int, total: int) -> str:
    """Free and total bytes for users."""
    return f"{human_size(free)} free of {human_size(total)}"


def print_report() -> None:
    """Prints versions and limits, a line each: `torchobj --versions`."""
    rows(
        [
            ("torchobj", _torchobj.__version__),
            ("Python", f"{platform.python_version()}, {platform.python_implementation()}"),
            *((package, version(package)) for package in _PACKAGES),
            *((f"torchobj[{extra}]", _extra(packages)) for extra, packages in EXTRAS.items()),
            ("system", f"{system()}, {_distribution()}"),
            ("processors", processors()),
            ("for checksums", _features()),
            ("memory", f"{human_size(memory_bytes())}, of the machine or the container"),
            (SHARED_MEMORY, _shared_memory()),
            ("open files", open_files()),
        ]
    )


def _extra(packages: tuple[str, ...]) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)


def _shared_memory() -> str:
    try:
        return shared_memory_text(*shared_memory())
    except OSError as error:
        return str(error.strerror)


def _distribution() -> str:
    libc = " ".join(platform.libc_ver())
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {libc}"
    except OSError:
        return f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else libc


def _features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    names = next((line.split() for line in lines if line.lower().startswith(("flags", "features"))), [])
    return " ".join(name for name in _CHECKSUM_FEATURES if name in names) or "none"
