"""Killed processes of a loader: an error or a complete cleanup, and no endless wait."""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import re
import signal
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.utils.data.dataloader as torch_loader

import torchobj
from tests.support import warm_python
from tests.support.killing import state_of
from tests.support.long_tables import often
from tests.support.prefetching import eventually, stats
from torchobj.loader import killed_worker

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


@pytest.mark.parametrize("context", often(1, CONTEXTS))
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


def of_torchs_worker(name):
    """A variable of the function that torch runs in this worker."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_worker_loop":
        frame = frame.f_back
    return frame.f_locals[name]


def holding_the_lock_of_the_event():
    of_torchs_worker("done_event")._cond.acquire()


def sending_results():
    queue = of_torchs_worker("data_queue")
    queue._wlock.acquire()
    os.write(queue._writer.fileno(), struct.pack("!i", 1000) + b"a part of it")


def sending_a_length():
    queue = of_torchs_worker("data_queue")
    queue._wlock.acquire()
    os.write(queue._writer.fileno(), b"\0\0")


class Dying:
    """A transform after which the worker of one object is killed."""

    def __init__(self, last):
        self.last = last

    def __call__(self, reader):
        if reader.key.endswith("k020"):
            self.last()
            os.kill(os.getpid(), signal.SIGKILL)
        return bytes(reader)[0]


@pytest.fixture
def unseen_deaths(monkeypatch):
    """Deaths are reported to code that ignores the error, and torch looks at its workers often."""
    monkeypatch.setattr(torch_loader._MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    before = signal.getsignal(signal.SIGCHLD)
    yield lambda: signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("last", [holding_the_lock_of_the_event, sending_results, sending_a_length])
@pytest.mark.parametrize("attached", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_worker_that_is_killed_with_a_lock_or_a_part_of_a_message_is_an_error(
    folder, last, attached, unseen_deaths, monkeypatch
):
    monkeypatch.setattr(killed_worker, "_LOCKED_S", 0.1)
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=Dying(last))
    settings = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}
    make = torch_loader.DataLoader if attached else torchobj.DataLoader
    loader = make(data, **settings)
    if attached:
        torchobj.attach(loader)
    iterator = iter(loader)
    unseen_deaths()
    # torch's collate sends descriptors by a thread of the worker, which may be gone before the worker counts as exited.
    with pytest.raises((RuntimeError, ConnectionError), match="exited unexpectedly|reset by peer|refused"):
        list(iterator)
    workers = iterator._workers
    del iterator
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [0, 1, 20_000, 3 << 20])
def test_a_message_is_received_when_all_of_it_has_arrived(size):
    reading, writing = multiprocessing.Pipe(duplex=False)
    received = killed_worker._WholeMessages(reading)
    assert not received.poll()
    messages = [os.urandom(size), b"", os.urandom(5)]
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(lambda: [writing.send_bytes(message) for message in messages])
        assert [bytes(received.recv_bytes()) for _ in messages] == messages
        sent.result()
    assert not received.poll()
    writing.close()
    with pytest.raises(EOFError):
        received.poll(1)


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
