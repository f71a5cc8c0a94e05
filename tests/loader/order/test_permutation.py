"""The computed permutation and its sampler: golden orders, uniform orders, and orders shared among ranks."""

import collections
import itertools
import pickle
import tracemalloc

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from torchobj import ElasticDistributedSampler
from torchobj.exceptions import ConfigError
from torchobj.loader.order.permutation import Permutation


def permuted(size, seed=0, epoch=0):
    return Permutation(size, seed, epoch).at(np.arange(size, dtype=np.uint64)).tolist()


def sampler(size=24, num_replicas=1, rank=0, **settings):
    return ElasticDistributedSampler(range(size), num_replicas, rank, **settings)


def test_the_order_is_the_same_in_every_version_and_on_every_machine():
    assert permuted(10) == [3, 8, 2, 1, 9, 0, 7, 4, 6, 5]
    assert permuted(10, seed=-1, epoch=7) == [5, 0, 2, 4, 8, 9, 6, 3, 1, 7]
    assert Permutation(10**12, 42, 3).at(np.arange(4, dtype=np.uint64)).tolist() == [
        445883457015,
        317878567892,
        242760979636,
        450016096464,
    ]
    assert list(sampler(10)) == permuted(10)


@given(size=st.integers(0, 5000), seed=st.integers(), epoch=st.integers())
def test_every_number_occurs_once(size, seed, epoch):
    assert sorted(permuted(size, seed, epoch)) == list(range(size))


@pytest.mark.parametrize("seeds", [1500, pytest.param(6000, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("size", "limit"), [(3, 25), (4, 55), (5, 190)])
def test_all_orders_of_a_few_numbers_are_equally_likely(size, limit, seeds):
    # Chi-squared over all orders, at about p = 0.0001.
    counts = collections.Counter(tuple(permuted(size, seed)) for seed in range(seeds))
    orders = list(itertools.permutations(range(size)))
    expected = seeds / len(orders)
    assert sum((counts[order] - expected) ** 2 / expected for order in orders) < limit


@pytest.mark.parametrize("epochs", [1000, pytest.param(3000, marks=pytest.mark.matrix)])
def test_each_number_is_equally_likely_at_each_position(epochs):
    size = 50
    seen = np.zeros((size, size))
    for epoch in range(epochs):
        seen[np.arange(size), permuted(size, 1, epoch)] += 1
    expected = epochs / size
    freedom = (size - 1) ** 2
    chi_squared = ((seen - expected) ** 2 / expected).sum()
    assert abs(chi_squared - freedom) < 4 * (2 * freedom) ** 0.5


def test_neighbours_differ_between_seeds_and_epochs():
    orders = [permuted(5000, seed, epoch) for seed in range(3) for epoch in range(3)]
    for one, other in itertools.combinations(orders, 2):
        pairs = set(itertools.pairwise(one))
        assert len(pairs & set(itertools.pairwise(other))) < 12
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 12


def test_a_billion_indices_need_no_memory_and_no_setup():
    ahead = iter(sampler(10**9, 8, 3))
    tracemalloc.start()
    found = list(itertools.islice(ahead, 10_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(found)) == 10_000
    assert max(found) < 10**9
    assert peak < 4 << 20


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
