"""How far a loader draws its sampler ahead."""

import pytest
import torch

import torchobj
from torchobj.loader import lookahead as lookahead_module

COUNT = 64


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(b"body")
    return tmp_path


def dataset(folder):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=bytes)


class Counted(torch.utils.data.SequentialSampler):
    """Records the indices that were drawn."""

    def __init__(self, data):
        super().__init__(data)
        self.drawn = []

    def __iter__(self):
        for index in super().__iter__():
            self.drawn.append(index)
            yield index


@pytest.mark.parametrize("lookahead", [1, 3])
def test_no_more_than_lookahead_batches_are_drawn_ahead(folder, lookahead, monkeypatch):
    # Drawing takes no time; otherwise it ends earlier.
    monkeypatch.setattr(lookahead_module.time, "perf_counter", lambda: 0.0)
    sampler = Counted(range(COUNT))
    loader = torchobj.DataLoader(dataset(folder), batch_size=1, sampler=sampler, lookahead=lookahead, collate_fn=list)
    for number, _ in enumerate(loader):
        assert len(sampler.drawn) == min(COUNT, number + 1 + lookahead)


def test_a_slow_sampler_gets_ahead(folder, monkeypatch):
    # 5 ms for each index, and 30 ms for each step of the loop.
    now = 0.0

    class Slow(Counted):
        def __iter__(self):
            nonlocal now
            for index in super().__iter__():
                now += 0.005
                yield index

    monkeypatch.setattr(lookahead_module.time, "perf_counter", lambda: now)
    sampler = Slow(range(COUNT))
    loader = torchobj.DataLoader(dataset(folder), batch_size=1, sampler=sampler, lookahead=COUNT, collate_fn=list)
    for number, _ in zip(range(10), loader, strict=False):
        assert len(sampler.drawn) >= min(COUNT, 2 * (number + 1))
        now += 0.03


def test_no_index_is_drawn_before_the_first_batch_is_requested(folder):
    sampler = Counted(range(COUNT))
    loader = torchobj.DataLoader(dataset(folder), batch_size=4, sampler=sampler, lookahead=2)
    iter(loader)
    assert sampler.drawn == []
