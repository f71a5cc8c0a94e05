"""`interleave` over map-style datasets: the order of Hugging Face, read ahead, resumed and elastic."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

import torchobj
from tests.support.prefetching import Taken
from torchobj.datasets.mixing.interleave import IterableInterleaveDataset, MapInterleaveDataset
from torchobj.exceptions import ConfigError

# Imports the datasets of Hugging Face.
pytestmark = pytest.mark.xdist_group("datasets")

STRATEGIES = ("first_exhausted", "all_exhausted")
LENGTHS = (17, 40, 29)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("interleave")
    for member, length in enumerate(LENGTHS):
        (path / f"{member}").mkdir()
        for number in range(length):
            (path / f"{member}" / f"{number:03}").write_bytes(b"x" * (10 + number))
    return path


def value(reader):
    member, number = reader.key.rsplit("/", 2)[-2:]
    assert len(bytes(reader)) == 10 + int(number)
    return int(member) * 100 + int(number)


class Named(torchobj.ObjectDataset):
    """Objects that a subclass names."""

    def __init__(self, folder, member):
        super().__init__()
        self.folder, self.member = folder, member

    def __len__(self):
        return LENGTHS[self.member]

    def objects_at(self, index):
        return [torchobj.ObjectRef(f"file://{self.folder}/{self.member}/{index:03}")]

    def build(self, index, readers):
        return value(readers[0])


def listed(folder, member):
    return torchobj.ObjectMapDataset(f"file://{folder}/{member}/", transform=value)


def mixed(folder, *args, **options):
    members = [listed(folder, 0), Named(folder, 1), Subset(listed(folder, 2), range(LENGTHS[2]))]
    return torchobj.interleave(members, *args, **options)


def expected(probabilities=None, lengths=LENGTHS, **options):
    import datasets as hf

    parts = [
        hf.Dataset.from_dict({"id": [member * 100 + number for number in range(length)]})
        for member, length in enumerate(lengths)
    ]
    return list(hf.interleave_datasets(parts, probabilities, **options)["id"])


def plain(length, member):
    return [member * 100 + number for number in range(length)]


def numbers(loader):
    return [number for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("probabilities", [None, [0.2, 0.5, 0.3]])
def test_samples_and_order_equal_those_of_hugging_face(folder, strategy, probabilities):
    dataset = mixed(folder, probabilities, seed=3, stopping_strategy=strategy)
    order = expected(probabilities, seed=3, stopping_strategy=strategy)
    assert list(dataset) == order
    assert len(dataset) == len(order)
    assert dataset.__getitems__([-1, 0, 5]) == [order[-1], order[0], order[5]]
    with pytest.raises(IndexError, match=f"index {len(order)} of {len(order)} samples"):
        dataset[len(order)]


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_positions_are_right_beyond_many_blocks(strategy):
    import datasets as hf

    lengths, probabilities = (9_000, 70_000), [0.1, 0.9]
    members = [range(lengths[0]), range(1_000_000, 1_000_000 + lengths[1])]
    dataset = torchobj.interleave(members, probabilities, seed=1, stopping_strategy=strategy)
    parts = [hf.Dataset.from_dict({"id": list(member)}) for member in members]
    order = hf.interleave_datasets(parts, probabilities, seed=1, stopping_strategy=strategy)["id"]
    assert dataset.__getitems__(range(len(dataset))) == list(order)
    share = np.mean([member for member, _ in dataset.located(range(20_000))])
    assert abs(share - 0.9) < 0.01


def test_a_mixture_takes_a_byte_per_sample(folder):
    dataset = torchobj.interleave([range(1 << 20)] * 4, [0.25] * 4)
    assert dataset.mixture._drawn.nbytes == len(dataset)
    assert dataset.mixture._before.nbytes < len(dataset) / 50
    assert torchobj.interleave([range(1 << 40)] * 2)[(1 << 41) - 1] == (1 << 40) - 1


@pytest.mark.parametrize("workers", [0, 2])
def test_every_read_of_a_shuffled_mixture_was_announced(folder, workers):
    dataset = mixed(folder, [0.3, 0.4, 0.3], stopping_strategy="all_exhausted")
    loader = torchobj.DataLoader(dataset, batch_size=5, shuffle=True, num_workers=workers)
    with Taken() as taken:
        found = numbers(loader)
    assert sorted(found) == sorted(expected([0.3, 0.4, 0.3], seed=0, stopping_strategy="all_exhausted"))
    assert (taken.announced, taken.misses) == (len(dataset), 0)


def test_a_nested_mixture_in_torch_wrappers_is_announced(folder):
    inner = torchobj.interleave([listed(folder, 0), Named(folder, 1)])
    outer = torchobj.interleave([ConcatDataset([inner, listed(folder, 2)]), listed(folder, 0)])
    loader = torchobj.DataLoader(Subset(outer, range(1, 30)), batch_size=4)
    with Taken() as taken:
        found = numbers(loader)
    assert (taken.announced, taken.misses) == (29, 0)
    assert found == list(outer)[1:30]


def test_an_elastic_sampler_continues_with_other_ranks_and_workers(folder):
    def loader(rank, ranks, workers):
        dataset = mixed(folder, [0.2, 0.5, 0.3], stopping_strategy="all_exhausted")
        sampler = torchobj.ElasticDistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=4, drop_last=True)
        return torchobj.DataLoader(dataset, batch_size=3, sampler=sampler, num_workers=workers)

    found, states = [], []
    for rank in range(2):
        before = loader(rank, 2, 2)
        batches = iter(before)
        found += [number for _ in range(4) for number in next(batches).tolist()]
        states.append(before.state_dict())
    for rank in range(3):
        after = loader(rank, 3, 0)
        after.load_state_dict(states[0])
        found += numbers(after)
    every = expected([0.2, 0.5, 0.3], seed=0, stopping_strategy="all_exhausted")
    missing = list(every)
    for number in found:
        missing.remove(number)
    assert len(missing) == (len(every) - 24) % 3


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.matrix), "forkserver"])
def test_it_works_in_spawned_workers(folder, method):
    dataset = mixed(folder, [0.2, 0.5, 0.3])
    context = multiprocessing.get_context(method)
    loader = torchobj.DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=context)
    assert numbers(loader) == expected([0.2, 0.5, 0.3], seed=0)
    assert list(pickle.loads(pickle.dumps(dataset))) == list(dataset)


def test_failed_samples_of_all_datasets_are_counted(folder):
    failing = torchobj.ObjectMapDataset(f"file://{folder}/0/", transform=fail, on_error=lambda *_: -1)
    dataset = torchobj.interleave([failing, listed(folder, 1)])
    loader = torchobj.DataLoader(dataset, batch_size=2)
    assert numbers(loader).count(-1) == LENGTHS[0]
    assert loader.stats().failed_samples == LENGTHS[0]


def fail(reader):
    raise ArithmeticError(reader.key)


def test_the_kind_of_the_mixture_is_that_of_its_datasets(folder):
    mapped = torchobj.interleave([range(3), range(3)])
    iterable = torchobj.interleave([range(3), torchobj.ObjectIterableDataset(f"file://{folder}/0/")])
    assert (type(mapped), type(iterable)) == (MapInterleaveDataset, IterableInterleaveDataset)
    assert not isinstance(mapped, IterableDataset)
    assert isinstance(iterable, IterableDataset)
    assert not hasattr(iterable, "__len__")
    assert isinstance(pickle.loads(pickle.dumps(iterable)), IterableDataset)
    assert isinstance(mapped, torch.utils.data.Dataset)
    assert repr(mapped) == "<MapInterleaveDataset of range, range, seed=0, stopping_strategy='first_exhausted'>"
    assert repr(iterable) == (
        "<IterableInterleaveDataset of range, ObjectIterableDataset, seed=0, stopping_strategy='first_exhausted'>"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "datasets=\\[\\]: must contain a dataset"),
        (("abc",), "must be a list of datasets"),
        (([range(3), 5],), "datasets\\[1\\]=<class 'int'>: must be a map-style dataset"),
        (([range(3), range(3)], [1.0]), "1 for 2 datasets"),
        (([range(3), range(3)], [1.5, -0.5]), "probabilities\\[1\\]=-0.5: must be 0 or more"),
        (([range(3), range(3)], [0.5, 0.4]), "must sum to 1, but sum to 0.9"),
        (([range(3), range(3)], [0.5, float("nan")]), "probabilities\\[1\\]=nan"),
        (([range(3), range(3)], ["a", "b"]), "must be numbers"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        torchobj.interleave(*arguments)


def test_options_that_cannot_be_met_are_refused():
    with pytest.raises(ConfigError, match="stopping_strategy='last'"):
        torchobj.interleave([range(3)], stopping_strategy="last")
    with pytest.raises(ConfigError, match="seed=-1"):
        torchobj.interleave([range(3)], seed=-1)
    with pytest.raises(ConfigError, match="more than 0 with all_exhausted"):
        torchobj.interleave([range(3)] * 2, [1, 0], stopping_strategy="all_exhausted")
    with pytest.raises(ConfigError, match="datasets\\[1\\]: a range without samples"):
        len(torchobj.interleave([range(3), range(0)]))
    assert list(torchobj.interleave([range(3), range(3)], [1 - 1e-7, 0])) == [0, 1, 2]


class OfUsers(MapInterleaveDataset):
    """A subclass with arguments and samples of its own."""

    def __init__(self, *members, factor):
        super().__init__(members, stopping_strategy="all_exhausted")
        self.factor = factor


class Multiplied(OfUsers):
    def __getitem__(self, index):
        return super().__getitem__(index) * self.factor


class Negated(IterableInterleaveDataset):
    def __init__(self, *members, factor):
        super().__init__(members, stopping_strategy="all_exhausted")
        self.factor = factor

    def __iter__(self):
        return (-sample for sample in super().__iter__())


class Numbers(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(4) if info is None else range(4)[info.id :: info.num_workers])


def loaded(dataset, workers=2):
    return [sample for batch in torchobj.DataLoader(dataset, 3, num_workers=workers) for sample in batch.tolist()]


def test_a_subclass_of_map_style_datasets_has_their_methods(folder):
    mixed = OfUsers(Named(folder, 0), Named(folder, 2), factor=1)
    assert (type(mixed).__name__, isinstance(mixed, OfUsers), len(mixed)) == ("OfUsers", True, 2 * LENGTHS[2])
    expected = list(torchobj.interleave(mixed.datasets, stopping_strategy="all_exhausted"))
    assert list(mixed) == expected == loaded(mixed) == list(pickle.loads(pickle.dumps(mixed)))
    with Taken() as taken:
        loaded(mixed)
    assert (taken.announced, taken.misses) == (len(expected), 0)


def test_ranks_are_arguments_of_the_iterable_class_only():
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        MapInterleaveDataset([range(4)], rank=0, world_size=2)
    of_ranks = [IterableInterleaveDataset([range(4)], rank=rank, world_size=2) for rank in range(2)]
    assert sorted(sample for dataset in of_ranks for sample in dataset) == [0, 1, 2, 3]


def test_the_map_style_class_refuses_an_iterable_dataset():
    with pytest.raises(ConfigError, match="datasets\\[1\\]: is iterable; use IterableInterleaveDataset"):
        OfUsers(range(3), Numbers(), factor=1)


def test_a_subclass_with_an_iterable_dataset_is_iterable():
    mixed = Negated(Numbers(), range(4), factor=1)
    assert isinstance(mixed, IterableDataset)
    assert sorted(mixed) == sorted(loaded(mixed)) == [-3, -3, -2, -2, -1, -1, 0, 0]
    again = pickle.loads(pickle.dumps(mixed))
    assert isinstance(again, Negated)
    assert list(again) == list(mixed)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_subclass_that_overrides_the_samples_returns_its_own(folder, context):
    mixed = Multiplied(Named(folder, 0), Named(folder, 1), factor=1000)
    expected = [1000 * sample for sample in torchobj.interleave(mixed.datasets, stopping_strategy="all_exhausted")]
    assert list(mixed) == mixed.__getitems__(range(len(mixed))) == expected
    loader = torchobj.DataLoader(mixed, 3, num_workers=1, multiprocessing_context=context, lookahead=0)
    assert [sample for batch in loader for sample in batch.tolist()] == expected
    # Within another mixture too.
    outer = torchobj.interleave([mixed, Numbers()], stopping_strategy="all_exhausted")
    assert set(expected) <= set(outer)


def test_an_overridden_mixture_is_not_announced(folder, caplog):
    mixed = Multiplied(Named(folder, 0), Named(folder, 1), factor=1000)
    with Taken() as taken:
        loaded(mixed, workers=0)
    assert taken.announced == 0
