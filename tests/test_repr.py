"""`repr` shows what an object reads, and counts that are known without I/O."""

import pytest
import torch.utils.data

import torchobj
from torchobj import _torchobj

STORE = torchobj.Store("memory://shown")


@pytest.fixture(autouse=True, scope="module")
def objects():
    for number in range(5):
        STORE.put(f"{number}.bin", bytes([number]))


class Mine(torchobj.ObjectMapDataset):
    pass


class Unset(torchobj.ObjectMapDataset):
    def __init__(self):
        pass


class Rows(torchobj.ObjectDataset):
    def __len__(self):
        raise AssertionError("repr must not ask for the length")


def test_a_dataset_shows_its_source_and_its_length_once_it_is_known(monkeypatch):
    dataset = torchobj.ObjectMapDataset("memory://shown/", suffixes=".bin")
    listed = "<ObjectMapDataset memory://shown/ with suffixes=['.bin'], "
    with monkeypatch.context() as patch:
        patch.setattr(_torchobj, "NativeStore", None)
        assert repr(dataset) == f"{listed}not listed yet>"
    assert len(dataset) == 5
    assert repr(dataset) == f"{listed}5 objects>"
    assert repr(Mine("memory://shown/x")) == "<Mine memory://shown/x, not listed yet>"
    assert repr(Unset()) == "<Unset not set up>"
    named = torchobj.S3MapDataset.from_objects(["s3://bucket/a", "s3://bucket/b"])
    assert repr(named) == "<S3MapDataset 2 objects by name>"
    assert repr(Rows(on_error="replace")) == "<Rows, a torchobj.ObjectDataset, on_error='replace'>"


def test_an_iterable_dataset_shows_its_order():
    dataset = torchobj.ObjectIterableDataset("memory://shown/", shuffle=True, seed=3, enable_sharding=True)
    dataset.set_epoch(2)
    assert repr(dataset) == (
        "<ObjectIterableDataset memory://shown/, not listed yet, shuffle=True, seed=3, enable_sharding=True, epoch 2>"
    )


def test_a_loader_shows_its_dataset_and_its_progress():
    dataset = torchobj.ObjectMapDataset("memory://shown/", transform=lambda reader: reader.read()[0])
    loader = torchobj.DataLoader(dataset, batch_size=2, lookahead=4)
    batches = iter(loader)
    next(batches)
    assert repr(loader) == (
        "<DataLoader of <ObjectMapDataset memory://shown/, 5 objects>, batch_size=2, num_workers=0, lookahead=4, "
        "1 batches returned>"
    )
    assert "of list, batch_size=1" in repr(torchobj.DataLoader([b"x" * 1000]))


def test_samplers_show_their_arguments():
    sampler = torchobj.ElasticDistributedSampler(range(10), num_replicas=2, seed=7)
    sampler.set_epoch(3)
    assert repr(sampler) == (
        "<ElasticDistributedSampler num_replicas=2, rank=None, shuffle=True, seed=7, drop_last=False, epoch 3>"
    )
    batches = torchobj.LookaheadBatchSampler(torch.utils.data.SequentialSampler(range(4)), 2)
    assert repr(batches) == (
        "<LookaheadBatchSampler of SequentialSampler, batch_size=2, drop_last=False, lookahead=None>"
    )


def test_stores_and_listings_show_their_urls():
    assert repr(STORE) == "Store('memory://shown')"
    listing = "<Listing of prefix='train/', delimiter='/', start_after=None, glob=None, ordered=True>"
    assert repr(STORE.list("train/", "/")) == listing
    assert repr(STORE.get("0.bin")) == "<torchobj.Buffer of 1 bytes>"
