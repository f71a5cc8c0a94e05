"""The attributes of a loader for one pass: their layers, and that the loader has its own again afterwards."""

import pytest
import torch

from torchobj.loader.pass_setup import PassSetup


@pytest.fixture
def loader():
    return torch.utils.data.DataLoader([1, 2, 3], collate_fn=sum, num_workers=1)


def attributes(loader):
    return loader.dataset, loader.collate_fn, loader.worker_init_fn


def test_calls_of_workers_are_outside_of_those_that_were_added_before(loader):
    called = []
    loader.worker_init_fn = lambda worker: called.append(f"user {worker}")
    setup = PassSetup(loader)
    setup.call_in_workers(lambda: called.append("inner"))
    setup.call_in_workers(lambda: called.append("middle"), lambda: called.append("built"))
    setup.call_in_workers(lambda: called.append("outer"), lambda: called.append("started"))
    with setup.applied():
        loader.worker_init_fn(7)
    assert called == ["outer", "middle", "inner", "user 7", "built", "started"]


def test_a_loader_has_its_own_attributes_again_also_after_an_exception(loader):
    own, setup = attributes(loader), PassSetup(loader)
    setup.dataset, setup.collate_fn = [4], max
    setup.call_in_workers(lambda: None)
    with pytest.raises(KeyError), setup.applied():
        assert attributes(loader)[:2] == ([4], max)
        assert loader.worker_init_fn is not own[2]
        raise KeyError
    assert attributes(loader) == own


def test_a_worker_init_fn_without_added_calls_is_that_of_the_loader(loader):
    with PassSetup(loader).applied():
        assert loader.worker_init_fn is None
