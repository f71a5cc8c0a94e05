"""Look-ahead for loaders created elsewhere: `attach`, `LookaheadBatchSampler`, and the warning if neither is used."""

import copy
import logging
import mmap
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset, DistributedSampler, RandomSampler, SequentialSampler, Subset

import torchobj
from tests.support.prefetching import Taken, stats
from torchobj import exceptions
from torchobj.loader import lookahead
from torchobj.reading import lookahead_warning
from torchobj.warn_once import FORKED, PROCESS

COUNT = 48


def key_and_bytes(reader):
    return int(reader.key[-2:]), bytes(reader)


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(f"body {number}".encode() * 100)
    return tmp_path


def dataset(folder, transform=key_and_bytes):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=transform)


def stock(data, settings):
    torch.manual_seed(3)
    return torch.utils.data.DataLoader(data, **settings)


@pytest.mark.parametrize("workers", [0, 2, "persistent"])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_an_attached_loader_gives_the_same_samples_and_announces_them(folder, workers, batch_size):
    settings = {"batch_size": batch_size, "shuffle": True, "num_workers": min(2, int(workers != 0) * 2)}
    settings["persistent_workers"] = workers == "persistent"
    expected = [[repr(batch) for batch in loader] for loader in [stock(dataset(folder), settings)] for _ in range(2)]
    loader = stock(dataset(folder), settings)
    assert torchobj.attach(loader) is loader
    with Taken() as taken:
        found = [[repr(batch) for batch in loader] for _ in range(2)]
    assert found == expected
    assert (taken.announced, taken.misses) == (2 * COUNT, 0)
    assert isinstance(loader, torch.utils.data.DataLoader)


def test_attaching_twice_is_attaching_once(folder):
    loader = torchobj.attach(torch.utils.data.DataLoader(dataset(folder)), lookahead=3)
    kind = type(loader)
    assert torchobj.attach(loader) is loader
    assert (type(loader), loader.lookahead) == (kind, 3)
    ours = torchobj.DataLoader(dataset(folder))
    assert type(torchobj.attach(ours)) is torchobj.DataLoader


def test_a_running_loader_with_persistent_workers_is_attached_from_its_next_epoch(folder):
    data = dataset(folder)
    assert len(data) == COUNT
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)
    with Taken() as first:
        list(loader)
    torchobj.attach(loader)
    with Taken() as second:
        list(loader)
    assert (first.announced, first.misses) == (0, COUNT)
    assert (second.announced, second.misses) == (COUNT, 0)


def test_a_copied_or_pickled_attached_loader_is_attached(folder):
    loader = torchobj.attach(torch.utils.data.DataLoader(Subset(dataset(folder), range(9)), batch_size=3), lookahead=2)
    expected = [repr(batch) for batch in loader]
    for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(again) is type(loader)
        assert again.lookahead == 2
        assert [repr(batch) for batch in again] == expected


class Sizes(torch.utils.data.DataLoader):
    """A user's own loader."""

    def __iter__(self):
        return (len(bodies) for _, bodies in super().__iter__())


def test_a_user_defined_loader_keeps_its_behaviour(folder):
    loader = torchobj.attach(Sizes(dataset(folder), batch_size=7))
    with Taken() as taken:
        assert list(loader) == [7] * 6 + [6]
    assert taken.misses == 0
    assert taken.announced == COUNT


@pytest.mark.parametrize("what", [None, [1, 2], SequentialSampler(range(3))], ids=lambda what: type(what).__name__)
def test_an_object_that_is_not_a_loader_is_refused(what):
    with pytest.raises(TypeError, match=f"attach: {type(what).__name__} is not a DataLoader of torch"):
        torchobj.attach(what)


def test_a_dataset_with_unknown_objects_is_refused(folder):
    with pytest.raises(exceptions.ConfigError, match="the samples of range consist of"):
        torchobj.attach(torch.utils.data.DataLoader(range(3)))
    with pytest.raises(exceptions.ConfigError, match="samples of S3IterableDataset"):
        torchobj.attach(torch.utils.data.DataLoader(torchobj.S3IterableDataset("s3://nowhere/")))
    with pytest.raises(exceptions.ConfigError, match="lookahead=-1: must be 0 or more"):
        torchobj.attach(torch.utils.data.DataLoader(dataset(folder)), lookahead=-1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_announces_its_batches(folder, workers, drop_last):
    def run(kind):
        data = dataset(folder)
        batches = kind(RandomSampler(data, generator=torch.Generator().manual_seed(1)), 5, drop_last)
        loader = torch.utils.data.DataLoader(data, batch_sampler=batches, num_workers=workers)
        assert len(loader) == len(batches)
        return [repr(batch) for _ in range(2) for batch in loader]

    expected = run(torch.utils.data.BatchSampler)
    with Taken() as taken:
        assert run(torchobj.LookaheadBatchSampler) == expected
    assert (taken.announced, taken.misses) == (2 * (COUNT - COUNT % 5 * drop_last), 0)


def test_a_batch_sampler_takes_the_dataset_from_its_sampler_or_an_argument(folder, caplog):
    data = dataset(folder)
    half = Subset(data, range(0, COUNT, 2))
    known = {
        "data_source": torchobj.LookaheadBatchSampler(SequentialSampler(half), 4),
        "distributed": torchobj.LookaheadBatchSampler(DistributedSampler(half, 1, 0), 4),
        "told": torchobj.LookaheadBatchSampler(torch.utils.data.SubsetRandomSampler(range(24)), 4, dataset=half),
    }
    for name, batches in known.items():
        with Taken() as taken:
            list(torch.utils.data.DataLoader(half, batch_sampler=batches, num_workers=1))
        assert (taken.announced, taken.misses) == (24, 0), name
    assert not caplog.records


def test_a_batch_sampler_without_a_dataset_warns_once_and_announces_nothing(folder, caplog, monkeypatch):
    monkeypatch.setattr(PROCESS, "_once", {})
    data = dataset(folder)
    assert len(data) == COUNT
    for _ in range(2):
        batches = torchobj.LookaheadBatchSampler(torch.utils.data.SubsetRandomSampler(range(COUNT)), 4)
        with Taken() as taken:
            list(torch.utils.data.DataLoader(data, batch_sampler=batches, num_workers=1))
        assert (taken.announced, taken.misses) == (0, COUNT)
    [record] = caplog.records
    assert "the samples of SubsetRandomSampler consist of" in record.getMessage()


def test_a_batch_sampler_is_silent_where_the_loader_announces(folder):
    data = dataset(folder)
    loader = torchobj.DataLoader(
        data, batch_sampler=torchobj.LookaheadBatchSampler(SequentialSampler(data), 4), num_workers=1
    )
    with Taken() as taken:
        assert sum(len(keys) for keys, _ in loader) == COUNT
    assert (taken.announced, taken.misses, taken.objects) == (COUNT, 0, COUNT)


def test_a_batch_sampler_refuses_a_negative_lookahead(folder):
    with pytest.raises(exceptions.ConfigError, match="lookahead=-2: must be 0 or more"):
        torchobj.LookaheadBatchSampler(SequentialSampler(range(3)), 2, lookahead=-2)


class EveryOther(torch.utils.data.Sampler):
    """Returns every second batch, as if another rank had the rest."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return (batch for number, batch in enumerate(self.batches) if number % 2 == 0)


def test_announcing_stops_when_batches_are_not_requested(folder, caplog, monkeypatch):
    monkeypatch.setattr(lookahead, "_CHECKED_ITEMS", 10)
    monkeypatch.setattr(lookahead, "_IN_TRANSIT", 2)
    data = dataset(folder)
    batches = torchobj.LookaheadBatchSampler(SequentialSampler(data), 1, lookahead=1)
    loader = torch.utils.data.DataLoader(data, batch_sampler=EveryOther(batches))
    # Examples in the documentation keep their iterators.
    before = stats()["announced"]
    with Taken() as taken:
        assert [keys.item() for keys, _ in loader] == list(range(0, COUNT, 2))
    [record] = caplog.records
    assert "call torchobj.attach on the outermost" in record.getMessage()
    assert taken.announced < 10
    assert taken.objects < COUNT // 2 + 10
    assert stats()["announced"] <= before


def test_batches_that_are_requested_are_announced_to_the_end(folder, caplog, monkeypatch):
    monkeypatch.setattr(lookahead, "_CHECKED_ITEMS", 10)
    monkeypatch.setattr(lookahead, "_IN_TRANSIT", 2)
    data = ConcatDataset([[(0, b"")] * 100, dataset(folder)])
    with Taken() as taken:
        list(torchobj.DataLoader(data, batch_size=3, shuffle=True))
    assert (taken.announced, taken.misses) == (COUNT, 0)
    assert not caplog.records


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
    data = dataset(folder, lambda reader: reader.key)
    data._reader_constructor = torchobj.S3ReaderConstructor.range_based()
    assert len(list(plain(data))) == COUNT // 4
    assert fresh_log.read_text() == ""
