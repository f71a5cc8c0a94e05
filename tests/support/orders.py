"""Samplers and loader settings over a folder of sixty objects, for the tests that save and resume loaders."""

import torch
import torchdata.stateful_dataloader
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import torchobj
from tests.support.prefetching import stats

COUNT = 60


def number_of(reader):
    return bytes(reader)[0]


def dataset(folder, **settings):
    return torchobj.ObjectMapDataset(f"file://{folder}/", transform=number_of, **settings)


def elastic(folder, num_replicas=1, rank=0, **settings):
    return torchobj.ElasticDistributedSampler(dataset(folder), num_replicas, rank, **settings)


def generator():
    return torch.Generator().manual_seed(7)


class Eager(torch.utils.data.Sampler):
    """A user's sampler that draws its order when the iterator is created."""

    def __iter__(self):
        return iter(torch.randperm(COUNT).tolist())

    def __len__(self):
        return COUNT


class Stateful(torch.utils.data.Sampler):
    """A user's sampler with a state and a different order in each epoch."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        for number in range(self.step % COUNT, COUNT):
            sample = (number * 7 + self.step // COUNT) % COUNT
            self.step += 1
            yield sample

    def __len__(self):
        return COUNT

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


#: Creates the settings of a loader.
KINDS = {
    "in order": lambda _: {"batch_size": 4},
    "shuffled": lambda _: {"batch_size": 4, "shuffle": True},
    "generator": lambda _: {"batch_size": 4, "shuffle": True, "generator": generator()},
    "RandomSampler": lambda f: {"batch_size": 7, "sampler": RandomSampler(dataset(f), generator=generator())},
    "replacement": lambda f: {
        "batch_size": 7,
        "drop_last": True,
        "sampler": RandomSampler(dataset(f), replacement=True, num_samples=90, generator=generator()),
    },
    "SubsetRandomSampler": lambda _: {"batch_size": 4, "sampler": SubsetRandomSampler(range(5, 50))},
    "weighted": lambda _: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0 + n for n in range(COUNT)], 70)},
    "two generators": lambda f: {
        "batch_size": 4,
        "generator": torch.Generator().manual_seed(1),
        "sampler": RandomSampler(dataset(f), generator=generator()),
    },
    "distributed": lambda f: {"batch_size": 4, "sampler": DistributedSampler(dataset(f), 2, 1, seed=3)},
    "elastic": lambda f: {"batch_size": 4, "sampler": elastic(f, 2, 1, seed=3)},
    "no batches": lambda _: {"batch_size": None, "shuffle": True},
    "elastic, no batches": lambda f: {"batch_size": None, "sampler": elastic(f, 2, 1)},
    "batch_sampler": lambda f: {"batch_sampler": BatchSampler(elastic(f), 7, drop_last=True)},
    "eager": lambda _: {"batch_size": 4, "sampler": Eager()},
    "stateful": lambda _: {"batch_size": 4, "sampler": Stateful()},
    "torchdata": lambda f: {
        "batch_size": None,
        "sampler": torchdata.stateful_dataloader.sampler.RandomSampler(dataset(f), generator=generator()),
    },
    "no look-ahead": lambda _: {"batch_size": 4, "shuffle": True, "lookahead": 0},
}


def gained(before, name):
    return stats()[name] - before[name]


def loader_of(folder, kind, **settings):
    return torchobj.DataLoader(dataset(folder), **KINDS[kind](folder), **settings)


def workers(number):
    return {0: {}, 2: {"num_workers": 2}, "persistent": {"num_workers": 2, "persistent_workers": True}}[number]
