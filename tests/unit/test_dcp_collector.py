"""Python's garbage collector beside a save or a load of a distributed checkpoint."""

import gc

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.dcp.collector import paused_collector


@pytest.fixture(autouse=True)
def enabled_collector():
    gc.enable()
    yield
    gc.enable()


def test_the_collector_rests_in_the_block_and_runs_behind_it():
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_runs_again_behind_an_error():
    with pytest.raises(ZeroDivisionError), paused_collector():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_is_disabled_stays_so():
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


@pytest.mark.filterwarnings("ignore")
def test_the_collector_runs_after_a_save_and_a_load():
    state = {"weight": torch.arange(12.0)}
    dcp.save(state, storage_writer=StorageWriter("memory://collector/checkpoint"))
    assert gc.isenabled()
    dcp.load(state, storage_reader=StorageReader("memory://collector/checkpoint"))
    assert gc.isenabled()
