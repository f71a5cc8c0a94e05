"""Python's garbage collector beside a save or a load."""

import gc
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchobj
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.collector import paused_collector, settle
from torchobj.exceptions import CheckpointError


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


def test_another_thread_changes_no_switch_of_the_trainer():
    inside, left = threading.Event(), threading.Event()
    seen = []

    def save_in_the_background():
        with paused_collector():
            seen.append(gc.isenabled())
            inside.set()
            left.wait(60)
            young = [[] for _ in range(30_000)]
            settle()
        del young

    background = threading.Thread(target=save_in_the_background)
    background.start()
    inside.wait(60)
    gc.disable()
    frozen = gc.get_freeze_count()
    left.set()
    background.join()
    assert seen == [True]
    assert not gc.isenabled()
    assert gc.get_freeze_count() == frozen


class Watching:
    """Knows whether the collector was on when it was pickled, and when it was made again."""

    def __init__(self, was_enabled):
        self.seen = (was_enabled, gc.isenabled())

    def __reduce__(self):
        return Watching, (gc.isenabled(),)


def test_the_collector_rests_while_an_object_is_pickled_and_made_and_runs_after_errors():
    torchobj.save([Watching(None)], "memory://collector/saved.pt")
    assert torchobj.load("memory://collector/saved.pt", weights_only=False)[0].seen == (False, False)
    assert gc.isenabled()
    with pytest.raises(CheckpointError):
        torchobj.load("memory://collector/saved.pt")
    with pytest.raises(Exception, match="pickle"):
        torchobj.save(lambda: 0, "memory://collector/saved.pt")
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore")
def test_the_collector_runs_after_a_save_and_a_load():
    state = {"weight": torch.arange(12.0)}
    dcp.save(state, storage_writer=StorageWriter("memory://collector/checkpoint"))
    assert gc.isenabled()
    dcp.load(state, storage_reader=StorageReader("memory://collector/checkpoint"))
    assert gc.isenabled()


@pytest.fixture
def looked_through():
    """The collector has looked through everything just now."""
    gc.collect()


def settled(count):
    with paused_collector():
        made = [[] for _ in range(count)]
        settle()
    return made


def is_old(value):
    return any(old is value for old in gc.get_objects(generation=2))


@pytest.mark.usefixtures("looked_through")
def test_what_was_made_while_it_rested_is_old():
    made = settled(100_000)
    assert is_old(made)
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("looked_through")
def test_objects_that_somebody_froze_stay_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        made = settled(100_000)
        assert not is_old(made)
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("looked_through")
def test_little_is_not_settled_and_much_only_once_before_the_next_full_collection():
    assert not is_old(settled(100))
    assert is_old(settled(100_000))
    assert not is_old(settled(100_000))


@pytest.mark.filterwarnings("ignore")
def test_garbage_of_loads_is_found_however_many_follow_each_other():
    class Model:
        living = 0

        def __init__(self):
            Model.living += 1
            self.own = self

        def __del__(self):
            Model.living -= 1

    state = {f"w{number}": torch.ones(1) for number in range(4000)}
    dcp.save(state, storage_writer=StorageWriter("memory://collector/many"))
    most = 0
    for _ in range(20):
        Model()
        dcp.load(state, storage_reader=StorageReader("memory://collector/many"))
        most = max(most, Model.living)
    assert most < 15
