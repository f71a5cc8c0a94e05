"""One log line if several ranks read all samples of a loader, and none if something divides them or one rank reads."""

import logging
import mmap
import os

import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support.ranks import run_ranks
from torchobj.reading import lookahead_warning
from torchobj.warn_once import FORKED

SAYS = "each of 2 ranks reads all samples, so that every sample is repeated 2 times; pass "


@pytest.fixture
def url(tmp_path):
    store = torchobj.Store(f"file://{tmp_path}")
    for number in range(8):
        store.put(f"{number}", b"x")
    return f"file://{tmp_path}/"


def read(reader):
    return reader.read()[0]


class Divided(torch.utils.data.Sampler):
    """A sampler of the user, which divides as it wants."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(range(dist.get_rank(), len(self.dataset), 2))


def map_style(url):
    return torchobj.ObjectMapDataset(url, transform=read)


def iterable(url, **arguments):
    return torchobj.ObjectIterableDataset(url, transform=read, **arguments)


def of_rank(dataset):
    return torch.utils.data.Subset(dataset, range(dist.get_rank(), len(dataset), 2))


def fold(dataset):
    """The training part of a cross-validation with a fold of each rank."""
    left_out = 3 + dist.get_rank()
    return torch.utils.data.Subset(dataset, [number for number in range(len(dataset)) if number != left_out])


def batches(sampler):
    return torch.utils.data.BatchSampler(sampler, 2, drop_last=False)


def named(url):
    return torchobj.ObjectMapDataset([f"{url}{dist.get_rank()}", f"{url}{dist.get_rank() + 2}"], transform=read)


def split(dataset):
    return torch.utils.data.random_split(dataset, [6, 2], torch.Generator().manual_seed(1))[0]


def plain(*arguments, **named_arguments):
    """A loader of torch, without look-ahead."""
    return torch.utils.data.DataLoader(*arguments, **named_arguments)


def attached(*arguments, **named_arguments):
    return torchobj.attach(plain(*arguments, **named_arguments))


load = torchobj.DataLoader


def prepared(loader, **settings):
    """A loader of Accelerate."""
    import accelerate

    configuration = accelerate.DataLoaderConfiguration(**settings)
    return accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)


#: Loaders of which each rank reads everything, and what is to be passed.
REPEATED = {
    "in order": (lambda url: load(map_style(url)), "ElasticDistributedSampler(dataset)"),
    "shuffled": (lambda url: load(map_style(url), shuffle=True), "ElasticDistributedSampler(dataset)"),
    "attached": (lambda url: attached(map_style(url), shuffle=True), "ElasticDistributedSampler(dataset)"),
    "with workers": (lambda url: load(map_style(url), num_workers=2), "ElasticDistributedSampler(dataset)"),
    "a split": (lambda url: load(split(map_style(url))), "ElasticDistributedSampler(dataset)"),
    "iterable": (lambda url: load(iterable(url)), "enable_sharding=True"),
    "iterable with a worker": (lambda url: load(iterable(url), num_workers=1), "enable_sharding=True"),
    "iterable of torch's loader": (lambda url: plain(iterable(url)), "enable_sharding=True"),
    "iterable of torch's loader with a worker": (
        lambda url: plain(iterable(url), num_workers=1),
        "enable_sharding=True",
    ),
}

#: Loaders that are divided, or whose user has decided otherwise.
DIVIDED = {
    "elastic": lambda url: load(map_style(url), sampler=torchobj.ElasticDistributedSampler(map_style(url))),
    "torch's": lambda url: load(map_style(url), sampler=torch.utils.data.DistributedSampler(map_style(url))),
    "of the user": lambda url: load(map_style(url), sampler=Divided(map_style(url))),
    "batches of the user": lambda url: load(map_style(url), batch_sampler=batches(Divided(map_style(url)))),
    "batches": lambda url: load(map_style(url), batch_sampler=batches(torch.utils.data.RandomSampler(map_style(url)))),
    "with replacement": lambda url: load(
        map_style(url), sampler=torch.utils.data.RandomSampler(map_style(url), replacement=True)
    ),
    "subsets": lambda url: load(of_rank(map_style(url)), shuffle=True),
    "folds": lambda url: load(fold(map_style(url))),
    "named objects": lambda url: load(named(url)),
    "prepared": lambda url: prepared(load(map_style(url), shuffle=True, batch_size=2)),
    "prepared and attached": lambda url: torchobj.attach(prepared(plain(map_style(url), batch_size=2))),
    "dispatched": lambda url: prepared(load(map_style(url), batch_size=2), dispatch_batches=True),
    "dispatched iterable": lambda url: prepared(plain(iterable(url), batch_size=2, num_workers=1)),
    "enable_sharding=True": lambda url: load(iterable(url, enable_sharding=True)),
    "enable_sharding=False": lambda url: load(iterable(url, enable_sharding=False)),
    "enable_sharding=False with a worker": lambda url: plain(iterable(url, enable_sharding=False), num_workers=1),
    "rank and world_size": lambda url: load(iterable(url, rank=dist.get_rank(), world_size=2)),
    "world_size=1": lambda url: load(iterable(url, rank=0, world_size=1)),
}


def passes(rank, loaders, name, url, only_rank, log):
    """Two epochs of a loader of a rank; the file `log` receives what it and its workers log."""
    # Accelerate warns if it is not set.
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo")
    # Without what the process of the tests has warned of, and whether it has drawn ahead: a worker of a loader that draws ahead
    # says nothing.
    FORKED._flags = mmap.mmap(-1, len(FORKED._flags))
    lookahead_warning._disabled = False
    logging.getLogger("torchobj").addHandler(logging.FileHandler(log))
    if only_rank in (None, rank):
        make = loaders[name][0] if loaders is REPEATED else loaders[name]
        loader = make(url)
        for _ in range(2):
            for _ in loader:
                pass
    dist.barrier()


def lines(loaders, name, url, log, only_rank=None):
    """What both ranks and their workers have logged about the ranks."""
    assert run_ranks(passes, loaders, name, url, only_rank, log) == [None, None]
    return [line for line in log.read_text().splitlines() if "reads all samples" in line]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("shuffled", "iterable with a worker") else pytest.param(name, marks=pytest.mark.matrix)
        for name in REPEATED
    ],
)
def test_one_line_says_that_ranks_read_the_same_samples(url, tmp_path_factory, name):
    [line] = lines(REPEATED, name, url, tmp_path_factory.mktemp("log") / "log")
    assert SAYS in line and REPEATED[name][1] in line


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("torch's", "batches", "folds", "enable_sharding=False")
        else pytest.param(name, marks=pytest.mark.matrix)
        for name in DIVIDED
    ],
)
def test_ranks_whose_samples_are_divided_or_meant_to_be_the_same_log_nothing(url, tmp_path_factory, name):
    assert lines(DIVIDED, name, url, tmp_path_factory.mktemp("log") / "log") == []


@pytest.mark.parametrize("name", ["shuffled", pytest.param("iterable of torch's loader", marks=pytest.mark.matrix)])
def test_a_validation_on_one_rank_logs_nothing(url, tmp_path_factory, name):
    assert lines(REPEATED, name, url, tmp_path_factory.mktemp("log") / "log", only_rank=0) == []
