"""Steps are committed whole or not at all, and the manager lists them."""

import json
import random
import subprocess
import sys

import numpy
import pytest
import torch

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import data_keys, saved_value, tensor
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, RngState

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


def training(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model[1].weight = torch.nn.Parameter(torch.rand(1, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(40, 1).repeat(1, 4))
    sampler = torchobj.ElasticDistributedSampler(data, num_replicas=1, rank=0, seed=3)
    loader = torchobj.DataLoader(data, batch_size=4, sampler=sampler)
    return {"nets": {"model": model, "optimizer": optimizer}, "loader": loader, "rng": RngState(), "epoch": 0}


def train(state, batches, steps):
    model, optimizer = state["nets"]["model"], state["nets"]["optimizer"]
    losses = []
    for _ in range(steps):
        [batch] = next(batches)
        noise = torch.rand(1) + random.random() + numpy.random.rand()  # noqa: NPY002
        loss = (model(batch) * noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_step_contains_the_state_to_resume_training_exactly(any_bucket):
    manager = CheckpointManager(f"{any_bucket.url}/run", config=any_bucket.config)
    state = training(1)
    batches = iter(state["loader"])
    train(state, batches, 3)
    manager.save(3, state)
    went_on = train(state, batches, 4)
    other = training(2)
    assert manager.restore(into=other) is other
    assert train(other, iter(other["loader"]), 4) == went_on
    manager.save(4, state)
    manager.save(4, state, overwrite=True)
    manager.delete(3)
    assert (manager.steps(), manager.leftovers()) == ([4], [])
    assert len(any_bucket.keys()) == 3


def test_file_and_memory_stores_keep_checkpoints_too(tmp_path):
    for url in (f"file://{tmp_path}/not/there/yet", "memory://manager", "memory://manager/deeper/"):
        manager = CheckpointManager(url, keep_last=1)
        assert (manager.latest(), manager.steps(), manager.leftovers(), manager.sweep(0)) == (None, [], [], [])
        for step in (1, 2, 2):
            manager.save(step, {"x": tensor(step)}, overwrite=True)
        assert (manager.steps(), saved_value(manager)) == ([2], 2.0)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_keys_are_not_decoded(bucket, config):
    manager = CheckpointManager(f"{bucket.url}//a b//run/", config=config)
    manager.save(1, {"x": tensor(1)})
    assert saved_value(manager) == 1.0
    assert {key.rsplit("/", 1)[0] for key in bucket.keys()} >= {"/a b//run", "/a b//run/commits"}


def test_a_process_waits_at_exit_for_its_save_and_logs_it(tmp_path):
    script = (
        "import logging, sys, threading, torch, torchobj.checkpoint as c\n"
        "from torchobj.checkpoint.steps import state_content\n"
        "logged, save = threading.Event(), state_content.save_counted\n"
        "logging.getLogger('torchobj').addFilter(lambda record: logged.set() or True)\n"
        "state_content.save_counted = lambda *given, **named: (logged.wait(30), save(*given, **named))[1]\n"
        "c.CheckpointManager(sys.argv[1]).save_async(1, {'x': torch.ones(5_000_000)})\n"
    )
    command = [sys.executable, "-c", script, f"file://{tmp_path}"]
    ended = subprocess.run(command, check=True, timeout=150, capture_output=True, text=True)
    assert "the process waits at exit until step 1 is saved" in ended.stderr
    assert saved_value(CheckpointManager(f"file://{tmp_path}")) == 1.0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_saves_a_sharded_state_too(bucket, config, tmp_path):
    for url in (f"{bucket.url}/run", f"file://{tmp_path}/run", f"memory://{bucket.name}/run"):
        manager = CheckpointManager(url, 1, sharded=True, config=config)
        model, nested = torch.nn.Linear(3, 2), {"deep": {"y": tensor(2)}}
        weight = model.weight.detach().clone()
        for step in (1, 2):
            manager.save(step, {"model": model, "nested": nested, "step": step})
        manager.save_async(3, {"model": model, "nested": nested, "step": 3}).result()
        into = {"model": torch.nn.Linear(3, 2), "nested": {"deep": {"y": torch.zeros(4)}}, "step": 0}
        there = into["nested"]["deep"]["y"]
        manager.restore(into=into)
        assert torch.equal(into["model"].weight, weight)
        assert (there.tolist(), into["step"], manager.steps(), manager.leftovers()) == ([2.0] * 4, 3, [3], [])


def test_the_latest_step_is_one_listing(manager, control):
    for step in (5, 1, 30):
        manager.save(step, {"x": tensor(step)})
    control.clear_requests()
    assert manager.latest() == 30
    assert [request.operation for request in control.requests()] == ["ListObjectsV2"]


@pytest.mark.providers("s3", "gs")
def test_a_pointer_names_the_latest_step_for_other_tools_and_is_not_trusted(manager, bucket):
    manager.save(1, {"x": tensor(1)})
    manager.save(2, {"x": tensor(2)})
    assert json.loads(bucket.body("run/latest.json")) == {"step": 2, "commit": "run/commits/000000000002.json"}
    bucket.write("run/latest.json", b'{"step": 9}')
    assert manager.latest() == 2
    manager.delete(2)
    assert json.loads(bucket.body("run/latest.json"))["step"] == 1
    manager.delete(1)
    assert bucket.keys() == []


@pytest.mark.providers("s3", "gs")
def test_data_without_a_commit_is_not_a_step(manager, bucket):
    manager.save(1, {"x": tensor(1)})
    [key] = data_keys(bucket, 1)
    left = f"run/steps/{7:012}-{'ab' * 16}/state.pt"
    bucket.write(left, bucket.body(key))
    assert (manager.latest(), manager.steps(), saved_value(manager)) == (1, [1], 1.0)
    with pytest.raises(exceptions.CheckpointError, match=r"step 7 is not committed; there are \[1\]"):
        manager.restore(7)
    assert [item.key for item in manager.leftovers()] == [left.removeprefix("run/")]
