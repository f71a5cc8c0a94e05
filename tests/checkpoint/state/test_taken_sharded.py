"""In a sharded checkpoint each rank has its own state of loaders, datasets and samplers."""

import logging

import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SAMPLES = 24


class Numbers(torch.utils.data.IterableDataset):
    """A dataset that resumes from its state."""

    def __init__(self, rank, n=0):
        self.rank, self.n = rank, n

    def __iter__(self):
        while self.n < SAMPLES:
            self.n += 1
            yield self.n - 1

    def state_dict(self):
        # Different names on different ranks.
        return {"n": torch.tensor(self.n), f"of {self.rank}": self.rank, "seen": {str(self.n): [self.n]}}

    def load_state_dict(self, state):
        assert f"of {self.rank}" in state
        self.n = int(state["n"])


def state_of(rank, data):
    return {"inner": {"data": data}, "loader": torchobj.DataLoader(data, batch_size=2), "x": torch.full((2,), 1.0)}


def of_a_rank(rank, url):
    dist.init_process_group("gloo")
    data = Numbers(rank, 1 + 3 * rank)
    outcomes = []
    with CheckpointManager(url, sharded=True) as manager:
        manager.save(1, state_of(rank, data))
        manager.save_async(2, state_of(rank, data)).result()
        for step in (1, 2):
            fresh = Numbers(rank)
            state = state_of(rank, fresh) | {"x": torch.zeros(2)}
            manager.restore(step, into=state)
            outcomes.append((fresh.n, state["x"].tolist(), next(iter(state["loader"])).tolist()))
    return outcomes


def test_each_rank_resumes_its_own_state(tmp_path):
    first, second = run_ranks(of_a_rank, f"file://{tmp_path}/run")
    assert first == [(1, [1.0, 1.0], [1, 2])] * 2
    assert second == [(4, [1.0, 1.0], [4, 5])] * 2
    with (
        CheckpointManager(f"file://{tmp_path}/run", sharded=True) as manager,
        pytest.raises(exceptions.CheckpointError, match="saved by 2 ranks, each its own, and there are 1"),
    ):
        manager.restore(into={"inner": {"data": Numbers(0)}})


def partly(rank, url, sharded, caplog):
    dist.init_process_group("gloo")
    with CheckpointManager(url, sharded=sharded) as manager:
        state = {"data": Numbers(0, 5), "x": torch.ones(2)}
        manager.save(1, state if rank == 0 else {"x": torch.ones(2)} if sharded else {})
        warned = any("data" in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        fresh = Numbers(0)
        manager.restore(into={"data": fresh})
    return fresh.n, warned


@pytest.mark.parametrize("sharded", [False, True])
def test_a_state_that_only_the_first_rank_had_is_restored_on_all(tmp_path, sharded, caplog):
    first, second = run_ranks(partly, f"file://{tmp_path}/run", sharded, caplog)
    assert first == (5, True)
    assert second[0] == 5
