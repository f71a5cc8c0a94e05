"""The shuffle buffer returns each item once, in an order that a seed and a saved position determine."""

import pytest

from torchobj.datasets.containers.shuffle_buffer import ShuffleBuffer


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1000])
def test_every_item_is_returned_once_in_an_order_of_the_seed(size):
    items = range(100)
    drawn = list(ShuffleBuffer(iter(items), size, [3, 1]))
    assert sorted(drawn) == list(items)
    assert drawn == list(ShuffleBuffer(iter(items), size, [3, 1]))
    assert (drawn == list(items)) is (size == 1)
    assert (drawn == list(ShuffleBuffer(iter(items), size, [3, 2]))) is (size == 1)
    # An item is returned no earlier than it can be in the buffer.
    assert all(item < position + size for position, item in enumerate(drawn))


@pytest.mark.parametrize("done", [0, 1, 49, 93, 99, 100])
def test_a_buffer_of_the_same_draws_and_items_continues_the_order(done):
    items = iter(range(100))
    first = ShuffleBuffer(items, 8, [5])
    drawn = [next(first) for _ in range(done)]
    position, held = first.draws, tuple(first.held)
    read = len(drawn) + len(held)
    resumed = ShuffleBuffer(iter(range(read, 100)), 8, [5], position, held)
    assert drawn + list(resumed) == list(ShuffleBuffer(iter(range(100)), 8, [5]))
