"""The computed permutation: golden orders, and orders that are equally likely."""

import collections
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.long_tables import often
from tests.support.permutations import permuted, sampler
from torchobj.loader.order.permutation import Permutation


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


@pytest.mark.parametrize(
    ("size", "limit", "seeds"), often(1, [(4, 55, 1500), (3, 25, 6000), (4, 55, 6000), (5, 190, 6000)])
)
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
