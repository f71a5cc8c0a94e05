"""`HostOrder`: each sample once, on one host in all epochs, and few move when hosts are added or lost."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.permutations import permuted
from torchobj.loader.order.host_order import HostOrder


def order(size, hosts, seed=0, epoch=0, end=None):
    return HostOrder(size, hosts, seed, epoch).at(np.arange(end or size, dtype=np.uint64)).tolist()


def parts(size, hosts, seed=0, epoch=0):
    found = order(size, hosts, seed, epoch)
    return [set(found[host::hosts]) for host in range(hosts)]


@given(
    hosts=st.integers(1, 12),
    more=st.integers(0, 300),
    seed=st.integers(-(2**70), 2**70),
    epochs=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
)
def test_each_sample_is_there_once_and_on_the_same_host_in_all_epochs(hosts, more, seed, epochs):
    size = hosts + more
    first, second = (parts(size, hosts, seed, epoch) for epoch in epochs)
    assert sorted(itertools.chain(*first)) == list(range(size))
    assert hosts == 1 or first == second
    assert {len(part) for part in first} <= {size // hosts, -(-size // hosts)}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 4), (4, 8), (8, 4), (7, 6), (64, 72)])
def test_no_sample_moves_between_hosts_that_stay(before, after):
    size = 10_000
    kept = sum(len(old & new) for old, new in zip(parts(size, before), parts(size, after), strict=False))
    assert kept == pytest.approx(size * min(before, after) / max(before, after), abs=max(before, after))


def test_one_host_has_the_order_of_a_sampler_without_locality():
    assert order(50, 1, seed=3, epoch=4) == permuted(50, 3, 4)


def test_the_part_of_a_host_is_followed_by_its_start():
    found = order(10, 3, end=18)
    for host, size in enumerate((4, 3, 3)):
        of_host = found[host::3]
        assert of_host[size:] == of_host[: len(of_host) - size]


def test_epochs_and_hosts_have_orders_of_their_own():
    size = 600
    ranks = []
    for epoch in range(2):
        found = order(size, 2, epoch=epoch)
        for host in range(2):
            ranked = {sample: number for number, sample in enumerate(sorted(found[host::2]))}
            ranks.append([ranked[sample] for sample in found[host::2]])
    assert len({tuple(each) for each in ranks}) == 4
    # Neighbours in the order are not neighbours in the next epoch, and parts are no ranges of the dataset.
    correlations = np.corrcoef(ranks) - np.eye(4)
    assert np.abs(correlations).max() < 0.25
    assert 0.4 < np.mean([sample < size // 2 for sample in found[::2]]) < 0.6
