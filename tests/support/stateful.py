"""Datasets, samplers and steps for tests that compare our loader's states with torchdata's StatefulDataLoader."""

import contextlib
import itertools
import pickle

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import torchobj

#: Both have state_dict and load_state_dict with the same meaning.
LOADERS = [torchobj.DataLoader, StatefulDataLoader]


class Cursor:
    """An iterator over a sequence, with a state; `draws` adds a number of torch's default generator to each element."""

    def __init__(self, elements, *, draws=False):
        self.elements, self.draws, self.done = elements, draws, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.done == len(self.elements):
            raise StopIteration
        self.done += 1
        element = self.elements[self.done - 1]
        return element + 1000 * int(torch.randint(1_000_000, ())) if self.draws else element

    def state_dict(self):
        return {"done": self.done} | ({"rng": torch.get_rng_state()} if self.draws else {})

    def load_state_dict(self, state):
        self.done = state["done"]
        if self.draws:
            torch.set_rng_state(state["rng"])


class Sharded(IterableDataset):
    """Numbers without a state; worker `w` has `sizes[w]` of them, and a loop without workers has all of them."""

    def __init__(self, sizes):
        self.sizes = sizes

    def numbers(self):
        info = get_worker_info()
        if info is None:
            return range(sum(self.sizes))
        start = sum(self.sizes[: info.id])
        return range(start, start + self.sizes[info.id])

    def __iter__(self):
        yield from self.numbers()


class ShardedWithState(Sharded):
    """Like `Sharded`; the dataset has the state."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.done, self.resumed = 0, None

    def __iter__(self):
        self.done, self.resumed = self.resumed or 0, None
        for number in self.numbers()[self.done :]:
            self.done += 1
            yield number

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.resumed = state["done"]


class ShardedWithIterators(Sharded):
    """Like `Sharded`; its iterators have the state."""

    def __iter__(self):
        return Cursor(self.numbers())


class ShardedAndDrawn(Sharded):
    """Like `ShardedWithIterators`, with random numbers; the iterators' state includes the generator's."""

    def __iter__(self):
        return Cursor(self.numbers(), draws=True)


class ItsOwnIterator(Cursor, IterableDataset):
    """A dataset that is its own iterator; each worker yields all numbers."""

    def __init__(self, sizes):
        super().__init__(range(sum(sizes)))
        self.resumed = None

    def __iter__(self):
        self.done, self.resumed = self.resumed or 0, None
        return self

    def load_state_dict(self, state):
        self.done = self.resumed = state["done"]


class Records(Dataset):
    """A map dataset of dicts with a number, a text and a list."""

    def __init__(self, count=50):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"id": index, "text": f"text {index}", "list": [index, index + 1]}


class SteppedSampler(Sampler):
    """Numbers in steps of 7, without a state."""

    def __init__(self, count):
        self.count = count

    def order(self):
        return [7 * number % self.count for number in range(self.count)]

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(self.order())


class SamplerWithIterators(SteppedSampler):
    """Like `SteppedSampler`; its iterators have the state."""

    def __iter__(self):
        return Cursor(self.order())


class SamplerWithState(SteppedSampler):
    """Like `SteppedSampler`; the sampler has the state."""

    def __init__(self, count):
        super().__init__(count)
        self.done, self.resumed = 0, None

    def __iter__(self):
        self.done, self.resumed = self.resumed or 0, None
        for index in self.order()[self.done :]:
            self.done += 1
            yield index

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.resumed = self.done = state["done"]


class BatchesWithState(SamplerWithState):
    """A batch sampler with a state whose batches grow."""

    def order(self):
        indices = iter(range(self.count))
        sizes = itertools.cycle([1, 2, 3])
        return list(iter(lambda: list(itertools.islice(indices, next(sizes))), []))

    def __len__(self):
        return len(self.order())


class BatchesWithIterators(BatchesWithState):
    """Like `BatchesWithState`; its iterators have the state."""

    state_dict = load_state_dict = None

    def __iter__(self):
        return Cursor(self.order())


def same(samples):
    """A collate_fn that returns the samples unchanged."""
    return samples


def listed(loader):
    """Returns the batches of a pass."""
    return list(map(plain, loader))


def plain(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def taken(loader, count):
    """Takes `count` batches; returns them, the iterator, and the state after them as another process receives it."""
    iterator = iter(loader)
    batches = [plain(next(iterator)) for _ in range(count)]
    return batches, iterator, pickle.loads(pickle.dumps(loader.state_dict()))


def after(make, done, epochs=2):
    """Resumes a new loader after batch number `done` of another; returns the remaining batches and whole epochs."""
    _, iterator, state = taken(make(), done)
    with contextlib.suppress(AttributeError):
        iterator._shutdown_workers()
    resumed = make()
    resumed.load_state_dict(state)
    return [listed(resumed) for _ in range(epochs)]
