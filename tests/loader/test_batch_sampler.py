"""`LookaheadBatchSampler` announces the batches of any sampler, and nothing that nobody requests."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DistributedSampler, RandomSampler, SequentialSampler, Subset

import torchobj
from tests.support.prefetching import Taken, stats
from torchobj import exceptions
from torchobj.loader import lookahead
from torchobj.warn_once import PROCESS

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
