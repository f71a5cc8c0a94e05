"""A loop that reads without look-ahead is told once how to attach its loader."""

import logging
import mmap
from pathlib import Path

import pytest
import torch
from torch.utils.data import RandomSampler, Subset

import torchobj
from torchobj.reading import lookahead_warning
from torchobj.warn_once import FORKED

COUNT = 48


def key_and_bytes(reader):
    return int(reader.key[-2:]), bytes(reader)


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(f"body {number}".encode() * 100)
    return tmp_path


def dataset(folder, transform=key_and_bytes, **settings):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform, **settings)


class Wrapped(torch.utils.data.Dataset):
    """A user's dataset that wraps one of ours."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def plain(data, **settings):
    return torch.utils.data.DataLoader(data, batch_size=4, **settings)


def attached(data, **settings):
    return torchobj.attach(plain(data, **settings))


def ours(data, **settings):
    return torchobj.DataLoader(data, batch_size=4, **settings)


def off(data, **settings):
    return torchobj.DataLoader(data, batch_size=4, lookahead=0, **settings)


def announced_by_batches(data, **settings):
    batches = torchobj.LookaheadBatchSampler(RandomSampler(data), 4)
    return torch.utils.data.DataLoader(data, batch_sampler=batches, **settings)


def by_hand(data, **settings):
    return (data[index] for index in range(COUNT))


def few(data, **settings):
    return plain(Subset(data, range(4)), **settings)


def subset(data, **settings):
    return plain(Subset(data, range(COUNT)), **settings)


def wrapped(data, **settings):
    return plain(Wrapped(data), **settings)


def samples(data, **settings):
    return torch.utils.data.DataLoader(data, batch_size=None, **settings)


WORKERS = {"num_workers": 2}

SERVED = WORKERS | {"multiprocessing_context": "forkserver"}

SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}

WARNS = [
    (plain, {}, True),
    (plain, WORKERS, True),
    (plain, SERVED, True),
    pytest.param(plain, SPAWNED | WORKERS, True, marks=pytest.mark.matrix),
    (subset, WORKERS, True),
    (samples, WORKERS, True),
    (attached, {}, False),
    (attached, WORKERS, False),
    (ours, WORKERS, False),
    (ours, SERVED, False),
    pytest.param(ours, SPAWNED | WORKERS, False, marks=pytest.mark.matrix),
    (off, {}, False),
    (off, WORKERS, False),
    (announced_by_batches, {}, False),
    (announced_by_batches, WORKERS, False),
    (by_hand, {}, False),
    (few, {}, False),
    (wrapped, WORKERS, False),
]


def _begin_log(file):
    """Logs to a file in a worker that is not forked. Workers of a forkserver share its state: nothing was warned yet."""
    FORKED._flags = mmap.mmap(-1, 1 << 16)
    logging.getLogger("torchobj").addHandler(logging.FileHandler(file))


class ToFile(torchobj.ObjectMapDataset):
    """Writes log messages to a file, also in a worker that is not forked, which unpickles this object."""

    file = None

    def __setstate__(self, state):
        self.__dict__.update(state)
        _begin_log(self.file)


@pytest.fixture
def fresh_log(monkeypatch, tmp_path):
    """Resets the warnings as in a new process; the file receives the log of this process and its workers."""
    monkeypatch.setattr(lookahead_warning, "_disabled", False)
    monkeypatch.setattr(lookahead_warning, "_batches", 0)
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    logger, handler = logging.getLogger("torchobj"), logging.FileHandler(tmp_path.with_suffix(".log"))
    logger.addHandler(handler)
    yield Path(handler.baseFilename)
    logger.removeHandler(handler)
    handler.close()


@pytest.mark.parametrize(
    ("make", "settings", "warns"), [*WARNS, pytest.param(plain, SPAWNED, True, marks=pytest.mark.matrix)]
)
def test_a_loop_whose_batches_are_not_announced_is_warned_once_about_attach(folder, fresh_log, make, settings, warns):
    data = ToFile(f"file://{folder}/", transform=key_and_bytes)
    data.file = fresh_log
    epochs = 1 if "multiprocessing_context" in settings else 2
    for _ in range(epochs):
        assert len(list(make(data, **settings))) > 0
    lines = fresh_log.read_text().splitlines()
    assert len([line for line in lines if "torchobj.attach(loader)" in line]) == int(warns), lines


class NamedToFile(torchobj.ObjectDataset):
    """Like `ToFile`, for objects referenced by name."""

    def __init__(self, folder, file):
        super().__init__()
        self.folder, self.file = folder, file

    def __setstate__(self, state):
        self.__dict__.update(state)
        _begin_log(self.file)

    def __len__(self):
        return COUNT

    def objects_at(self, index):
        return [torchobj.ObjectRef(f"file://{self.folder}/k{index:02}")]

    def build(self, index, readers):
        return len(readers[0].read())


@pytest.mark.parametrize(("make", "settings", "warns"), WARNS)
def test_a_loop_over_named_objects_is_warned_too(folder, fresh_log, make, settings, warns):
    assert len(list(make(NamedToFile(folder, fresh_log), **settings))) > 0
    lines = fresh_log.read_text().splitlines()
    assert len([line for line in lines if "torchobj.attach(loader)" in line]) == int(warns), lines


def test_a_range_reader_announces_nothing_and_warns_of_nothing(folder, fresh_log):
    data = dataset(folder, lambda reader: reader.key, reader_constructor=torchobj.S3ReaderConstructor.range_based())
    assert len(list(plain(data))) == COUNT // 4
    assert fresh_log.read_text() == ""
