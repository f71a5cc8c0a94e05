"""The garbage collector during a save and a load."""

import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchobj
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.exceptions import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")

URL = "memory://collector/checkpoint"


@pytest.fixture(autouse=True)
def enabled_collector():
    gc.enable()
    yield
    gc.enable()


class Watching:
    """Records whether the collector was enabled when it was pickled, and when it was unpickled."""

    def __init__(self, was_enabled):
        self.seen = (was_enabled, gc.isenabled())

    def __reduce__(self):
        return Watching, (gc.isenabled(),)


def test_the_collector_runs_while_an_object_is_pickled_and_unpickled_and_after_errors():
    torchobj.save([Watching(None)], "memory://collector/saved.pt")
    assert torchobj.load("memory://collector/saved.pt", weights_only=False)[0].seen == (True, True)
    with pytest.raises(CheckpointError):
        torchobj.load("memory://collector/saved.pt")
    with pytest.raises(Exception, match="pickle"):
        torchobj.save(lambda: 0, "memory://collector/saved.pt")
    assert gc.isenabled()


def test_a_save_and_a_load_never_change_the_collector(monkeypatch):
    called = []
    for name in ("disable", "enable", "freeze", "unfreeze", "collect", "set_threshold"):
        monkeypatch.setattr(gc, name, lambda *_args, name=name: called.append(name))
    state = {f"w{number}": torch.ones(1) for number in range(4000)}
    dcp.save(state, storage_writer=StorageWriter(URL))
    dcp.load(state, storage_reader=StorageReader(URL))
    monkeypatch.undo()
    assert called == []


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_save_and_a_load_keep_the_setting(is_enabled):
    if not is_enabled:
        gc.disable()
    state = {"weight": torch.arange(12.0)}
    dcp.save(state, storage_writer=StorageWriter(URL))
    dcp.load(state, storage_reader=StorageReader(URL))
    assert gc.isenabled() == is_enabled


def test_garbage_of_loads_is_found_however_many_follow_each_other():
    class Model:
        living = 0

        def __init__(self):
            Model.living += 1
            self.own = self

        def __del__(self):
            Model.living -= 1

    state = {f"w{number}": torch.ones(1) for number in range(1000)}
    dcp.save(state, storage_writer=StorageWriter("memory://collector/many"))
    most = 0
    for _ in range(20):
        Model()
        dcp.load(state, storage_reader=StorageReader("memory://collector/many"))
        most = max(most, Model.living)
    assert most < 15


def test_a_load_frees_its_tensors_without_the_collector():
    state = {"weight": torch.ones(300_000), "items": [torch.ones(5)], "value": {"step": 1}}
    dcp.save(state, storage_writer=StorageWriter(URL))
    gc.disable()
    target = {"weight": torch.zeros(300_000), "items": [torch.zeros(5)], "value": {"step": 0}}
    weight = weakref.ref(target["weight"])
    dcp.load(target, storage_reader=StorageReader(URL))
    assert target["value"] == {"step": 1}
    del target
    assert weight() is None


def test_a_load_that_fails_frees_its_tensors_without_the_collector():
    store = torchobj.Store("memory://collector")
    dcp.save({"weight": torch.ones(300_000)}, storage_writer=StorageWriter(f"{URL}/short"))
    [key] = [info.key for info in store.list("checkpoint/short/") if info.key.endswith(".distcp")]
    store.put(key, bytes(store.get(key))[:1000])
    target = {"weight": torch.zeros(300_000)}
    weight = weakref.ref(target["weight"])
    # Without dcp.load, which keeps the error in a variable of a frame of its traceback.
    reader, planner = StorageReader(f"{URL}/short"), dcp.DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(target, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.create_local_plan()
    gc.disable()
    with pytest.raises(CheckpointError, match="bytes that a file does not have"):
        reader.read_data(plan, planner)
    del target, planner
    assert weight() is None
