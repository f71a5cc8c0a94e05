"""In a sharded checkpoint each rank has its own state of loaders, datasets and samplers."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

import torchobj
from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, StorageWriter, save_step

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


def elastic():
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    return torchobj.DataLoader(data, batch_size=2, sampler=torchobj.ElasticDistributedSampler(data, seed=3))


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


def as_before(monkeypatch):
    """Saves as earlier versions did, which kept the state of one rank."""

    def shard_writer(taken, folder, config, ranks, stager, *, stage):
        plain = taken.tree | {path[0]: own for path, (_, own) in taken.of_ranks.items()}
        return lambda: save(plain, storage_writer=StorageWriter(folder, config=config), process_group=ranks.group)

    monkeypatch.setattr(save_step, "shard_writer", shard_writer)


def of_an_older_version(rank, url):
    dist.init_process_group("gloo")
    loader, data = elastic(), Numbers(0, 1 + 3 * rank)
    batches = iter(loader)
    next(batches)
    with pytest.MonkeyPatch.context() as patch, CheckpointManager(url, sharded=True) as manager:
        as_before(patch)
        manager.save(1, {"loader": loader, "data": data, "x": torch.ones(2)})
    rest = [batch[0].tolist() for batch in batches]
    fresh = elastic()
    with CheckpointManager(url, sharded=True) as manager:
        manager.restore(into={"loader": fresh, "x": torch.zeros(2)})
        same = [batch[0].tolist() for batch in fresh] == rest
        other, x = Numbers(0, 1 + 3 * rank), torch.zeros(2)
        try:
            manager.restore(into={"data": other, "x": x})
        except exceptions.CheckpointError as error:
            return same, str(error), other.n, x.tolist()
    return same, "no error", other.n, x.tolist()


def test_an_older_checkpoint_is_restored_if_ranks_share_a_state_and_otherwise_refused(tmp_path):
    for rank, (same, text, n, x) in enumerate(run_ranks(of_an_older_version, f"file://{tmp_path}/run")):
        assert same
        assert "data" in text
        assert "one of them" in text
        assert "leave it out of into" in text
        assert (n, x) == (1 + 3 * rank, [0, 0])


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
