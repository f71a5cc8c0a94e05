"""A warning if objects that a loader announces are not requested."""

import pytest
import torch

import torchobj
from torchobj.loader import lookahead

COUNT = 64


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(lookahead, "_CHECKED_ITEMS", 32)
    monkeypatch.setattr(lookahead, "_IN_TRANSIT", 8)
    for number in range(COUNT):
        (tmp_path / f"{number:02}").write_bytes(b"body")
    return torchobj.ObjectMapDataset(f"file://{tmp_path}/", transform=lambda reader: reader.read()[0])


class Cached(torch.utils.data.Subset):
    """A subset that does not read its samples again."""

    def __getitem__(self, index):
        return index

    __getitems__ = list


class Half:
    """Uses every second batch, as a wrapper of a batch sampler may."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return (batch for number, batch in enumerate(self.batches) if number % 2)


def plain(dataset, batches=None):
    sampler = torchobj.LookaheadBatchSampler(torch.utils.data.SequentialSampler(dataset), 1, dataset=dataset)
    return torch.utils.data.DataLoader(dataset, batch_sampler=Half(sampler) if batches is None else sampler)


@pytest.mark.parametrize("workers", [0, 2])
def test_another_loader_does_not_hide_that_announced_objects_are_not_requested(data, workers, caplog):
    idle = torchobj.DataLoader(Cached(data, range(COUNT)), num_workers=workers)
    busy = torchobj.DataLoader(data, num_workers=workers)
    for _ in zip(idle, busy, strict=True):
        pass
    assert caplog.text.count("of 24 announced objects were requested") == 1
    assert "only 0 of 24" in caplog.text


def test_another_loader_does_not_hide_a_wrapper_that_uses_some_batches(data, caplog):
    used, busy = iter(plain(data)), iter(torchobj.DataLoader(data, num_workers=2))
    for _ in zip(range(20), used, busy, strict=False):
        pass
    assert caplog.text.count("announced objects were requested") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_share_a_dataset_are_not_warned_of(data, workers, caplog):
    # The first one announces objects before the second one does, and pauses.
    paused = iter(torchobj.DataLoader(data, num_workers=workers))
    next(paused)
    for _ in range(2):
        assert len(list(torchobj.DataLoader(data, num_workers=workers))) == COUNT
    assert len(list(paused)) == COUNT - 1
    assert "announced objects were requested" not in caplog.text
