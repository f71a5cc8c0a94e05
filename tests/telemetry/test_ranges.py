"""Ranges in the traces of torch.profiler."""

import pytest
import torch

import torchobj
from torchobj.telemetry.ranges import profiled


def test_a_profile_has_the_batches_collations_saves_and_loads():
    loader = torchobj.DataLoader([1, 2, 3, 4], batch_size=2, lookahead=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(loader)) == 2
        torchobj.save({"a": torch.ones(2)}, "memory://profiled/state.pt")
        assert torchobj.load("memory://profiled/state.pt")["a"].tolist() == [1, 1]
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("torchobj.")}
    # The third request found the end of the epoch.
    assert counts == {"torchobj.next_batch": 3, "torchobj.collate": 2, "torchobj.save": 1, "torchobj.load": 1}


def test_a_profile_has_the_decoding_of_a_map_style_dataset():
    for number in range(4):
        torchobj.Store("memory://profiled-decode").put(str(number), b"1")
    dataset = torchobj.ObjectMapDataset("memory://profiled-decode/", transform=lambda reader: len(reader.read()))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(torchobj.DataLoader(dataset, batch_size=2))) == 2
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("torchobj.")}
    assert counts == {"torchobj.next_batch": 3, "torchobj.decode": 2, "torchobj.collate": 2}


def test_without_a_profiler_no_range_is_created(monkeypatch):
    monkeypatch.setattr(torch.profiler, "record_function", None)
    with profiled("torchobj.nothing"):
        pass
    with pytest.raises(StopIteration), profiled("torchobj.nothing"):
        raise StopIteration
