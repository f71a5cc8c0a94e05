"""Killed processes of a loader: an error or a complete cleanup, and no endless wait."""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import torchobj
from tests.support import warm_python
from tests.support.killing import state_of
from tests.support.prefetching import eventually, stats

CONTEXTS = ["fork", "spawn", "forkserver"]
COUNT = 200
PAUSE = threading.Event()


@pytest.fixture
def folder(tmp_path):
    objects = tmp_path / "objects"
    objects.mkdir()
    for number in range(COUNT):
        (objects / f"k{number:03}").write_bytes(bytes([number]) * 20_000)
    return objects


def alive(pid):
    return state_of(pid) != "Z"


def holders(inode):
    """Returns the processes that have the arena with this inode open."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if "memfd:torchobj-arena" in os.readlink(entry) and os.stat(entry).st_ino == inode:
                found.add(entry.parts[2])
    return found


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.matrix), "forkserver"])
def test_a_killed_trainer_leaves_no_process_no_memory_and_no_file(folder, tmp_path, context):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    script = Path(__file__).with_name("loader_killed.py")
    with warm_python.Process([script, folder, context], env=os.environ | {"TMPDIR": str(temporary)}) as process:
        said = json.loads(process.stdout.readline())
        assert len(said["pids"]) >= 3
        assert str(process.pid) in holders(said["arena"])
        process.kill()
        assert process.wait() == -signal.SIGKILL
    # torch's workers check every five seconds whether their parent is alive.
    assert eventually(lambda: not any(map(alive, said["pids"])))
    assert holders(said["arena"]) == set()
    # torch's names contain the process.
    pids = set(map(str, said["pids"]))
    assert [name for name in os.listdir("/dev/shm") if pids & set(re.findall("[0-9]+", name))] == []
    assert not [path for path in temporary.rglob("*") if "torchobj" in path.name]


def first_byte(reader):
    PAUSE.wait(0.003)
    return bytes(reader)[0]


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transform", [first_byte, None])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_worker_that_is_killed_at_any_moment_is_an_error_and_the_next_epoch_works(
    folder, context, transform, monkeypatch
):
    # torch also reports a death to a finalizer; pytest would keep its traceback, and with it the iterator.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform)
    loader = torchobj.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context=context)
    moments = random.Random(7)
    for _ in range(8):
        iterator = iter(loader)
        steps = moments.randrange(12)
        for _ in range(steps):
            next(iterator)
        PAUSE.wait(moments.uniform(0, 0.02))
        victim = moments.choice(multiprocessing.active_children()).pid
        began = time.monotonic()
        # torch raises in whatever code runs when the death is reported; the epoch may have ended.
        with pytest.raises((RuntimeError, ConnectionError, EOFError, OSError)):
            os.kill(victim, signal.SIGKILL)
            list(iterator)
            PAUSE.wait(30)
        assert time.monotonic() - began < 30
        del iterator
        gc.collect()
        assert eventually(lambda: stats()["used_bytes"] == 0), str(stats())
    assert sum(map(len, loader)) == COUNT
