"""Each rank restores the state of its own loader, also if only the first rank writes the checkpoint."""

import itertools

import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

SAMPLES, BATCH = 24, 2


class OwnOrder(torch.utils.data.Sampler):
    """A sampler with an order of its own on each rank, which only its state contains."""

    def __init__(self, seed):
        self.order, self.at = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist(), 0

    def __iter__(self):
        while self.at < SAMPLES:
            self.at += 1
            yield self.order[self.at - 1]
        self.at = 0

    def __len__(self):
        return SAMPLES

    def state_dict(self):
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = list(state["order"]), state["at"]


def loader_of(seed, elastic):
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    sampler = torchobj.ElasticDistributedSampler(data, seed=3) if elastic else OwnOrder(seed)
    return torchobj.DataLoader(data, batch_size=BATCH, sampler=sampler)


def taken(batches, count=None):
    return [batch[0].tolist() for batch in itertools.islice(batches, count)]


def opened(url, config):
    return CheckpointManager(url, config=config)


def resumed(rank, url, config, elastic):
    dist.init_process_group("gloo")
    manager, loader = opened(url, config), loader_of(rank, elastic)
    batches = iter(loader)
    taken(batches, 2 + (0 if elastic else rank))
    manager.save(1, {"nested": {"loader": loader}, "x": torch.ones(2)})
    manager.save_async(2, {"nested": {"loader": loader}, "x": torch.ones(2)}).result()
    rest = taken(batches)
    outcomes = []
    for step in (1, 2):
        fresh = loader_of(100 + rank, elastic)
        manager.restore(step, into={"nested": {"loader": fresh}, "x": torch.zeros(2)})
        outcomes.append(taken(iter(fresh)) == rest)
    # Manually, from the state that restore returns.
    fresh = loader_of(200 + rank, elastic)
    fresh.load_state_dict(manager.restore()["nested"]["loader"])
    return [*outcomes, taken(iter(fresh)) == rest], rest


@pytest.fixture(params=["s3", "file"])
def url(request, bucket, tmp_path):
    return f"{bucket.url}/run" if request.param == "s3" else f"file://{tmp_path}/run"


def test_each_rank_resumes_the_state_of_its_own_loader(url, bucket):
    first, second = run_ranks(resumed, url, bucket.config, False)
    assert first[0] == second[0] == [True, True, True]
    assert first[1] != second[1]
    manager, alone = opened(url, bucket.config), loader_of(0, elastic=False)
    with pytest.raises(exceptions.CheckpointError, match="was saved by 2 ranks, each its own, and there are 1"):
        manager.restore(into={"nested": {"loader": alone}, "x": torch.zeros(2)})


def test_an_elastic_sampler_resumes_with_another_number_of_ranks(url, bucket):
    first, second = run_ranks(resumed, url, bucket.config, True)
    assert first[0] == second[0] == [True, True, True]
    alone = torchobj.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(SAMPLES)),
        batch_size=BATCH,
        sampler=torchobj.ElasticDistributedSampler(range(SAMPLES), num_replicas=1, rank=0, seed=3),
    )
    opened(url, bucket.config).restore(into={"nested": {"loader": alone}, "x": torch.zeros(2)})
    rest = sorted(itertools.chain(*taken(iter(alone))))
    assert rest == sorted(itertools.chain(*first[1], *second[1]))
