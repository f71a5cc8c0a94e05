"""A worker that keeps what it returns to the trainer: each side has its own bytes, even if the other writes to them."""

import ctypes
import gc
import itertools
import os
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import torchobj
from tests.support import warm_python
from tests.support.long_tables import often
from tests.support.prefetching import all_free, stats

COUNT, SIZE = 48, 20_000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the arena is Linux's")


def body(number):
    return bytes([number + 1]) * SIZE


def number_of(reader):
    return int(reader.key.rsplit("/", 1)[-1])


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number:03}").write_bytes(body(number))
    return tmp_path


class Node:
    """Part of a reference cycle without other references."""

    def __init__(self, reader):
        self.reader, self.itself = reader, self


class Watch(threading.Thread):
    """A thread that holds a reader and reads it on request."""

    def __init__(self, reader):
        super().__init__(daemon=True)
        self.asked, self.answered = threading.Event(), threading.Event()
        self.look, self.found = lambda: bytes(reader), b""
        self.start()

    def run(self):
        while True:
            self.asked.wait()
            self.asked.clear()
            self.found = self.look()
            self.answered.set()

    def read(self):
        self.asked.set()
        self.answered.wait()
        self.answered.clear()
        return self.found


def in_a_closure(reader):
    return lambda: bytes(reader)


def in_a_cycle(reader):
    gc.disable()
    node = weakref.ref(Node(reader))
    return lambda: bytes(node().reader)


def behind_a_weak_reference(reader):
    buffer, found = weakref.ref(reader.buffer), []

    def look():
        found.append(buffer())
        return None if found[-1] is None else bytes(found[-1])

    return look


def by_address(reader):
    array = (ctypes.c_char * SIZE).from_buffer(reader)
    return lambda: array.raw


def as_ndarray(reader):
    array = np.ndarray(SIZE, np.uint8, buffer=reader)
    return array.tobytes


#: Each takes a reader and returns a function that reads the kept bytes; None if they are gone.
KEEPS = {
    "memoryview": lambda reader: memoryview(reader).tobytes,
    "getbuffer": lambda reader: reader.getbuffer().tobytes,
    "numpy.frombuffer": lambda reader: np.frombuffer(reader, np.uint8).tobytes,
    "numpy.ndarray": as_ndarray,
    "numpy.frombuffer of the buffer": lambda reader: np.frombuffer(reader.buffer, np.uint8).tobytes,
    "torch.frombuffer": lambda reader: torch.frombuffer(reader, dtype=torch.uint8).numpy().tobytes,
    "torch.frombuffer of the buffer": lambda reader: torch.frombuffer(reader.buffer, dtype=torch.uint8).numpy().tobytes,
    "ctypes": by_address,
    "the reader": in_a_closure,
    "the buffer": lambda reader: in_a_closure(reader.buffer),
    "a cycle": in_a_cycle,
    "a weak reference": behind_a_weak_reference,
    "a thread": lambda reader: Watch(reader).read,
}


class Keeper:
    """A transform that returns its reader and keeps the bytes; each call verifies all kept bytes."""

    def __init__(self, how):
        self.how, self.kept = how, []

    def __call__(self, reader):
        for number, look in self.kept:
            found = look()
            assert found in (None, body(number)), f"the kept bytes of {number} are {found[:4]}..."
        self.kept.append((number_of(reader), KEEPS[self.how](reader)))
        return reader


# The same code runs for every start method: two cases of the others are enough.
@pytest.mark.parametrize(
    ("how", "context"),
    [
        *often(4, [(how, "fork") for how in reversed(KEEPS)]),
        *often(1, itertools.product(["torch.frombuffer", "the reader"], ["forkserver", "spawn"])),
    ],
)
def test_bytes_that_a_worker_keeps_do_not_change_when_the_trainer_writes(folder, how, context):
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=Keeper(how))
    loader = torchobj.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
    numbers = iter(range(COUNT))
    for batch in loader:
        for sample in (batch[index] for index in range(len(batch))):
            assert bytes(sample.numpy()) == body(next(numbers))
            sample.fill_(0xEE)
    assert next(numbers, None) is None
    del batch, sample
    assert all_free(), stats()


class Writes:
    """A transform that writes to what it returned before."""

    def __init__(self, how):
        self.how, self.before = how, None

    def __call__(self, reader):
        if self.before is not None:
            np.asarray(self.before)[:] = 0xEE
        self.before = {"reader": lambda: reader, "tensor": lambda: torch.frombuffer(reader, dtype=torch.uint8)}[
            self.how
        ]()
        return reader


@pytest.mark.parametrize("how", ["reader", "tensor"])
def test_bytes_of_the_trainer_do_not_change_when_the_worker_writes(folder, how):
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=Writes(how))
    # The worker creates a sample after the trainer has received the one before; until then torch may still be pickling
    # it.
    batches = list(torchobj.DataLoader(data, batch_size=1, num_workers=1, prefetch_factor=1))
    assert [bytes(batch[0].numpy()) for batch in batches] == [body(number) for number in range(COUNT)]


def peeks(reader):
    """Looks at the bytes in every way that leaves no reference."""
    number = number_of(reader)
    assert bytes(reader) == body(number)
    assert reader.getbuffer()[0] == memoryview(reader)[-1] == np.frombuffer(reader, np.uint8)[3] == number + 1
    return reader


@pytest.mark.parametrize("transform", [None, peeks])
@pytest.mark.parametrize("kind", [torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset])
def test_bytes_without_references_in_the_worker_are_transferred_without_a_copy(folder, kind, transform):
    before = stats()
    data = kind(f"file://{folder}/", transform=transform)
    batches = list(torchobj.DataLoader(data, batch_size=8, num_workers=1))
    assert [batch[index][0].item() for batch in batches for index in range(8)] == [*range(1, COUNT + 1)]
    after = stats()
    transferred, copied = (after[name] - before[name] for name in ("transferred", "copied"))
    assert transferred + copied == COUNT
    # A sample whose worker was preempted before releasing it is copied, and correct.
    assert transferred >= 0.9 * COUNT


def test_a_kept_tensor_does_not_change_within_a_small_budget(tmp_path):
    """The trainer keeps some tensors too; memory is reused all the time."""
    script = Path(__file__).with_name("loader_keeping.py")
    environment = os.environ | {"TORCHOBJ_BUDGET_BYTES": str(16 << 20)}
    assert warm_python.run([script, tmp_path], env=environment, timeout=240, check=True).stdout.startswith("0 of ")


@pytest.mark.parametrize("keep", [np.frombuffer, torch.frombuffer, "ndarray", memoryview])
def test_memory_in_use_outlives_its_closed_reader(folder, keep):
    data = torchobj.ObjectMapDataset(f"file://{folder}/")
    with data[7] as reader:
        if keep == "ndarray":
            kept = np.ndarray(SIZE, np.uint8, buffer=reader)
        else:
            kept = (
                keep(reader)
                if keep is memoryview
                else keep(reader, dtype={np.frombuffer: np.uint8}.get(keep, torch.uint8))
            )
    reader.close()
    others = [data[number] for number in range(COUNT)]
    assert bytes(memoryview(np.asarray(kept))) == body(7)
    assert len(others) == COUNT
