"""Resume in mid-epoch of loaders over iterable datasets with a state, with and without workers."""

import itertools
import pickle

import pytest
import torch

import torchobj
from tests.support.long_tables import often
from torchobj.exceptions import ConfigError

pytestmark = pytest.mark.providers("s3", "gs")

COUNT = 40


class Plain(torch.utils.data.IterableDataset):
    """Numbers; each worker yields every n-th of them."""

    def __init__(self, count=COUNT):
        self.count = count

    def numbers(self):
        info = torch.utils.data.get_worker_info()
        return range(0 if info is None else info.id, self.count, 1 if info is None else info.num_workers)

    def __iter__(self):
        return iter(self.numbers())


class Stateful(Plain):
    """Like `Plain`, with its own state. A resumed pass starts at the state's position."""

    def __init__(self, count=COUNT):
        super().__init__(count)
        self.done, self.resumed = 0, None

    def __iter__(self):
        begin, self.resumed = self.resumed or 0, None
        self.done = begin
        for number in self.numbers()[begin:]:
            self.done += 1
            yield number

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.resumed = self.done = state["done"]


class OnceOnly(Stateful):
    """Samples that cannot be read twice: reading them again would find none."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def numbers(self):
        return self.source


class Uneven(Stateful):
    """Of three workers the first ends after one batch, and the second after two."""

    def numbers(self):
        worker = torch.utils.data.get_worker_info().id
        return [worker * 100 + number for number in range([3, 6, 20][worker])]


class Iterator:
    def __init__(self, numbers):
        self.numbers, self.done = numbers, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.done == len(self.numbers):
            raise StopIteration
        self.done += 1
        return self.numbers[self.done - 1]

    def state_dict(self):
        return {"done": self.done, "seen": torch.tensor([self.done])}

    def load_state_dict(self, state):
        assert state["seen"].tolist() == [state["done"]]
        self.done = state["done"]


class OfIterators(Plain):
    """A dataset whose iterators have the state."""

    def __iter__(self):
        return Iterator(self.numbers())


class Itself(Stateful):
    """A dataset that is its own iterator."""

    def __iter__(self):
        self.done, self.resumed = self.resumed or 0, None
        return self

    def __next__(self):
        numbers = self.numbers()
        if self.done == len(numbers):
            raise StopIteration
        self.done += 1
        return numbers[self.done - 1]


class Rounds(Stateful):
    """Each pass yields different samples."""

    def __init__(self):
        super().__init__()
        self.round = 0

    def __iter__(self):
        begin, self.resumed = self.resumed, None
        if begin is None:
            self.round, begin = self.round + 1, 0
        self.done = begin
        for number in self.numbers()[begin:]:
            self.done += 1
            yield number + 1000 * self.round

    def state_dict(self):
        return {"done": self.done, "round": self.round}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.round = state["round"]


def listed(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def loader_of(dataset, workers, **settings):
    settings = {"batch_size": 3, "persistent_workers": workers == "persistent"} | settings
    return torchobj.DataLoader(dataset, num_workers=2 if workers == "persistent" else workers, **settings)


def run(loader, *stops):
    """Returns the batches of a pass, and the states after the batches with the numbers `stops` and after the last."""
    found, states = [], []
    for number, batch in enumerate(loader, 1):
        found.append(listed(batch))
        if number in stops:
            states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    return found, [*states, loader.state_dict()]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *itertools.product([Plain, Stateful, OfIterators, Itself], [0]),
        *often(3, [(Stateful, 2), (Itself, "persistent"), (OfIterators, 2), (Plain, 2), (Itself, 2)]),
        *often(0, itertools.product([Plain, Stateful, OfIterators], ["persistent"])),
    ],
)
def test_a_pass_continues_after_the_last_returned_batch(kind, workers):
    stops = (1, 4, 7)
    whole, (*middle, end) = run(loader_of(kind(), workers), *stops)
    for stop, state in zip(stops, middle, strict=True):
        resumed = loader_of(kind(), workers)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert run(resumed)[0] == whole[stop:]
    # Later passes are complete, and so is the one after the end.
    assert run(resumed)[0] == whole
    resumed = loader_of(kind(), workers)
    resumed.load_state_dict(end)
    assert run(resumed)[0] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_with_a_state_is_not_read_again(workers, caplog):
    # Samples that were returned no longer exist.
    gone, numbers = 6 if workers else 3, list(range(COUNT))
    loader = loader_of(OnceOnly(numbers), workers, prefetch_factor=4 if workers else None)
    iterator = iter(loader)
    seen = [next(iterator) for _ in range(2 if workers else 1)]
    state, rest = loader.state_dict(), [listed(batch) for batch in iterator]
    assert sum(map(len, seen)) == gone
    resumed = loader_of(OnceOnly([None] * 3 + numbers[3:]), workers)
    resumed.load_state_dict(state)
    assert [listed(batch) for batch in resumed] == rest
    assert "read again" not in caplog.text


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(
    ("order", "stops"),
    [
        ({}, (1, 2, 3, 5, 8)),
        ({"in_order": False}, (2, 5)),
        pytest.param({"in_order": False}, (1, 3, 8), marks=pytest.mark.matrix),
    ],
)
def test_workers_that_ended_early_do_not_change_the_order_of_the_rest(order, stops):
    whole, (*states, _) = run(loader_of(Uneven(), 3), *stops)
    for stop, state in zip(stops, states, strict=True):
        resumed = loader_of(Uneven(), 3, **order)
        resumed.load_state_dict(state)
        rest = run(resumed)[0]
        if order:
            rest.sort()
            assert rest == sorted(whole[stop:])
        else:
            assert rest == whole[stop:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 1, 7])
def test_samples_without_batches_and_odd_last_batches(size, workers):
    for settings in [{}, {"drop_last": True}] if size else [{}]:
        whole, (state, _) = run(loader_of(Stateful(), workers, batch_size=size, **settings), 3)
        resumed = loader_of(Stateful(), workers, batch_size=size, **settings)
        resumed.load_state_dict(state)
        assert run(resumed)[0] == whole[3:]


@pytest.mark.parametrize("workers", [0, "persistent"])
def test_the_state_has_what_a_dataset_carries_from_pass_to_pass(workers):
    loader = loader_of(Rounds(), workers)
    first, (_, end) = run(loader, 1)
    second, (middle, _) = run(loader, 4)
    third, _ = run(loader, 1)
    assert len({str(each) for each in (first, second, third)}) == 3
    for state, expected in [(end, [second, third]), (middle, [second[4:], third])]:
        resumed = loader_of(Rounds(), workers)
        resumed.load_state_dict(state)
        assert [run(resumed)[0] for _ in expected] == expected


@pytest.mark.parametrize("workers", often(2, [0, "persistent", 2]))
def test_a_state_is_saved_and_resumed_repeatedly(workers):
    whole, _ = run(loader_of(Stateful(), workers))
    found, state = [], None
    while len(found) < len(whole):
        loader = loader_of(Stateful(), workers)
        if state is not None:
            loader.load_state_dict(state)
            # Some loops create an iterator that they never use.
            iter(loader)
        for _, batch in zip(range(3), loader, strict=False):
            found.append(batch.tolist())
            state = loader.state_dict()
    assert found == whole


def test_a_state_is_loaded_into_a_loader_with_persistent_workers():
    loader = loader_of(Stateful(), "persistent")
    whole, (state, _) = run(loader, 5)
    for _ in range(2):
        loader.load_state_dict(state)
        assert run(loader)[0] == whole[5:]
    assert run(loader)[0] == whole


@pytest.mark.parametrize("count", [0, 5, 12, 13])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_ends_before_the_resumed_position_is_an_error(count, workers):
    loader = loader_of(Plain(), workers)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    resumed = loader_of(Plain(count), workers)
    resumed.load_state_dict(state)
    if count < 12:
        with pytest.raises(ConfigError, match="batches=4: in the state; the iterable dataset now ends after"):
            next(iter(resumed))
        # The next pass starts from the beginning.
        assert len(list(resumed)) == -(-count // 3) if workers == 0 else True
    else:
        assert sum(len(batch) for batch in resumed) == count - 12


def test_a_sampler_that_ends_before_the_resumed_position_is_an_error():
    class Shrinking(torch.utils.data.Sampler):
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            return iter(range(self.count))

    loader = torchobj.DataLoader(range(COUNT), batch_size=3, sampler=Shrinking(COUNT), lookahead=0)
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = torchobj.DataLoader(range(COUNT), batch_size=3, sampler=Shrinking(3), lookahead=0)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="batches=2: in the state; the order of Shrinking now ends after 1"):
        next(iter(resumed))


def first_of_the_worker(worker):
    # A common way to give each worker a part: `dataset` must be the user's own.
    torch.utils.data.get_worker_info().dataset.count = 10 * (worker + 1)


def test_worker_init_fn_sees_the_users_dataset():
    loader = loader_of(Stateful(), 2, worker_init_fn=first_of_the_worker)
    assert sum(map(len, loader)) == 15


def test_invalid_states_are_refused_with_the_name_of_their_field():
    loader = loader_of(Stateful(), 2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for changed, dataset, named in [
        ({}, Plain(), "a Plain has no state_dict"),
        ({"num_workers": 3}, Stateful(), "num_workers=3"),
        ({"batch_size": 4}, Stateful(), "batch_size=4"),
        ({"sampler": b"no archive"}, Stateful(), "sampler: 10 bytes of the state cannot be read"),
        ({"sampler": {"workers": 3}}, Stateful(), "sampler="),
        ({"sampler": 5}, Stateful(), "sampler=5"),
        (
            {"sampler": {"workers": [None], "last_worker": 0, "dataset": None}},
            Stateful(),
            "sampler: contains the states of 1",
        ),
    ]:
        with pytest.raises(ConfigError, match=named):
            loader_of(dataset, 2).load_state_dict(state | changed)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_iterators_is_refused_by_iterators_without_one(workers):
    loader = loader_of(OfIterators(), workers)
    iterator = iter(loader)
    next(iterator)
    other = loader_of(Plain(), workers)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ConfigError, match="a range_iterator has no state_dict"):
        next(iter(other))


class Counting(torch.utils.data.IterableDataset):
    """Counts its passes when an iterator is created, which a resumed loop must not do once more."""

    def __init__(self):
        self.passes = self.at = 0

    def __iter__(self):
        if self.at in (0, 10):
            self.passes, self.at = self.passes + 1, 0
        return self

    def __next__(self):
        if self.at == 10:
            raise StopIteration
        self.at += 1
        return self.passes * 100 + self.at

    def state_dict(self):
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state):
        self.passes, self.at = state["passes"], state["at"]


def test_the_end_of_a_pass_starts_no_other_one():
    def two_passes(loader):
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    loader = torchobj.DataLoader(Counting(), batch_size=4)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    expected = [[batch.tolist() for batch in iterator], [batch.tolist() for batch in loader]]
    resumed = torchobj.DataLoader(Counting(), batch_size=4)
    resumed.load_state_dict(state)
    assert two_passes(resumed) == expected


class Unpicklable(Stateful):
    def state_dict(self):
        return {"done": lambda: None}


class Unfinished(Stateful):
    def state_dict(self):
        raise NotImplementedError("not in this version")


class UnfinishedIterators(OfIterators):
    def __iter__(self):
        iterator = super().__iter__()
        iterator.state_dict = Unfinished().state_dict
        return iterator


@pytest.mark.parametrize("workers", [0, 1, "persistent"])
@pytest.mark.parametrize(
    ("kind", "said"), [(Unpicklable, "pickle"), (Unfinished, "not in this version"), (UnfinishedIterators, "not in th")]
)
def test_a_state_that_cannot_be_taken_is_the_error_of_who_requests_it(kind, said, workers):
    loader, stock = loader_of(kind(), workers), torch.utils.data.DataLoader(kind(), 3, num_workers=int(workers != 0))
    iterator = iter(loader)
    first = next(iterator)
    if not (kind is Unpicklable and workers == 0):
        with pytest.raises((torchobj.TorchobjError, NotImplementedError), match=said):
            loader.state_dict()
    assert [listed(first), *map(listed, iterator)] == list(map(listed, stock)) or workers == "persistent"
    # The next epoch too.
    assert len(list(loader)) > 1
