"""How far a loader draws its sampler ahead."""

import array
import collections
import itertools
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import torchobj
from torchobj.loader import lookahead as lookahead_module

COUNT = 64


@pytest.fixture
def folder(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(b"body")
    return tmp_path


def dataset(folder):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=bytes)


class Counted(torch.utils.data.SequentialSampler):
    """Records the indices that were drawn."""

    def __init__(self, data):
        super().__init__(data)
        self.drawn = []

    def __iter__(self):
        for index in super().__iter__():
            self.drawn.append(index)
            yield index


@pytest.mark.parametrize("lookahead", [1, 3])
def test_no_more_than_lookahead_batches_are_drawn_ahead(folder, lookahead, monkeypatch):
    # Drawing takes no time; otherwise it ends earlier.
    monkeypatch.setattr(lookahead_module.time, "perf_counter", lambda: 0.0)
    sampler = Counted(range(COUNT))
    loader = torchobj.DataLoader(dataset(folder), batch_size=1, sampler=sampler, lookahead=lookahead, collate_fn=list)
    for number, _ in enumerate(loader):
        assert len(sampler.drawn) == min(COUNT, number + 1 + lookahead)


def test_a_slow_sampler_gets_ahead(folder, monkeypatch):
    # 5 ms for each index, and 30 ms for each step of the loop.
    now = 0.0

    class Slow(Counted):
        def __iter__(self):
            nonlocal now
            for index in super().__iter__():
                now += 0.005
                yield index

    monkeypatch.setattr(lookahead_module.time, "perf_counter", lambda: now)
    sampler = Slow(range(COUNT))
    loader = torchobj.DataLoader(dataset(folder), batch_size=1, sampler=sampler, lookahead=COUNT, collate_fn=list)
    for number, _ in zip(range(10), loader, strict=False):
        assert len(sampler.drawn) >= min(COUNT, 2 * (number + 1))
        now += 0.03


def test_no_index_is_drawn_before_the_first_batch_is_requested(folder):
    sampler = Counted(range(COUNT))
    loader = torchobj.DataLoader(dataset(folder), batch_size=4, sampler=sampler, lookahead=2)
    iter(loader)
    assert sampler.drawn == []


class Numbers(list):
    """A user's list."""

    label = "a user's"


class Pair(NamedTuple):
    first: Any
    second: Any


def numbers_of(first, second):
    found = Numbers([first, second])
    found.label = "kept"
    return found


#: Creates an item with two numbers that can be replaced in it.
ITEMS = {
    "list": lambda first, second: [first, second],
    "list of a user": numbers_of,
    "array": lambda first, second: np.array([first, second]),
    "tensor": lambda first, second: torch.tensor([first, second]),
    "array.array": lambda first, second: array.array("q", [first, second]),
    "deque": lambda first, second: collections.deque([first, second]),
    "tensors": lambda first, second: [torch.tensor(first), torch.tensor(second)],
    "tuple": lambda first, second: (torch.tensor(first), torch.tensor(second)),
    "named tuple": lambda first, second: Pair(torch.tensor(first), torch.tensor(second)),
}


class Refilled(torch.utils.data.Sampler):
    """Yields one item again and again, with other numbers in it."""

    def __init__(self, make):
        self.item = make(0, 0)

    def __iter__(self):
        for start in range(0, COUNT // 2, 2):
            for place in range(2):
                part = self.item[place]
                if isinstance(part, torch.Tensor):
                    part.fill_(start + place)
                else:
                    self.item[place] = start + place
            yield self.item


def refilled(data, make, **settings):
    return torch.utils.data.DataLoader(data, batch_sampler=Refilled(make), **settings)


#: Loaders that draw ahead.
AHEAD = {
    "attached": lambda data, make: torchobj.attach(refilled(data, make)),
    "attached, 4 ahead": lambda data, make: torchobj.attach(refilled(data, make), lookahead=4),
    "attached, with a worker": lambda data, make: torchobj.attach(refilled(data, make, num_workers=1)),
    "torchobj's": lambda data, make: torchobj.DataLoader(data, batch_sampler=Refilled(make), lookahead=4),
}


@pytest.fixture
def numbers(tmp_path):
    for number in range(COUNT):
        (tmp_path / f"k{number:02}").write_bytes(bytes([number]))
    return torchobj.ObjectMapDataset(f"file://{tmp_path}/", transform=lambda reader: reader.read()[0])


@pytest.mark.parametrize(
    ("ahead", "item"),
    [
        *((ahead, "list") for ahead in AHEAD),
        *(("attached", item) for item in ITEMS if item != "list"),
        *(pytest.param(*each, marks=pytest.mark.matrix) for each in itertools.product(AHEAD, ITEMS)),
    ],
)
def test_a_batch_sampler_may_refill_its_batch(numbers, ahead, item):
    found = [batch.tolist() for batch in AHEAD[ahead](numbers, ITEMS[item])]
    assert found == [[start, start + 1] for start in range(0, COUNT // 2, 2)]


def test_a_sampler_may_refill_its_index(numbers):
    class Indices(torch.utils.data.Sampler):
        def __iter__(self):
            index = torch.zeros((), dtype=torch.int64)
            for number in range(0, COUNT, 3):
                yield index.fill_(number)

    for loader in (
        torchobj.attach(torch.utils.data.DataLoader(numbers, batch_size=None, sampler=Indices())),
        torchobj.DataLoader(numbers, batch_size=None, sampler=Indices(), lookahead=7),
    ):
        assert list(loader) == list(range(0, COUNT, 3))


@pytest.mark.parametrize(
    "item",
    [
        *(make(3, 4) for make in ITEMS.values()),
        {"a": [1, 2], "b": 3},
        ([1, 2], "name"),
        [[1], [2, [3]]],
        {1, 2},
        bytearray(b"ab"),
        np.array(7),
    ],
    ids=lambda item: type(item).__name__,
)
def test_a_kept_item_has_the_type_and_values_of_the_item_and_shares_nothing_with_it(item):
    before = pickle.dumps(item)
    kept = lookahead_module.kept(item)
    assert type(kept) is type(item)
    assert getattr(kept, "label", None) == getattr(item, "label", None)
    for place, part in enumerate(item) if isinstance(item, (tuple, list)) else ():
        assert isinstance(part, (int, str)) or kept[place] is not part
    assert kept is not item
    assert pickle.dumps(item) == before
    assert str(kept) == str(item)


def test_an_item_that_cannot_change_is_not_copied():
    for item in (5, "name", (1, "a"), frozenset((1, 2)), np.int64(3), object(), range(3)):
        assert lookahead_module.kept(item) is item
