"""`ElasticDistributedSampler`: lengths of torch's, one order for any number of ranks, and its state."""

import itertools
import pickle

import pytest
import torch.utils.data

from tests.support.permutations import permuted, sampler
from torchobj import ElasticDistributedSampler
from torchobj.exceptions import ConfigError


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_ranks_together_traverse_one_order_from_its_start(ranks):
    rounds = zip(*(sampler(24, ranks, rank, seed=5) for rank in range(ranks)), strict=True)
    assert [index for round_ in rounds for index in round_] == permuted(24, 5)


@pytest.mark.parametrize(("size", "ranks"), [(10, 3), (10, 4), (2, 5), (0, 2), (1, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_lengths_padding_and_drop_last_are_the_same_as_torchs(size, ranks, drop_last, shuffle):
    settings = {"shuffle": shuffle, "drop_last": drop_last}
    order = permuted(size) if shuffle else list(range(size))
    for rank in range(ranks):
        ours = sampler(size, ranks, rank, **settings)
        theirs = torch.utils.data.DistributedSampler(range(size), ranks, rank, **settings)
        assert (len(ours), ours.total_size) == (len(theirs), theirs.total_size)
        if size:
            theirs_in_order = torch.utils.data.DistributedSampler(
                order, ranks, rank, shuffle=False, drop_last=drop_last
            )
            assert list(ours) == [order[position] for position in theirs_in_order]


def test_each_epoch_has_its_own_reproducible_order():
    ours = sampler()
    first = list(ours)
    assert list(ours) == first
    ours.set_epoch(1)
    assert list(ours) == permuted(24, 0, 1) != first
    assert list(sampler(seed=1)) == permuted(24, 1) != first
    assert list(sampler(shuffle=False)) == list(range(24))


@pytest.mark.parametrize("done", [0, 1, 7, 23, 24])
def test_any_number_of_ranks_reads_the_rest_of_a_state_once(done):
    before = sampler(seed=3)
    before.set_epoch(2)
    list(itertools.islice(before, done))
    state = pickle.loads(pickle.dumps(before.state_dict()))
    assert state == {"seed": 3, "epoch": 2, "done": done, "length": 24, "shuffle": True}
    for ranks in (1, 2, 3):
        after = [sampler(24, ranks, rank, drop_last=True) for rank in range(ranks)]
        for each in after:
            each.load_state_dict(state)
        rest = permuted(24, 3, 2)[done:]
        found = [index for round_ in zip(*after, strict=True) for index in round_]
        assert found == rest[: len(rest) // ranks * ranks]
        assert sorted(index for each in after for index in each) == list(range(24))


def test_a_resumed_position_applies_to_its_epoch_only():
    state = {"seed": 0, "epoch": 4, "done": 20, "length": 24, "shuffle": True}
    ours = sampler()
    ours.load_state_dict(state)
    assert ours.state_dict() == state
    ours.set_epoch(4)
    iter(ours)
    assert len(list(ours)) == 4
    ours.load_state_dict(state)
    ours.set_epoch(5)
    assert len(list(ours)) == 24


def test_an_unused_iterator_consumes_nothing():
    ours = sampler()
    ours.load_state_dict({"seed": 0, "epoch": 0, "done": 20, "length": 24, "shuffle": True})
    iter(ours)
    assert len(list(ours)) == 4


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": "x"}, "seed='x'"),
        ({"epoch": None}, "epoch=None"),
        ({"done": -1}, "done=-1"),
        ({"length": 25}, "length=25"),
        ({"shuffle": False}, "shuffle=False"),
    ],
)
def test_a_state_of_another_sampler_is_refused_with_the_name_of_its_field(changed, named):
    with pytest.raises(ConfigError, match=named):
        sampler().load_state_dict(sampler().state_dict() | changed)


@pytest.mark.parametrize(("num_replicas", "rank"), [(0, 0), (2, 2), (2, -1), (None, -1)])
def test_an_invalid_rank_is_refused(num_replicas, rank):
    with pytest.raises(ConfigError, match="num_replicas=0|rank="):
        ElasticDistributedSampler(range(3), num_replicas, rank)


def test_without_a_job_it_is_the_only_rank_and_num_replicas_needs_rank():
    assert len(ElasticDistributedSampler(range(3))) == 3
    with pytest.raises(ConfigError, match="num_replicas=2, rank=None"):
        list(ElasticDistributedSampler(range(3), num_replicas=2))


def test_a_process_group_that_is_initialised_later_is_used(monkeypatch):
    ours = ElasticDistributedSampler(range(10), seed=1)
    assert len(ours) == 10
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 4)
    assert list(ours) == permuted(10, 1)[4::5]


def test_it_is_a_distributed_sampler_for_lightning():
    ours = sampler(10, 3, 1)
    assert isinstance(ours, torch.utils.data.DistributedSampler)
    assert (ours.num_replicas, ours.rank, ours.num_samples, ours.total_size) == (3, 1, 4, 12)
