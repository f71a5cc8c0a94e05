"""The shares of ranks and workers are disjoint and even."""

import pytest

from tests.support.iterables import (
    flat,
)
from torchobj.ranks.sharding import Shard, in_order, shuffled


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("objects", [0, 1, 5, 42, 100])
def test_shares_are_disjoint_and_even_ranks_have_equally_many(objects, world_size, workers):
    order = shuffled(objects, 1, 2)
    assert sorted(order.tolist()) == in_order(objects).tolist()

    def rank(number, uneven):
        shares = [
            Shard(number, world_size, worker, workers).select(order, uneven).tolist() for worker in range(workers)
        ]
        # A rank's samples do not depend on its workers, and all ranks have equally many batches.
        [alone] = [Shard(number, world_size).select(order, uneven).tolist()]
        assert sorted(flat(shares)) == sorted(alone)
        return [len(share) for share in shares], alone

    everything = [rank(number, None)[1] for number in range(world_size)]
    assert sorted(flat(everything)) == list(range(objects))
    dropped = [rank(number, "drop") for number in range(world_size)]
    assert len({tuple(lengths) for lengths, _ in dropped}) == 1
    kept = flat(share for _, share in dropped)
    assert len(set(kept)) == len(kept) == objects - objects % world_size
    padded = [rank(number, "pad") for number in range(world_size)]
    assert len({tuple(lengths) for lengths, _ in padded}) == 1
    filled_up = flat(share for _, share in padded)
    assert set(filled_up) == set(range(objects))
    assert len(filled_up) == objects + -objects % world_size
