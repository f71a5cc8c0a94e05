"""A forked child has none of the threads of its parent: it waits for none of them, and changes nothing of its saves."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from tests.support.forking import in_child
from tests.support.managers import tensor
from tests.support.ranks import run_ranks
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.state.staging import Stager
from torchobj.exceptions import CheckpointError


def manager_of(folder):
    return CheckpointManager(f"file://{folder}/run")


@pytest.mark.parametrize("call", ["wait", "close", "save", "save_async", "restored", "result", "exception", "block"])
def test_a_child_does_not_wait_for_the_pending_save_of_its_parent(tmp_path, gate, call):
    manager = manager_of(tmp_path)
    handle = manager.save_async(1, {"x": tensor(1)})
    assert gate.reached.wait(60)

    def block():
        with manager:
            pass

    def save():
        gate.open.set()
        with contextlib.suppress(CheckpointError):
            manager.wait()
        manager.save(2, {"x": tensor(2)})
        raise CheckpointError(f"forked child saved {manager.steps()}")

    calls = {
        "wait": manager.wait,
        "close": manager.close,
        "save": lambda: manager.save(2, {"x": tensor(2)}),
        "save_async": lambda: manager.save_async(2, {"x": tensor(2)}),
        "restored": save,
        "result": handle.result,
        "exception": lambda: (handle.done(), str(handle.exception())),
        "block": block,
    }
    told = "(True, " if call == "exception" else "CheckpointError: "
    assert told in (answer := in_child(calls[call])), answer
    assert "forked child" in answer
    gate.open.set()
    handle.result()
    manager.wait()
    assert manager.steps()[0] == 1
    assert torch.equal(manager.restore(1)["x"], tensor(1))


def test_the_staged_copy_of_a_child_is_not_that_of_its_parent():
    stager = Stager()
    shard = stager.stage_shard({"x": torch.ones(1 << 19)})

    def stage():
        # The threads of torch exist in the parent only.
        torch.set_num_threads(1)
        return stager.stage_shard({"x": torch.zeros(1 << 19)})["x"].eq(0).all().item()

    assert in_child(stage) == "True"
    assert shard["x"].eq(1).all()


def save_in_a_child(rank, folder):
    dist.init_process_group("gloo")
    manager = manager_of(folder)
    manager.save(1, {"x": tensor(1)})
    answer = in_child(lambda: manager.save(2, {"x": tensor(2)}))
    dist.barrier()
    manager.save(3, {"x": tensor(3)})
    return answer, manager.steps()


@pytest.mark.matrix
def test_a_child_of_a_rank_does_not_wait_for_the_other_ranks(tmp_path):
    for rank, (answer, steps) in enumerate(run_ranks(save_in_a_child, tmp_path)):
        assert f"CheckpointError: this is a forked child of rank {rank}, and cannot communicate" in answer
        assert steps == [1, 3]
