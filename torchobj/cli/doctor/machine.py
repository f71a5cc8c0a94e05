"""Checks of the machine: its versions, its limits, and the configuration file. They send no request."""

import os
import resource
import sys
from collections.abc import Iterator

from torchobj import _torchobj
from torchobj.cli import machine
from torchobj.cli.doctor.check import Check
from torchobj.cli.output import human_size
from torchobj.config import StoreConfig, config_file
from torchobj.exceptions import ConfigError
from torchobj.workers.memory_budget import budget_bytes

#: Descriptors of a loader with many connections and workers, with a margin.
_FILES = 4096
#: PyTorch workers pass batches through `/dev/shm`. Docker's default is 64 MiB (docs, `docker run --shm-size`).
_SHARED_BYTES = 1 << 30


def checks() -> Iterator[Check]:
    """Checks the machine."""
    versions = f"torchobj {_torchobj.__version__}, Python {sys.version.split()[0]}, torch {machine.version('torch')}"
    yield Check("versions", "note", f"{versions}, {machine.system()}, {machine.processors()}")
    yield _configuration()
    yield _files()
    yield _locked_memory()
    yield _shared_memory()
    yield _memfd()
    yield _budget()


def _configuration() -> Check:
    path = os.environ.get(config_file.VARIABLE)
    if not path:
        return Check("configuration file", "note", f"none; {config_file.VARIABLE} is not set")
    try:
        file = config_file.file_for(StoreConfig())
    except ConfigError as error:
        return Check("configuration file", "failed", str(error))
    prefixes = ", ".join(map(str, file.settings))
    return Check("configuration file", "ok", f"{path} applies to {prefixes or 'no prefix'}")


def _files() -> Check:
    soft, found = resource.getrlimit(resource.RLIMIT_NOFILE)[0], machine.open_files()
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        advice = f"`ulimit -n {_FILES}`: connections and DataLoader workers need descriptors"
        return Check("open files", "warning", found, advice)
    return Check("open files", "ok", found)


def _locked_memory() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = [
        machine.limit_text(value) if value == resource.RLIM_INFINITY else human_size(value) for value in (soft, hard)
    ]
    # CUDA pins memory by its driver, which this limit does not cover.
    return Check("locked memory", "note", f"{shown[0]}, may be raised to {shown[1]}; torchobj locks none")


def _shared_memory() -> Check:
    try:
        free, total = machine.shared_memory()
    except OSError as error:
        advice = "DataLoader workers of torch need it to pass batches"
        return Check(machine.SHARED_MEMORY, "warning", f"{error.strerror}", advice)
    found = machine.shared_memory_text(free, total)
    if free < _SHARED_BYTES:
        advice = "DataLoader workers that return tensors may fail: `docker run --shm-size=8g`, or an emptyDir in memory"
        return Check(machine.SHARED_MEMORY, "warning", found, advice)
    return Check(machine.SHARED_MEMORY, "ok", found)


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
