"""Loaders where the system limits address space or files, or forbids the system calls of shared memory."""

import itertools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_python
from tests.support.long_tables import often

COUNT = 40
GIB = 1 << 30
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the arena is Linux's")
both_contexts = pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.matrix)])
needs_seccomp = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls")


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number:03}").write_bytes(bytes([number]) * 50_000)
    return tmp_path


def limited(folder, context, *limits):
    script = Path(__file__).with_name("limited.py")
    # OpenMP's threads use address space, which is not what is tested.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHOBJ_BUDGET_BYTES": str(2 * GIB)}
    arguments = [script, folder, context, *limits]
    if context == "spawn":
        # Both the trainer and its worker import everything within the limits.
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=240
        )
    else:
        done = warm_python.run(arguments, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "panicked" not in done.stderr
    assert "poisoned" not in done.stderr.lower()
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


def all_samples(found):
    return found["samples"] == [list(range(COUNT))] * 4


LIMITS = [f"v={6 * GIB}", f"f={GIB}", "f=100000000"]


@pytest.mark.parametrize(
    ("context", "limit"),
    often(len(LIMITS), itertools.product(["fork", "spawn"], LIMITS)),
)
def test_a_loader_reads_ahead_in_as_much_memory_as_the_system_allows(folder, context, limit):
    found = limited(folder, context, limit)
    assert all_samples(found), found
    # The trainer's process reads for its workers.
    assert found["stats"]["objects"] == 4 * COUNT
    assert 1 << 20 <= found["stats"]["budget_bytes"] < 2 * GIB
    [message] = [message for message in found["log"] if "instead of 2048 MiB" in message]
    assert f"ulimit -{limit[0]}" in message


@both_contexts
@pytest.mark.parametrize(
    ("limit", "names"),
    [
        pytest.param("memfd_create", ["the arena", "memfd_create", "seccomp"], marks=needs_seccomp),
        ("f=1000000", ["the arena", "ulimit -f", "44 MiB"]),
    ],
)
def test_without_shared_memory_each_worker_reads_for_itself_with_one_warning(folder, context, limit, names):
    found = limited(folder, context, limit)
    assert all_samples(found), found
    [message] = [message for message in found["log"] if "the arena" in message]
    assert all(name in message for name in names), message
    assert "each DataLoader worker reads its own objects" in message
    # Workers log to the same standard error.
    assert found["stderr"].count("the arena") <= 1
    assert found["stats"] == {}


@both_contexts
@needs_seccomp
def test_a_forbidden_event_loop_is_the_error_of_each_read(folder, context):
    found = limited(folder, context, "eventfd2")
    assert len(found["errors"]) == 2, found
    for error in found["errors"]:
        assert error.startswith("StoreError: ")
        assert "eventfd" in error
        assert "seccomp" in error
