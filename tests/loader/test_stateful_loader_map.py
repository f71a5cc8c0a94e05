"""The guarantees of torchdata's StatefulDataLoader for map datasets, checked on ours and against torchdata."""

import functools
import itertools

import pytest
import torch
import torchdata.stateful_dataloader.sampler as theirs_of
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

import torchobj
from tests.support.stateful import (
    LOADERS,
    BatchesWithIterators,
    BatchesWithState,
    Records,
    SamplerWithIterators,
    SamplerWithState,
    SteppedSampler,
    after,
    listed,
    same,
    taken,
)
from torchobj.exceptions import ConfigError

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

COUNT = 50


def seeded(seed=13):
    return torch.Generator().manual_seed(seed)


def distributed(sampler, **settings):
    return sampler(Records(), num_replicas=2, rank=1, seed=5, **settings)


#: Creates settings that have the same meaning for our loader and torchdata's.
KINDS = {
    "in order": lambda: {"batch_size": 4},
    "drop_last": lambda: {"batch_size": 7, "drop_last": True},
    "no batches": lambda: {"batch_size": None},
    "sampler without a state": lambda: {"batch_size": 4, "sampler": SteppedSampler(COUNT)},
    "sampler with a state": lambda: {"batch_size": 4, "sampler": SamplerWithState(COUNT)},
    "sampler's iterator with a state": lambda: {"batch_size": 4, "sampler": SamplerWithIterators(COUNT)},
    "no batches, sampler with a state": lambda: {"batch_size": None, "sampler": SamplerWithState(COUNT)},
    "no batches, iterator with a state": lambda: {"batch_size": None, "sampler": SamplerWithIterators(COUNT)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(SteppedSampler(COUNT), 4, drop_last=True)},
    "batch sampler with a state": lambda: {"batch_sampler": BatchesWithState(COUNT)},
    "batch sampler's iterator with a state": lambda: {"batch_sampler": BatchesWithIterators(COUNT)},
    "list of batches": lambda: {"batch_sampler": [[1, 2], [30], [4, 5, 6], [7], [8, 9]]},
    "distributed": lambda: {"batch_size": 4, "sampler": distributed(DistributedSampler)},
    "torchdata's distributed": lambda: {
        "batch_size": 4,
        "sampler": distributed(theirs_of.StatefulDistributedSampler, drop_last=True),
    },
    "torchdata's batches": lambda: {
        "batch_sampler": theirs_of.BatchSampler(SamplerWithIterators(COUNT), 4, drop_last=False)
    },
    "torchdata's random": lambda: {
        "batch_size": 4,
        "sampler": theirs_of.RandomSampler(Records(), generator=seeded()),
        "generator": seeded(1),
    },
}


def loader_of(loader, kind, workers=0, **settings):
    persistent = workers == "persistent"
    settings = KINDS[kind]() | {"collate_fn": same} | settings
    return loader(Records(), num_workers=2 if persistent else workers, persistent_workers=persistent, **settings)


def first_pass(loader, kind, workers=0):
    return listed(loader_of(loader, kind, workers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_without_workers_resumes_at_every_position_as_in_torchdata(kind):
    ours, theirs = (functools.partial(loader_of, loader, kind) for loader in LOADERS)
    whole = listed(ours())
    assert whole == listed(theirs())
    for done in range(min(20, len(whole))):
        rest = after(ours, done, epochs=1)
        assert rest == [whole[done:]]
        assert after(theirs, done, epochs=1) == rest


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "no batches" not in kind and kind != "in order"])
def test_a_pass_with_workers_resumes_as_in_torchdata(kind):
    for loader in LOADERS:
        make = functools.partial(loader_of, loader, kind, 2)
        assert after(make, 3, epochs=1) == [first_pass(loader, kind, 2)[3:]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "random" not in kind])
def test_passes_after_a_resume_and_after_a_state_of_the_end_are_complete(kind):
    make = functools.partial(loader_of, torchobj.DataLoader, kind)
    loader = make()
    whole = listed(loader)
    end = loader.state_dict()
    assert after(make, 2, epochs=3) == [whole[2:], whole, whole]
    # A loader at another position starts at the state's position.
    other = make()
    taken(other, 3)
    other.load_state_dict(end)
    assert [listed(other), listed(other)] == [whole, whole]


@pytest.mark.parametrize(("saved_with", "resumed_with"), [(0, 2), (2, 0), (3, 1)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_a_pass_of_a_map_dataset_continues_with_another_number_of_workers(saved_with, resumed_with):
    # torchdata refuses this with an AssertionError: its state has what each worker's dataset returned. Ours is that of
    # the order alone.
    for kind in ("sampler with a state", "distributed"):
        whole = first_pass(torchobj.DataLoader, kind)
        _, _, state = taken(loader_of(torchobj.DataLoader, kind, saved_with), 3)
        resumed = loader_of(torchobj.DataLoader, kind, resumed_with)
        resumed.load_state_dict(state)
        assert listed(resumed) == whole[3:]


# Random numbers. torchdata's RandomSampler draws another order of the same seed than torch's, and has a generator of
# its own where it was given none. Ours is torch's order, from torch's default generator then.


def shuffled(workers=0, **settings):
    return torchobj.DataLoader(
        Records(), 4, shuffle=True, collate_fn=same, num_workers=workers, **{"generator": seeded()} | settings
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_run_equals_torchs_after_a_resume_at_any_position_of_any_epoch(workers):
    stock = torch.utils.data.DataLoader(Records(), 4, shuffle=True, collate_fn=same, generator=seeded())
    if workers:
        # torch's order of an epoch depends on whether there are workers: each kind of iterator draws once.
        stock = torch.utils.data.DataLoader(
            Records(), 4, shuffle=True, collate_fn=same, generator=seeded(), num_workers=2
        )
    epochs = [listed(stock) for _ in range(3)]
    assert len(set(map(str, epochs))) == 3
    for epoch, done in [(0, 1), (1, 6)] if workers else itertools.product([0, 1], [0, 1, 6, 12]):
        loader = shuffled(workers)
        for _ in range(epoch):
            listed(loader)
        _, _, state = taken(loader, done)
        resumed = shuffled(workers, generator=seeded(99))
        resumed.load_state_dict(state)
        # The user's generator: a state of it also determines the following epochs.
        assert [listed(resumed) for _ in range(epoch, 3)] == [epochs[epoch][done:], *epochs[epoch + 1 :]]


@pytest.mark.parametrize("workers", [0, 2, "persistent"])
@pytest.mark.parametrize("kind", ["in order", "generator", "default generator"])
def test_states_and_resumes_draw_nothing_from_torchs_default_generator(kind, workers):
    settings = {
        "in order": {"shuffle": False},
        "generator": {"shuffle": True, "generator": seeded()},
        "default generator": {"shuffle": True},
    }[kind]

    def make():
        persistent = workers == "persistent"
        return torchobj.DataLoader(
            Records(),
            4,
            collate_fn=same,
            num_workers=2 if persistent else workers,
            persistent_workers=persistent,
            **settings,
        )

    torch.manual_seed(3)
    loader = make()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    before = torch.get_rng_state()
    states = [loader.state_dict() for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    rest = [*iterator]
    at_end = torch.get_rng_state()

    torch.set_rng_state(before)
    resumed = make()
    resumed.load_state_dict(states[-1])
    assert torch.equal(torch.get_rng_state(), before)
    assert listed(resumed) == rest
    # The training's next random numbers are those of an undisturbed generator.
    assert torch.equal(torch.get_rng_state(), at_end)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffle_by_the_default_generator_continues_after_an_interrupt_with_any_seed(workers):
    loader = shuffled(workers, generator=None)
    torch.manual_seed(4)
    iterator = iter(loader)
    begun = loader.state_dict()
    seen = [next(iterator) for _ in range(4)]
    middle, rest = loader.state_dict(), [*iterator]
    for other in (loader, shuffled(workers, generator=None)):
        torch.manual_seed(5)
        other.load_state_dict(middle)
        assert listed(other) == rest
        # Before the first batch the order is not drawn; the training restores its random numbers.
        torch.manual_seed(4)
        other.load_state_dict(begun)
        assert listed(other) == seen + rest


def test_the_state_of_a_random_sampler_with_a_generator_is_the_generators():
    def make(seed):
        return torchobj.DataLoader(
            Records(), batch_size=6, sampler=RandomSampler(Records(), True, 40, generator=seeded(seed)), collate_fn=same
        )

    loader = make(1)
    _, iterator, state = taken(loader, 3)
    expected = [[*iterator], listed(loader)]
    resumed = make(2)
    resumed.load_state_dict(state)
    assert [listed(resumed), listed(resumed)] == expected


# --- The remaining checks of torchdata's tests


class RecordsWithState(Records):
    """A map dataset with a state: the number of samples read."""

    def __init__(self):
        super().__init__()
        self.read = 0

    def __getitem__(self, index):
        self.read += 1
        return super().__getitem__(index)["id"]

    def state_dict(self):
        raise AssertionError("a map dataset is not asked for its state")

    load_state_dict = state_dict


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_dataset_is_not_asked_for_a_state_of_its_own(workers):
    # torchdata saves and restores one for each worker. With ours a sample of a map dataset is that of its index alone,
    # so that any number of workers can go on.
    make = functools.partial(torchobj.DataLoader, RecordsWithState(), 4, num_workers=workers)
    whole = listed(make())
    assert after(make, 5) == [whole[5:], whole]


@pytest.mark.parametrize("sampler", [theirs_of.StatefulDistributedSampler, torchobj.ElasticDistributedSampler])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_read_each_sample_once_across_a_resume(sampler, drop_last):
    def make(rank):
        order = sampler(Records(47), num_replicas=3, rank=rank, seed=2, drop_last=drop_last)
        order.set_epoch(4)
        return torchobj.DataLoader(Records(47), 4, sampler=order, collate_fn=same)

    found = []
    for rank in range(3):
        seen, _, state = taken(make(rank), 2)
        resumed = make(rank)
        resumed.load_state_dict(state)
        rest = listed(resumed)
        assert seen + rest == listed(make(rank))
        assert len(resumed) == len(make(rank)) == 4
        found += [sample["id"] for batch in seen + rest for sample in batch]
    # Dealing 47 samples evenly takes up to two samples more or fewer.
    assert len(found) == (45 if drop_last else 48)
    assert len(set(found)) == (45 if drop_last else 47)


def test_a_sampler_refuses_an_invalid_state():
    with pytest.raises(ConfigError, match="seed=None"):
        torchobj.ElasticDistributedSampler(Records()).load_state_dict({})
    state = torchobj.ElasticDistributedSampler(Records()).state_dict()
    with pytest.raises(ConfigError, match="done=-1"):
        torchobj.ElasticDistributedSampler(Records()).load_state_dict(state | {"done": -1})


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"sampler": SteppedSampler(COUNT), "shuffle": True},
        {"batch_sampler": BatchesWithState(COUNT), "batch_size": 3},
        {"batch_size": None, "drop_last": True},
    ],
)
def test_settings_that_contradict_each_other_are_refused_as_by_torchdata(settings):
    for loader in LOADERS:
        with pytest.raises(ValueError, match=r"."):
            loader(Records(), **settings)
