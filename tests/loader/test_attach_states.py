"""States of loaders of other libraries that are attached when they are saved, when they are loaded, or both."""

import copy
import itertools

import pytest
import torch
import torchdata.stateful_dataloader.sampler as torchdata_sampler
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import torchobj
from tests.support.orders import Eager, Stateful
from tests.support.stateful import (
    BatchesWithIterators,
    BatchesWithState,
    Cursor,
    SamplerWithIterators,
    SamplerWithState,
    SteppedSampler,
    listed,
)

pytestmark = [pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"), pytest.mark.timeout(120)]

COUNT = 11


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    for number in range(60):
        (folder / f"k{number:02}").write_bytes(bytes([number]))
    return folder


def number_of(reader):
    return reader.read()[0]


def records(folder, count=COUNT):
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=number_of)
    return torch.utils.data.Subset(data, range(count))


def generator():
    return torch.Generator().manual_seed(7)


class BothWithState(SamplerWithState):
    """A sampler with a state, whose iterators have one too."""

    def __iter__(self):
        self.done, self.resumed = self.resumed or 0, None
        order = Cursor(self.order())
        order.done = self.done
        return order


class EndsWithReset(SamplerWithState):
    """Counts its passes, and moves to the start of the next one at the end of a pass."""

    passes = 0

    def __iter__(self):
        yield from (index + 0 * self.passes for index in super().__iter__())
        self.done, self.passes = 0, self.passes + 1

    def state_dict(self):
        return {"done": self.done, "passes": self.passes}


class RefilledBatches(SteppedSampler):
    """Refills one list."""

    def __iter__(self):
        batch = []
        for start in range(0, self.count, 2):
            batch[:] = self.order()[start : start + 2]
            yield batch

    def __len__(self):
        return (self.count + 1) // 2


def elastic(data):
    return torchobj.ElasticDistributedSampler(data, 2, 1, seed=5)


#: Settings of a loader by the dataset.
KINDS = {
    "in order": lambda _: {"batch_size": 2},
    "shuffled": lambda _: {"batch_size": 2, "shuffle": True},
    "shuffled with a generator": lambda _: {"batch_size": 2, "shuffle": True, "generator": generator()},
    "elastic": lambda data: {"batch_size": 2, "sampler": elastic(data)},
    "with a state": lambda _: {"batch_size": 2, "sampler": SamplerWithState(COUNT)},
    "batches without a state": lambda _: {"batch_sampler": BatchSampler(SteppedSampler(COUNT), 2, drop_last=False)},
    "RandomSampler": lambda data: {"batch_size": 2, "sampler": RandomSampler(data)},
    "RandomSampler with a generator": lambda data: {"batch_size": 2, "sampler": RandomSampler(data, generator=generator())},
    "SubsetRandomSampler": lambda _: {"batch_size": 2, "sampler": SubsetRandomSampler(range(1, 9))},
    "drop_last": lambda _: {"batch_size": 3, "drop_last": True},
    "distributed": lambda data: {"batch_size": 2, "sampler": DistributedSampler(data, 2, 1, seed=3)},
    "torchdata's random": lambda data: {"batch_size": 2, "sampler": torchdata_sampler.RandomSampler(data, generator=generator())},
    "torchdata's distributed": lambda data: {
        "batch_size": 2,
        "sampler": torchdata_sampler.StatefulDistributedSampler(data, 2, 0, seed=3),
    },
    "without a state": lambda _: {"batch_size": 2, "sampler": SteppedSampler(COUNT)},
    "iterators with a state": lambda _: {"batch_size": 2, "sampler": SamplerWithIterators(COUNT)},
    "both with a state": lambda _: {"batch_size": 2, "sampler": BothWithState(COUNT)},
    "a state that ends with a reset": lambda _: {"batch_size": 2, "sampler": EndsWithReset(COUNT)},
    "a state that goes on": lambda _: {"batch_size": 8, "sampler": Stateful()},
    "drawn at once": lambda _: {"batch_size": 8, "sampler": Eager()},
    "batches of a random sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 2, drop_last=False)},
    "batches of an elastic sampler": lambda data: {"batch_sampler": BatchSampler(elastic(data), 2, drop_last=False)},
    "batches of a sampler with a state": lambda _: {"batch_sampler": BatchSampler(SamplerWithState(COUNT), 2, drop_last=True)},
    "batches with a state": lambda _: {"batch_sampler": BatchesWithState(COUNT)},
    "batches whose iterators have a state": lambda _: {"batch_sampler": BatchesWithIterators(COUNT)},
    "batches in both": lambda _: {
        "batch_sampler": torchdata_sampler.BatchSampler(BothWithState(COUNT), 2, drop_last=False)
    },
    "refilled batches": lambda _: {"batch_sampler": RefilledBatches(COUNT)},
    "list of batches": lambda _: {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7], [8, 9]]},
    "torchobj's batches": lambda data: {"batch_sampler": torchobj.LookaheadBatchSampler(RandomSampler(data), 2)},
    "torchobj's batches of an elastic sampler": lambda data: {
        "batch_sampler": torchobj.LookaheadBatchSampler(elastic(data), 2)
    },
    "no batches": lambda _: {"batch_size": None},
    "no batches, elastic": lambda data: {"batch_size": None, "sampler": elastic(data)},
    "no batches, with a state": lambda _: {"batch_size": None, "sampler": BothWithState(COUNT)},
    "no batches, iterators with a state": lambda data: {"batch_size": None, "sampler": torchdata_sampler.RandomSampler(data)},
}  # fmt: skip
#: These are in `make test`.
OFTEN = list(KINDS)[:6]
#: Of sixty samples.
LONG = ("a state that goes on", "drawn at once")


def torchdata_loader(data, workers, settings):
    return StatefulDataLoader(data, num_workers=workers, **settings)


def prepared(data, workers, settings, **arguments):
    loader = torch.utils.data.DataLoader(data, num_workers=workers, **settings)
    return prepare_data_loader(loader, put_on_device=False, use_stateful_dataloader=True, **arguments)


def prepared_of_two_ranks(data, workers, settings):
    return prepared(data, workers, settings, num_processes=2, process_index=1)


def prepared_persistent(data, workers, settings):
    return prepared(data, workers, settings | {"persistent_workers": workers > 0})


LIBRARIES = {
    "torchdata": torchdata_loader,
    "Accelerate": prepared,
    "Accelerate of two ranks": prepared_of_two_ranks,
    "Accelerate with persistent workers": prepared_persistent,
}
#: Before the first pass, before its first batch, after two batches, after the last one, after the end, in the next epoch.
POINTS = ("new", "begun", 2, "last", "end", (1, 2))


def state_at(loader, point):
    """The state of a loader at a point of its passes."""
    epoch, batches = point if isinstance(point, tuple) else (0, point)
    for number in range(epoch):
        begin_epoch(loader, number)
        list(loader)
    begin_epoch(loader, epoch)
    if point != "new":
        iterator = iter(loader)
        if batches == "end":
            list(iterator)
        elif batches != "begun":
            for _ in range(len(loader) if batches == "last" else batches):
                next(iterator)
    # Later batches do not change it.
    return copy.deepcopy(loader.state_dict())


def begin_epoch(loader, epoch):
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def passes_after(loader, state, epoch, count=2):
    """The batches of the rest of a pass, and of the following ones."""
    torch.manual_seed(11)
    loader.load_state_dict(state)
    found = []
    for number in range(epoch, epoch + count):
        begin_epoch(loader, number)
        found.append(listed(loader))
    return found


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def cases():
    for library, kind, workers in itertools.product(LIBRARIES, KINDS, (0, 1)):
        if library == "torchdata" or "no batches" not in kind:
            yield pytest.param(library, kind, workers, POINTS, marks=pytest.mark.matrix)
    for number, kind in enumerate(OFTEN):
        yield "torchdata", kind, 0, POINTS
        yield "Accelerate", kind, number % 2, (2,)


@pytest.mark.parametrize(("library", "kind", "workers", "points"), list(cases()))
def test_a_state_gives_the_samples_of_plain_loaders_whichever_loader_is_attached(
    folder, library, kind, workers, points
):
    def make(*, attached):
        data = records(folder, 60 if kind in LONG else COUNT)
        torch.manual_seed(11)
        loader = LIBRARIES[library](data, workers, KINDS[kind](data))
        return torchobj.attach(loader) if attached else loader

    for point in points:
        epoch = point[0] if isinstance(point, tuple) else 0
        plain = state_at(make(attached=False), point)
        expected = passes_after(make(attached=False), copy.deepcopy(plain), epoch)
        attached = state_at(make(attached=True), point)
        assert same(without_seed(attached), without_seed(plain)), point
        for state, loaded in ((plain, True), (attached, False), (attached, True)):
            found = passes_after(make(attached=loaded), copy.deepcopy(state), epoch)
            assert found == expected, (point, state is attached, loaded)


def without_seed(state):
    """A state without the random number that a loader draws for its workers."""
    if not isinstance(state, dict):
        return state
    return {key: without_seed(value) for key, value in state.items() if key != "_base_seed"}
