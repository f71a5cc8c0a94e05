"""Planners are asked for every tensor, whatever they, or the tensors, answer."""

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from torchobj.checkpoint import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

URL = "memory://asking/checkpoint"


class Doubling(DefaultSavePlanner):
    def transform_object(self, write_item, object):
        return super().transform_object(write_item, object) * 2


class Asked(DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        self.names = [*getattr(self, "names", []), read_item.dest_index.fqn]
        return super().resolve_tensor(read_item)


def save(state, planner=None):
    dcp.save(state, storage_writer=StorageWriter(URL), planner=planner, no_dist=True)


def load(state, planner=None):
    dcp.load(state, storage_reader=StorageReader(URL), planner=planner, no_dist=True)
    return state


def test_another_planner_is_asked_for_each_tensor():
    save({"a": torch.ones(3), "b": torch.ones(2, 2)}, Doubling())
    planner = Asked()
    state = load({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, planner)
    assert sorted(planner.names) == ["a", "b"]
    assert state["a"].tolist() == [2, 2, 2]
    assert state["b"].tolist() == [[2, 2], [2, 2]]


def test_a_default_planner_with_a_method_of_somebodys_own_is_asked(monkeypatch):
    planner = DefaultSavePlanner()
    planner.lookup_object = lambda _index: torch.full((3,), 7.0)
    save({"a": torch.ones(3)}, planner)
    assert load({"a": torch.zeros(3)})["a"].tolist() == [7, 7, 7]

    own = DefaultLoadPlanner.lookup_tensor
    asked = []
    monkeypatch.setattr(
        DefaultLoadPlanner, "lookup_tensor", lambda self, index: asked.append(index.fqn) or own(self, index)
    )
    assert load({"a": torch.zeros(3)})["a"].tolist() == [7, 7, 7]
    assert asked == ["a"]


@pytest.mark.matrix
def test_a_planner_that_was_patched_before_torchobj_came_is_asked():
    script = f"""
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
own = DefaultSavePlanner.transform_object
DefaultSavePlanner.transform_object = lambda self, item, value: own(self, item, value) * 2
from torchobj.checkpoint import StorageReader, StorageWriter
dcp.save({{"a": torch.ones(1)}}, storage_writer=StorageWriter("{URL}"), no_dist=True)
state = {{"a": torch.zeros(1)}}
dcp.load(state, storage_reader=StorageReader("{URL}"), no_dist=True)
print(state["a"].item())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout == "2.0\n"


def test_a_tensor_that_answers_for_itself_is_asked_for():
    tensor = torch.ones(3)
    tensor.__get_tensor_shard__ = lambda _index: torch.full((3,), 7.0)
    save({"a": tensor})
    assert load({"a": torch.zeros(3)})["a"].tolist() == [7, 7, 7]


def test_a_tensor_that_says_it_is_a_shard_is_loaded_as_one():
    protocol = pytest.importorskip("torch.distributed.checkpoint.protocol", reason="torch 2.15 has such tensors")
    assert protocol.CheckpointableTensor
    whole = torch.arange(10.0)

    def shard(values):
        local = torch.zeros(6)
        local[1:4] = values
        local.global_shape, local.global_offsets = (10,), ((4,),)
        local.local_offsets, local.local_sizes = ((1,),), ((3,),)
        return local

    save({"a": whole})
    local = load({"a": shard(torch.zeros(3))})["a"]
    assert local.tolist() == [0, 4, 5, 6, 0, 0]


def test_parameters_views_and_what_is_no_tensor_come_back():
    base = torch.arange(12.0).view(3, 4)
    model = torch.nn.Linear(4, 2)
    state = {"view": base.t(), "row": base[1], "weight": model.weight, "scalar": torch.tensor(3), "step": 5}
    save(state)
    target = torch.nn.Linear(4, 2)
    found = load(
        {
            "view": torch.zeros(4, 3),
            "row": torch.zeros(2, 4)[0],
            "weight": target.weight,
            "scalar": torch.tensor(0),
            "step": 0,
        }
    )
    assert torch.equal(found["view"], base.t())
    assert torch.equal(found["row"], base[1])
    assert torch.equal(target.weight, model.weight)
    assert (found["scalar"].item(), found["step"]) == (3, 5)
    assert target.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3,), (30, 400), (3000, 400)], ids=str)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_inference_tensors_are_loaded_into(dtype, shape, is_contiguous):
    saved = torch.rand(shape).to(dtype)
    save({"a": saved})
    with torch.inference_mode():
        target = torch.zeros(shape, dtype=dtype)
        if not is_contiguous:
            target = torch.zeros((*shape, 2), dtype=dtype)[..., 0]
    assert torch.equal(load({"a": target})["a"], saved)
