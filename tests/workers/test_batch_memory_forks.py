"""What a forked child sees of the memory that its parent had at the time of the fork: the same bytes, whatever the parent does
later with its own views.
"""

import os
import sys
import traceback

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchobj
from tests.support import warm_python
from tests.support.long_tables import often

COUNT, SIZE = 64, 50_000
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the arena is Linux's")


def body(number):
    return bytes([number + 1]) * SIZE


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number:03}").write_bytes(body(number))
    return tmp_path


class Child:
    """A forked child that calls `look` now and once more after `ask`."""

    def __init__(self, look):
        (self._wait, self._go), (self._answers, answer) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                before = look()
                os.write(answer, b"x")
                os.read(self._wait, 1)
                os._exit(0 if look() == before else 3)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(answer)
        assert os.read(self._answers, 1) == b"x"

    def sees_the_same(self):
        os.write(self._go, b"x")
        _, status = os.waitpid(self._pid, 0)
        for descriptor in (self._wait, self._go, self._answers):
            os.close(descriptor)
        assert os.waitstatus_to_exitcode(status) in (0, 3)
        return status == 0


def dataset(folder, transform=None):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform)


def loader(folder, **arguments):
    return torchobj.DataLoader(dataset(folder), **({"batch_size": 8, "num_workers": 2} | arguments))


def refill(folder):
    """Reads everything again, several times, in the memory that is free."""
    for _ in range(3):
        data = dataset(folder)
        announced = iter(torchobj.DataLoader(data, batch_size=16, num_workers=0, collate_fn=list))
        kept = [[bytes(reader.buffer)[:1] for reader in batch] for batch in announced]
        assert len(kept) == COUNT // 16
    for batch in loader(folder):
        del batch


def first(iterable):
    iterator = iter(iterable)
    found = next(iterator)
    for _ in iterator:
        pass
    return found


#: By name: what the parent holds, and its bytes.
KINDS = {
    "a ragged batch of workers": (
        lambda folder: first(loader(folder)),
        lambda batch: [bytes(b) for b in batch._buffers],
    ),
    "its data": (lambda folder: first(loader(folder)).data, lambda data: data.numpy().tobytes()),
    "a row": (lambda folder: first(loader(folder))[3], lambda row: row.numpy().tobytes()),
    "a ragged batch without workers": (
        lambda folder: first(loader(folder, num_workers=0)),
        lambda batch: [bytes(b) for b in batch._buffers],
    ),
    "torch's loader": (
        lambda folder: first(DataLoader(dataset(folder), batch_size=8, num_workers=1)),
        lambda batch: [bytes(b) for b in batch._buffers],
    ),
    "readers": (
        lambda folder: first(loader(folder, num_workers=0, collate_fn=list)),
        lambda readers: [bytes(reader.buffer) for reader in readers],
    ),
    "a buffer": (lambda folder: first(loader(folder, collate_fn=list))[0].buffer, bytes),
    "a view of a buffer": (lambda folder: first(loader(folder, collate_fn=list))[0].buffer.view(5, 500), bytes),
    "a slice": (lambda folder: first(loader(folder, collate_fn=list))[0].buffer[5:500], bytes),
    "numpy": (
        lambda folder: np.frombuffer(first(loader(folder, collate_fn=list))[0].buffer, np.uint8)[7:],
        lambda array: array.tobytes(),
    ),
    "torch": (
        lambda folder: torch.frombuffer(
            first(loader(folder, num_workers=0, collate_fn=list))[0].buffer, dtype=torch.uint8
        ),
        lambda tensor: tensor.numpy().tobytes(),
    ),
    "a sample of a dataset": (lambda folder: dataset(folder)[5].buffer, bytes),
    "samples of an iterable dataset": (
        lambda folder: [next(iter(torchobj.ObjectIterableDataset(f"file://{folder}/")))],
        lambda samples: [bytes(sample.buffer) for sample in samples],
    ),
    "a batch in a block": (
        lambda folder: first(
            torchobj.DataLoader([torch.full((SIZE,), i) for i in range(32)], batch_size=4, num_workers=2)
        ),
        lambda batch: batch.numpy().tobytes(),
    ),
    "get_many": (
        lambda folder: torchobj.Store(f"file://{folder}").get_many([f"{number:03}" for number in range(8)]),
        lambda buffers: [bytes(buffer) for buffer in buffers],
    ),
    "get": (lambda folder: torchobj.Store(f"file://{folder}").get("005"), bytes),
}


@pytest.mark.parametrize("kind", often(5, KINDS))
def test_a_child_keeps_the_bytes_of_what_its_parent_dropped(folder, kind):
    make, content = KINDS[kind]
    held = [make(folder)]
    child = Child(lambda: content(held[0]))
    held.clear()
    refill(folder)
    assert child.sees_the_same()


#: In a process without libraries that need their descriptors at a fork, as Arrow does.
GRANDCHILD = """
import os, pathlib, sys, traceback
from tests.workers.test_batch_memory_forks import first, loader, refill
folder = pathlib.Path(sys.argv[1])
held = first(loader(folder))
(wait, go), (answers, answer) = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    try:
        # The child closes everything else, as a daemon does.
        os.closerange(3, min(wait, answer))
        if os.fork() == 0:
            before = [bytes(buffer) for buffer in held._buffers]
            os.read(wait, 1)
            os.write(answer, b"1" if before == [bytes(buffer) for buffer in held._buffers] else b"0")
    except BaseException:
        os.write(answer, traceback.format_exc().encode())
    finally:
        os._exit(0)
os.close(answer)
os.waitpid(pid, 0)
del held
refill(folder)
os.write(go, b"x")
print(os.read(answers, 4096).decode())
"""


def test_a_grandchild_keeps_the_bytes_after_its_parent_has_exited(folder):
    assert warm_python.run(["-c", GRANDCHILD, folder], check=True).stdout == "1\n"
