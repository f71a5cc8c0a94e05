"""Look-ahead for loaders created elsewhere: `attach`, `LookaheadBatchSampler`, and the warning if neither is used."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import SequentialSampler, Subset

import torchobj
from tests.support.prefetching import Taken
from torchobj import exceptions

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


def ours(data, **settings):
    return torchobj.DataLoader(data, batch_size=4, **settings)
