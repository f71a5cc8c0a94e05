"""A loader tells what it did, and what held it back."""

import threading
import time

import pytest
import torch

import torchobj
from torchobj.datasets.map import ObjectMapDataset

COUNT, SIZE = 96, 20_000


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"{number:03}").write_bytes(bytes([number]) * SIZE)
    return tmp_path


def key_of(reader):
    return int(reader.key.rsplit("/", 1)[-1])


def slow(reader):
    end = time.perf_counter() + 0.004
    while time.perf_counter() < end:
        pass
    return key_of(reader)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_handed_out_and_read_is_counted(folder, workers):
    data = ObjectMapDataset(f"file://{folder}/", transform=key_of)
    loader = torchobj.DataLoader(data, batch_size=10, shuffle=True, num_workers=workers)
    assert loader.report() == "Nothing was handed out yet."
    for _ in range(2):
        assert sorted(key for batch in loader for key in batch.tolist()) == list(range(COUNT))
    stats = loader.stats()
    assert (stats.batches, stats.samples, stats.workers) == (20, 2 * COUNT, workers)
    assert stats.hits + stats.late + stats.queued + stats.misses == 2 * COUNT
    assert stats.bytes_per_s * stats.elapsed_s == pytest.approx(2 * COUNT * SIZE)
    assert 0 < stats.waited_s <= stats.elapsed_s
    assert loader.report().startswith(f"{2 * COUNT} samples in ")


def test_a_break_counts_what_was_handed_out(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=key_of), batch_size=10)
    next(iter(loader))
    assert (loader.stats().batches, loader.stats().samples) == (1, 10)


def test_time_between_batches_is_the_loops_own(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=key_of), batch_size=24)
    pause = threading.Event()
    for _ in loader:
        pause.wait(0.1)
    stats = loader.stats()
    assert stats.elapsed_s - stats.waited_s >= 0.4
    assert "The trainer sets the pace" in loader.report()


def test_a_transform_that_takes_long_is_blamed_and_not_the_store(folder):
    loader = torchobj.DataLoader(ObjectMapDataset(f"file://{folder}/", transform=slow), batch_size=8)
    assert len(list(loader)) == COUNT // 8
    assert "the transform runs in the loop's own process: give the loader workers" in loader.report()


def test_a_loader_of_which_nothing_is_known_counts_batches(folder):
    stock = torchobj.DataLoader(torch.utils.data.TensorDataset(torch.arange(10)), batch_size=4)
    assert len(list(stock)) == 3
    assert (stock.stats().batches, stock.stats().samples) == (3, 10)
    assert "Nothing was read ahead" in stock.report()
