"""Processes that are forked beside a loader and inside its workers: none touches what is another's."""

import os
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset

import torchobj
from torchobj import _torchobj

COUNT = 64
LIMIT_S = 30.0


def body(number):
    return f"body {number}".encode() * (1 + 53 * number)


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(body(number))
    return tmp_path


def dataset(folder, transform=bytes):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform)


def forked(work):
    """Starts `work` in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def ended_well(pid):
    """Whether a child ended, and without an error, in time."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_a_child_announces_nothing_and_leaves_the_books_of_its_parent(folder):
    data = dataset(folder)
    assert data[3] == body(3)
    announcer = _torchobj.Announcer()
    number = data._listing.source_number()
    announcer.announce([(number, index) for index in range(10)])
    announced, budget_bytes = announcer.pending()

    def announce():
        for _ in range(3):
            announcer.announce([(number, index) for index in range(COUNT)])
        assert announcer.pending() == (0, budget_bytes)
        announcer.cancel()

    before = _torchobj.prefetch_stats()
    assert ended_well(forked(announce))
    assert announcer.pending() == (announced, budget_bytes)
    after = _torchobj.prefetch_stats()
    assert after["announced"] == before["announced"] == 10
    announcer.cancel()
    assert [data[index] for index in range(COUNT)] == [body(index) for index in range(COUNT)]


def test_a_child_goes_on_with_an_iterable_that_its_parent_began(folder):
    data = torchobj.ObjectIterableDataset(f"file://{folder}/", transform=bytes)
    # A listing that is not known yet is the parent's alone.
    whole = list(data)
    iterator = iter(data)
    seen, expected = [next(iterator)], whole[1:]

    def go_on():
        assert list(iterator) == expected

    pid = forked(go_on)
    assert seen + list(iterator) == whole
    assert ended_well(pid)


class Forking(torch.utils.data.Dataset):
    """Each sample is read by a worker and its forked child at one time."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 4

    def __getitem__(self, sample):
        order = [(sample + step) % COUNT for step in range(COUNT)]

        def read_backwards():
            for index in reversed(order):
                assert self.data[index] == body(index)

        assert self.data[sample] == body(sample)
        pid = forked(read_backwards)
        for index in order:
            assert self.data[index] == body(index)
        return ended_well(pid)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_child_of_a_worker_asks_for_itself(folder, context):
    data = dataset(folder)
    assert data[0] == body(0)
    loader = torchobj.DataLoader(Forking(data), batch_size=None, num_workers=1, multiprocessing_context=context)
    assert list(loader) == [True] * 4


def arenas_that_are_open(_reader):
    entries = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if Path(f"/proc/self/fd/{name}").exists()
    ]
    return sum("torchobj-arena" in entry for entry in entries)


def test_a_spawned_worker_has_the_arena_open_once_however_many_datasets_it_reads(folder):
    parts = ConcatDataset([dataset(folder, arenas_that_are_open) for _ in range(3)])
    loader = torchobj.DataLoader(parts, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    found = list(loader)
    assert len(found) == 3 * COUNT
    # The last one was read after all three were attached.
    assert found[-1] == 1
