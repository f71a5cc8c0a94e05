"""A program that closes descriptors of the library, as `os.closerange` does, and opens its own under their numbers: its files
are not changed, and batches arrive.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

import torchobj
from torchobj.warn_once import FORKED
from torchobj.workers.shared_values import SharedCounter, SharedNumber

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="descriptors are those of Linux")
CONTENT = b"the program's own" * 1000


def ours():
    """Descriptors of shared memory of the library, and of the eventfd beside it."""
    links = {}
    for name in os.listdir("/proc/self/fd"):
        link = Path(f"/proc/self/fd/{name}")
        if link.is_symlink():
            links[int(name)] = os.readlink(link)
    return [number for number, link in links.items() if "torchobj-arena" in link or "torchobj-shared" in link]


class Taken:
    """Files of the program under the numbers of descriptors."""

    def __init__(self, folder, numbers):
        self._files = {number: folder / f"own{os.getpid()}-{number}" for number in numbers}
        for number, path in self._files.items():
            path.write_bytes(CONTENT)
            file = os.open(path, os.O_RDWR)
            os.dup2(file, number)
            os.close(file)

    def are_unchanged(self):
        """Whether each is open, at its start, and has its content."""
        return all(
            os.lseek(number, 0, os.SEEK_CUR) == 0 and os.pread(number, 1 << 20, 0) == CONTENT for number in self._files
        )


class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((4000,), index)


def numbers_of(loader):
    return [batch[:, 9].tolist() for batch in loader]


EXPECTED = [[4 * number + i for i in range(4)] for number in range(12)]


def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 3)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_trainer_that_closes_the_memory_of_batches_gets_its_batches(tmp_path):
    def work():
        loader = torchobj.DataLoader(Numbered(), batch_size=4, num_workers=2, lookahead=0)
        assert numbers_of(loader) == EXPECTED
        taken = Taken(tmp_path, ours())
        assert numbers_of(loader) == EXPECTED
        torchobj.set_memory_budget(loader.stats().budget_bytes)
        assert numbers_of(loader) == EXPECTED
        return taken.are_unchanged()

    in_child(work)


class Closing:
    """A `worker_init_fn` and a collate function of workers that close the library's descriptors."""

    def __init__(self, folder):
        self._folder, self._taken = folder, None

    def __call__(self, worker):
        eventfds = [
            int(name)
            for name in os.listdir("/proc/self/fd")
            if Path(f"/proc/self/fd/{name}").is_symlink() and "eventfd" in os.readlink(f"/proc/self/fd/{name}")
        ]
        Closing.taken = Taken(self._folder, [*ours(), *eventfds])


def collate_and_look(samples):
    return torch.stack(samples), Closing.taken.are_unchanged()


def test_a_worker_that_closes_them_writes_into_no_file_of_the_program(tmp_path):
    data = Numbered()
    loader = torchobj.DataLoader(
        torch.utils.data.Subset(data, range(8)),
        batch_size=4,
        num_workers=1,
        lookahead=0,
        worker_init_fn=Closing(tmp_path),
        collate_fn=collate_and_look,
    )
    found = [(batch[:, 9].tolist(), unchanged) for batch, unchanged in loader]
    assert found == [([0, 1, 2, 3], True), ([4, 5, 6, 7], True)]


def test_a_child_that_closes_them_uses_what_its_parent_created(tmp_path, tmp_path_factory):
    for number in range(8):
        (tmp_path / f"{number}").write_bytes(bytes([number]) * 5000)
    data = torchobj.ObjectMapDataset(f"file://{tmp_path}/", transform=bytes)
    assert len(list(torchobj.DataLoader(data, batch_size=4, num_workers=1, collate_fn=list))) == 2

    def work():
        taken = Taken(tmp_path_factory.mktemp("own"), ours())
        loader = torchobj.DataLoader(data, batch_size=4, num_workers=1, collate_fn=list)
        found = [sample for batch in loader for sample in batch]
        return found == [bytes([number]) * 5000 for number in range(8)] and taken.are_unchanged()

    in_child(work)


def test_counters_and_numbers_whose_file_was_closed_change_no_other_file(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(FORKED, "is_first", lambda _: True)
    counter, number = SharedCounter(), SharedNumber()
    counter.add()
    number.set(5)
    taken = Taken(tmp_path, [counter._file.descriptor, number._file.descriptor])
    counter.add()
    assert counter.total() == 0
    assert number.get() == 5
    assert "was closed by this program" in caplog.text
    del counter, number
    assert taken.are_unchanged()
