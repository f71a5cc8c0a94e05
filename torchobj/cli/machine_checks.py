"""Checks of the machine for `torchobj doctor`: versions, limits of the process, and shared memory. Sends no request."""

import os
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata

from torchobj import _torchobj
from torchobj.cli.checks import Check
from torchobj.cli.output import human_size
from torchobj.config import config_file
from torchobj.datasets.memory_budget import budget_bytes
from torchobj.exceptions import ConfigError

__all__ = ["machine_checks"]

#: Descriptors of a loader with many connections and workers, with a margin.
_FILES = 4096
#: PyTorch workers pass batches through `/dev/shm`. Docker's default is 64 MiB (docs, `docker run --shm-size`).
_SHARED_BYTES = 1 << 30

_SHM = "/dev/shm"  # noqa: S108  it is only measured


def machine_checks() -> Iterator[Check]:
    """Checks the machine."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    versions = f"torchobj {_torchobj.__version__}, Python {platform.python_version()}, torch {_version('torch')}"
    yield Check("versions", "note", f"{versions}, {system}, {os.cpu_count()} cores")
    yield _configuration()
    yield _files()
    yield _locked_memory()
    yield _shared_memory()
    yield _memfd()
    yield _budget()


def _version(package: str) -> str:
    # Without importing the package.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


def _configuration() -> Check:
    path = os.environ.get(config_file.VARIABLE)
    if not path:
        return Check("configuration file", "note", f"none; {config_file.VARIABLE} is not set")
    try:
        file = config_file.current()
    except ConfigError as error:
        return Check("configuration file", "failed", str(error))
    prefixes = ", ".join(map(str, file.settings)) if file is not None else ""
    return Check("configuration file", "ok", f"{path} applies to {prefixes or 'no prefix'}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} files, may be raised to {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        advice = f"`ulimit -n {_FILES}`: connections and DataLoader workers need descriptors"
        return Check("open files", "warning", found, advice)
    return Check("open files", "ok", found)


def _locked_memory() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = [_limit(value) if value == resource.RLIM_INFINITY else human_size(value) for value in (soft, hard)]
    # CUDA pins memory by its driver, which this limit does not cover.
    return Check("locked memory", "note", f"{shown[0]}, may be raised to {shown[1]}; torchobj locks none")


def _shared_memory() -> Check:
    try:
        state = os.statvfs(_SHM)
    except OSError as error:
        advice = "DataLoader workers of torch need it to pass batches"
        return Check(_SHM, "warning", f"{error.strerror}", advice)
    total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    found = f"{human_size(free)} free of {human_size(total)}"
    if free < _SHARED_BYTES:
        advice = "DataLoader workers that return tensors may fail: `docker run --shm-size=8g`, or an emptyDir in memory"
        return Check(_SHM, "warning", found, advice)
    return Check(_SHM, "ok", found)


def _memfd() -> Check:
    if not hasattr(os, "memfd_create"):
        return Check("memfd", "warning", f"{sys.platform} has none", "workers read by themselves, without look-ahead")
    try:
        number = os.memfd_create("torchobj-doctor")
        try:
            os.ftruncate(number, 1 << 20)
            os.pwrite(number, b"x", (1 << 20) - 1)
        finally:
            os.close(number)
    except OSError as error:
        advice = "the look-ahead of loaders needs it: allow memfd_create in the sandbox"
        return Check("memfd", "failed", str(error.strerror), advice)
    return Check("memfd", "ok", "can be created")


def _budget() -> Check:
    try:
        return Check("memory budget", "note", f"{human_size(budget_bytes())} per rank for objects that are read ahead")
    except ConfigError as error:
        return Check("memory budget", "failed", str(error))
