"""Resume of iterable datasets at and near the end of a pass, from every batch. Some datasets reset themselves there."""

import itertools
import pickle

import pytest
import torch

import torchobj
from tests.support.long_tables import often

COUNT, BATCH, PASSES = 11, 2, 3

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")


class Resetting(torch.utils.data.IterableDataset):
    """Resets its own state when a pass ends. Each worker yields every n-th number."""

    def __init__(self):
        self.i = 0

    def numbers(self):
        info = torch.utils.data.get_worker_info()
        return range(0 if info is None else info.id, COUNT, 1 if info is None else info.num_workers)

    def __iter__(self):
        numbers = self.numbers()
        while self.i < len(numbers):
            self.i += 1
            yield numbers[self.i - 1]
        self.i = 0

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


class Uneven(Resetting):
    """Workers end at different times: in mid-epoch, with partial batches, and without samples."""

    def numbers(self):
        info = torch.utils.data.get_worker_info()
        if info is None:
            return range(7)
        return range(100 * info.id, 100 * info.id + [1, 5, 0][info.id])


class Counting(Resetting):
    """Counts its passes; each yields different samples."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def __iter__(self):
        yield from (1000 * self.passes + number for number in super().__iter__())
        self.passes += 1

    def state_dict(self):
        return {"i": self.i, "passes": self.passes}

    def load_state_dict(self, state):
        self.i, self.passes = state["i"], state["passes"]


class Itself(Resetting):
    """A dataset that is its own iterator."""

    def __iter__(self):
        return self

    def __next__(self):
        numbers = self.numbers()
        if self.i == len(numbers):
            self.i = 0
            raise StopIteration
        self.i += 1
        return numbers[self.i - 1]


class Staying(Resetting):
    """Stays at its end; the next pass starts from the beginning."""

    resumed = 0

    def __iter__(self):
        self.i, self.resumed = self.resumed, 0
        numbers = self.numbers()
        while self.i < len(numbers):
            self.i += 1
            yield numbers[self.i - 1]

    def load_state_dict(self, state):
        self.i = self.resumed = state["i"]


class ResettingIterator:
    def __init__(self, numbers):
        self.numbers, self.i = numbers, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i == len(self.numbers):
            self.i = 0
            raise StopIteration
        self.i += 1
        return self.numbers[self.i - 1]

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state):
        self.i = state["i"]


class OfIterators(torch.utils.data.IterableDataset):
    """Has no state; its iterators have one."""

    numbers = Resetting.numbers

    def __iter__(self):
        return ResettingIterator(self.numbers())


def loader_of(kind, workers, **settings):
    number, persistent = abs(workers), workers < 0
    settings = {"batch_size": BATCH} | settings
    return torchobj.DataLoader(kind(), num_workers=number, persistent_workers=persistent, **settings)


def listed(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def passes(loader, count):
    """Returns the batches of each pass, and the states after each batch and each pass."""
    found, states = [], []
    for number in range(count):
        found.append([])
        for batch in loader:
            found[-1].append(listed(batch))
            states.append((number, len(found[-1]), pickle.dumps(loader.state_dict())))
        states.append((number + 1, 0, pickle.dumps(loader.state_dict())))
    return found, states


OTHERS = [Counting, Itself, Staying, OfIterators]


#: Negative numbers stand for persistent workers.
@pytest.mark.parametrize("workers", often(1, [0, -3, 3, 2, -2]))
def test_a_pass_resumed_at_any_batch_equals_an_uninterrupted_run(workers):
    check_every_state(Resetting, workers)


@pytest.mark.parametrize("workers", [-3, pytest.param(0, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", [Uneven, *(pytest.param(kind, marks=pytest.mark.matrix) for kind in OTHERS)])
def test_other_kinds_of_datasets_are_resumed_at_any_batch(kind, workers):
    check_every_state(kind, workers)


@pytest.mark.parametrize("workers", often(1, [0, -2]))
@pytest.mark.parametrize("kind", often(1, [Staying, Counting]))
@pytest.mark.parametrize("settings", [{"drop_last": True, "batch_size": 4}, {"batch_size": None}])
def test_passes_with_drop_last_or_without_batches_are_resumed_at_any_sample(kind, workers, settings):
    check_every_state(kind, workers, **settings)


def check_every_state(kind, workers, **settings):
    whole, states = passes(loader_of(kind, workers, **settings), PASSES)
    assert all(whole)
    for number, batches, state in states:
        # Workers that end with a pass carry nothing over to the next.
        if number >= (1 if workers > 0 else PASSES - 1):
            break
        resumed = loader_of(kind, workers, **settings)
        resumed.load_state_dict(pickle.loads(state))
        found, _ = passes(resumed, 2)
        assert found == [whole[number][batches:], whole[number + 1]], (number, batches)


@pytest.mark.parametrize("workers", often(1, [0, 3, -3]))
def test_a_state_saved_by_a_resumed_loader_can_be_resumed(workers):
    whole, _ = passes(loader_of(Resetting, workers), 2)
    found, state = [], None
    for _ in range(2 * len(whole[0])):
        loader = loader_of(Resetting, workers)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        # A pass with nothing left to yield, and the one after it.
        batch = next(iterator, None)
        batch = next(iter(loader)) if batch is None else batch
        found.append(batch.tolist())
        state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert found == list(itertools.chain(*whole))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_without_the_datasets_state_warns(workers, caplog):
    _, states = passes(loader_of(Staying, workers), 1)
    whole, _ = passes(loader_of(Staying, workers), 1)
    # As before the dataset had a state.
    state = pickle.loads(states[1][2]) | {"sampler": None}
    resumed = loader_of(Staying, workers)
    resumed.load_state_dict(state)
    assert "state of the loader contains no state of Staying" in caplog.text
    assert "2 batches are read again and dropped" in caplog.text
    assert passes(resumed, 1)[0] == [whole[0][2:]]
