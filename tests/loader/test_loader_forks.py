"""Forks next to a loader and inside its workers: a child does not touch what belongs to its parent."""

import os
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset

import torchobj
from tests.support.long_tables import often
from tests.support.prefetching import all_free
from torchobj import _torchobj
from torchobj.ranks.sharding import in_order

COUNT = 64
LIMIT_S = 30.0
PAUSE = threading.Event()


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
    """Runs `work` in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def exited_without_error(pid):
    """Returns whether a child exited in time and without an error."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status == 0
        PAUSE.wait(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_a_child_announces_nothing_and_does_not_change_its_parents_state(folder):
    assert all_free()
    data = dataset(folder)
    assert data[3] == body(3)
    announcer = _torchobj.Announcer()
    number = data._listing.reader().source().number
    announcer.announce([(number, index) for index in range(10)])
    announced, budget_bytes = announcer.pending()

    def announce():
        for _ in range(3):
            announcer.announce([(number, index) for index in range(COUNT)])
        assert announcer.pending() == (0, budget_bytes)
        announcer.cancel()

    before = _torchobj.prefetch_stats()
    assert exited_without_error(forked(announce))
    assert announcer.pending() == (announced, budget_bytes)
    after = _torchobj.prefetch_stats()
    assert after["announced"] == before["announced"] == 10
    announcer.cancel()
    assert [data[index] for index in range(COUNT)] == [body(index) for index in range(COUNT)]


def test_a_child_continues_an_iterable_that_its_parent_began(folder):
    data = torchobj.ObjectIterableDataset(f"file://{folder}/", transform=bytes)
    # The child cannot use a listing that is not finished.
    whole = list(data)
    iterator = iter(data)
    seen, expected = [next(iterator)], whole[1:]

    def go_on():
        assert list(iterator) == expected

    pid = forked(go_on)
    assert seen + list(iterator) == whole
    assert exited_without_error(pid)


@pytest.mark.parametrize("kind", ["listed", "named"])
def test_a_child_continues_an_iterable_whose_memory_its_parent_has_reused(tmp_path, kind):
    urls = [f"file://{tmp_path}/k{number:03}" for number in range(400)]
    for number in range(400):
        (tmp_path / f"k{number:03}").write_bytes(body(number))
    data = torchobj.ObjectIterableDataset.from_objects(urls, transform=bytes)

    class Named(torchobj.ObjectDataset):
        def __len__(self):
            return len(urls)

        def objects_at(self, index):
            return [torchobj.ObjectRef(urls[index])]

        def build(self, index, readers):
            return bytes(readers[0])

    def start():
        return iter(data) if kind == "listed" else Named()._torchobj.in_order(in_order(len(urls)))

    whole = list(start())
    iterator = start()
    seen, expected = [next(iterator)], whole[1:]
    wait, go = os.pipe()

    def go_on():
        assert os.read(wait, 1) == b"x"
        assert list(iterator) == expected

    pid = forked(go_on)
    assert seen + list(iterator) == whole
    os.write(go, b"x")
    assert exited_without_error(pid)
    os.close(wait), os.close(go)


def of_named_object(folder):
    class Named(torchobj.ObjectDataset):
        def __len__(self):
            return COUNT

        def objects_at(self, index):
            return [torchobj.ObjectRef(f"file://{folder}/k{index:02}")]

        def build(self, index, readers):
            return bytes(readers[0])

    return Named()


@pytest.mark.parametrize("kind", often(1, [dataset, of_named_object]))
@pytest.mark.parametrize("loader_class", [torch.utils.data.DataLoader, torchobj.DataLoader])
@pytest.mark.parametrize("used", [True, False], ids=["the child used it", "the child did not use it"])
def test_workers_of_a_child_use_the_memory_of_the_child(folder, kind, loader_class, used):
    data = kind(folder)
    assert data.__getitems__([0, 1]) == [body(0), body(1)]

    def load():
        if used:
            assert data.__getitems__([2]) == [body(2)]
            before = _torchobj.prefetch_stats()
        loader = loader_class(data, batch_size=8, num_workers=2, collate_fn=list, multiprocessing_context="fork")
        assert [sample for batch in loader for sample in batch] == [body(index) for index in range(COUNT)]
        if used:
            assert _torchobj.prefetch_stats()["objects"] - before["objects"] == COUNT

    before = _torchobj.prefetch_stats()
    assert exited_without_error(forked(load))
    assert _torchobj.prefetch_stats()["objects"] == before["objects"]
    assert data.__getitems__([3]) == [body(3)]


class Forking(torch.utils.data.Dataset):
    """A worker and its forked child read each sample at the same time."""

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
        return exited_without_error(pid)


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_child_of_a_worker_sends_its_own_requests(folder, context):
    data = dataset(folder)
    assert data[0] == body(0)
    loader = torchobj.DataLoader(Forking(data), batch_size=None, num_workers=1, multiprocessing_context=context)
    assert list(loader) == [True] * 4


class Offering(torch.utils.data.Dataset):
    """A worker's forked child tries to send the buffer that the worker then sends."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 4

    def __getitem__(self, sample):
        buffer = self.data[sample].buffer

        def offer():
            assert isinstance(buffer, torchobj.Buffer)
            assert _torchobj.offer(buffer) is None

        assert exited_without_error(forked(offer))
        return buffer


def test_a_child_of_a_worker_does_not_offer_its_parents_memory(folder):
    data = dataset(folder, None)
    # A worker that lists the prefix itself has the bytes in memory of its own.
    assert len(data) == COUNT
    loader = torchobj.DataLoader(Offering(data), batch_size=None, num_workers=1)
    assert [bytes(buffer) for buffer in loader] == [body(sample) for sample in range(4)]


def arenas_that_are_open(_reader):
    entries = [
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if Path(f"/proc/self/fd/{name}").exists()
    ]
    return sum("torchobj-arena" in entry for entry in entries)


@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_worker_that_is_not_forked_opens_the_arena_once_for_any_number_of_datasets(folder, context):
    parts = ConcatDataset([dataset(folder, arenas_that_are_open) for _ in range(3)])
    loader = torchobj.DataLoader(parts, batch_size=None, num_workers=1, multiprocessing_context=context)
    found = list(loader)
    assert len(found) == 3 * COUNT
    # The last one was read after all three were attached.
    assert found[-1] == 1
