"""`interleave` with iterable datasets: divided, read ahead, and resumed at any position."""

import itertools
import logging
import multiprocessing
import pickle
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

import torchobj
from tests.support.long_tables import often
from tests.support.prefetching import Taken
from torchobj.exceptions import ConfigError
from torchobj.ranks.sharding import Shard

# Imports the datasets of Hugging Face.
pytestmark = pytest.mark.xdist_group("datasets")

STRATEGIES = ("first_exhausted", "all_exhausted")
LENGTHS = (60, 150, 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("interleave")
    for member, length in enumerate(LENGTHS):
        (path / f"{member}").mkdir()
        for number in range(length):
            (path / f"{member}" / f"{number:03}").write_bytes(b"x" * (10 + number))
    (path / "rows").mkdir()
    for part in range(4):
        ids = np.arange(30) + 1000 + part * 30
        pq.write_table(pa.table({"id": ids}), path / "rows" / f"{part}.parquet", row_group_size=10)
    with torchobj.ShardWriter(f"file://{path}/tars/%02d.tar", maxcount=20) as writer:
        for number in range(80):
            writer.write({"__key__": f"{number:03}", "cls": 9_000 + number})
    return path


def value(reader):
    member, number = reader.key.rsplit("/", 2)[-2:]
    assert len(bytes(reader)) == 10 + int(number)
    return int(member) * 1_000_000 + int(number)


def row_id(row):
    return row["id"]


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


class Plain(IterableDataset):
    """Numbers, without a state. Each worker yields every n-th."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return itertools.islice(self.numbers, worker, None, workers)


class Counting(Plain):
    """The same with a state of its iterator."""

    def __iter__(self):
        return Position(list(super().__iter__()))


class Position:
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
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def streamed(folder, **options):
    return torchobj.ObjectIterableDataset(
        f"file://{folder}/0/", transform=value, enable_sharding=True, shuffle=True, **options
    )


def rows(folder, **options):
    url = f"file://{folder}/rows/"
    return torchobj.ParquetIterableDataset(url, transform=row_id, shuffle=True, shuffle_buffer=16, **options)


def shards(folder):
    url = f"file://{folder}/tars/{{00..03}}.tar"
    return torchobj.TarIterableDataset(url, decode={"cls": torchobj.decode.json}, transform=class_of, shuffle_buffer=8)


def class_of(sample):
    return sample["cls"]


def mixed(folder, probabilities=(0.2, 0.3, 0.3, 0.2), **options):
    members = [rows(folder), Counting(range(5_000, 5_050)), shards(folder)]
    inner = torchobj.interleave(members, stopping_strategy="all_exhausted")
    listed = torchobj.ObjectMapDataset(f"file://{folder}/2/", transform=value)
    members = [
        streamed(folder),
        Named(folder, 1),
        ConcatDataset([Subset(listed, range(40)), range(7_000, 7_020)]),
        inner,
    ]
    return torchobj.interleave(members, probabilities, stopping_strategy="all_exhausted", seed=2, **options)


def numbers(loader):
    return [number for batch in loader for number in batch.tolist()]


def shares(folder):
    return {
        *(number for number in range(60)),
        *(1_000_000 + number for number in range(150)),
        *(2_000_000 + number for number in range(40)),
        *range(7_000, 7_020),
        *range(5_000, 5_050),
        *range(1_000, 1_120),
        *range(9_000, 9_080),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [(3, 4, 5), (5, 3, 4), (1, 7, 2), (4, 4, 4)])
def test_samples_and_order_equal_those_of_hugging_face(strategy, lengths):
    import datasets as hf

    members = [range(100 * member, 100 * member + length) for member, length in enumerate(lengths)]
    parts = [hf.Dataset.from_dict({"id": list(each)}).to_iterable_dataset() for each in members]
    order = [sample["id"] for sample in hf.interleave_datasets(parts, stopping_strategy=strategy)]
    for kind in (Plain, Counting):
        dataset = torchobj.interleave([kind(each) for each in members], stopping_strategy=strategy)
        assert list(dataset) == order


def test_samples_are_drawn_with_their_probabilities():
    members = [Plain(itertools.repeat(number)) for number in range(3)]
    dataset = torchobj.interleave(members, [0.6, 0.3, 0.1])
    counts = Counter(itertools.islice(dataset, 20_000))
    assert [round(counts[number] / 20_000, 1) for number in range(3)] == [0.6, 0.3, 0.1]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_divide_all_datasets_and_each_sample_is_there(folder, workers):
    found = numbers(torchobj.DataLoader(mixed(folder), batch_size=8, num_workers=workers))
    assert set(found) == shares(folder)


def test_each_rank_and_worker_has_parts_of_its_own(folder, monkeypatch):
    def part(rank, worker):
        dataset = torchobj.interleave([rows(folder, seed=1), Named(folder, 1)])
        # One of them ends first: the others' samples are compared below.
        for each in (dataset, dataset.datasets[0]):
            monkeypatch.setattr(each, "_shard", lambda: Shard(rank, 2, worker, 2))
        return list(dataset)

    found = [number for rank in range(2) for worker in range(2) for number in part(rank, worker)]
    assert len(found) == len(set(found)) > 200


def test_epochs_have_orders_of_their_own_and_repeat(folder):
    dataset = mixed(folder)
    loader = torchobj.DataLoader(dataset, batch_size=8, num_workers=2, persistent_workers=True)
    epochs = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        epochs.append(numbers(loader))
    assert epochs[0] == epochs[2] != epochs[1]
    assert set(epochs[1]) == shares(folder)
    assert dataset.datasets[3].datasets[0].epoch_state()["epoch"] == 0


@pytest.mark.parametrize(
    ("workers", "count"),
    often(1, [(0, 4), (2, 2), (0, 20), (2, 20)]),
)
def test_it_resumes_exactly_at_random_points(folder, workers, count):
    def loader():
        return torchobj.DataLoader(mixed(folder), batch_size=4, num_workers=workers)

    expected = [batch.tolist() for batch in loader()]
    points = sorted(random.Random(workers).sample(range(1, len(expected)), count))
    before, states = loader(), {}
    for number, _ in enumerate(before, 1):
        if number in points:
            states[number] = pickle.dumps(before.state_dict())
    for point in points:
        after = loader()
        after.load_state_dict(pickle.loads(states[point]))
        assert [batch.tolist() for batch in after] == expected[point:]


@pytest.mark.parametrize("strategy", often(1, STRATEGIES))
def test_it_resumes_after_every_sample_without_a_loader(folder, strategy):
    def dataset():
        members = [Plain(range(7)), Counting(range(100, 105)), range(200, 206), rows(folder)]
        return torchobj.interleave(members, [0.1, 0.1, 0.1, 0.7], seed=5, stopping_strategy=strategy)

    expected = list(dataset())
    before = dataset()
    iterator = iter(before)
    for point in range(1, len(expected) + 1):
        next(iterator)
        after = dataset()
        after.load_state_dict(pickle.loads(pickle.dumps(before.state_dict())))
        assert list(after) == expected[point:]


@pytest.mark.parametrize(
    "changed",
    [
        {"draws": "x"},
        {"exhausted": None},
        {"last": 2},
        {"members": [None, {}]},
        {"members": [{"count": 1}, {}]},
        {"last": -1},
    ],
    ids=str,
)
def test_a_malformed_position_is_refused(folder, changed):
    dataset = torchobj.interleave([streamed(folder), range(9)])
    next(iter(dataset))
    state = dataset.state_dict()
    other = torchobj.interleave([streamed(folder), range(9)])
    other.load_state_dict(state | {"position": state["position"] | changed})
    with pytest.raises(ConfigError, match="position of the state=.* must be that of a mixture"):
        next(iter(other))


def test_a_state_of_another_mixture_is_refused(folder):
    dataset = torchobj.interleave([streamed(folder), range(9)], [0.5, 0.5])
    next(iter(dataset))
    other = torchobj.interleave([streamed(folder), range(9)], [0.4, 0.6])
    other.load_state_dict(dataset.state_dict())
    with pytest.raises(ConfigError, match="cannot be resumed"):
        next(iter(other))


@pytest.mark.parametrize("workers", [0, 2])
def test_all_datasets_are_read_ahead(folder, workers):
    listed = torchobj.ObjectMapDataset(f"file://{folder}/2/", transform=value)
    members = [streamed(folder), Named(folder, 1), Subset(listed, range(80))]
    dataset = torchobj.interleave(members, stopping_strategy="all_exhausted")
    with Taken() as taken:
        found = numbers(torchobj.DataLoader(dataset, batch_size=4, num_workers=workers))
    assert len(set(found)) == 60 + 150 + 80
    # The first group of each pass over a dataset is requested at once. It has up to 32 objects, so that with two workers
    # it is all that a worker has of the smaller datasets.
    assert taken.announced > taken.objects / (4 if workers else 2)


@pytest.mark.parametrize(
    ("method", "workers"),
    [("forkserver", 1), *(pytest.param(method, 2, marks=pytest.mark.matrix) for method in ("spawn", "forkserver"))],
)
def test_it_works_in_spawned_workers(folder, method, workers):
    expected = numbers(torchobj.DataLoader(mixed(folder), batch_size=8, num_workers=workers))
    context = multiprocessing.get_context(method)
    loader = torchobj.DataLoader(mixed(folder), batch_size=8, num_workers=workers, multiprocessing_context=context)
    assert numbers(loader) == expected


def fails_for_seven(reader):
    number = value(reader)
    if number % 1_000_000 == 7:
        raise ArithmeticError("seven")
    return number


def test_iteration_continues_after_an_exception_of_a_dataset(folder):
    members = [
        torchobj.ObjectIterableDataset(f"file://{folder}/0/", transform=fails_for_seven),
        torchobj.ObjectMapDataset(f"file://{folder}/1/", transform=fails_for_seven),
    ]
    iterator = iter(torchobj.interleave(members, stopping_strategy="all_exhausted"))
    found, failed = [], 0
    while True:
        try:
            found.append(next(iterator))
        except ArithmeticError:
            failed += 1
        except StopIteration:
            break
    assert failed == 4  # 60 objects are read almost three times, of 150 once
    assert set(found) == {*range(60), *range(1_000_000, 1_000_150)} - {7, 1_000_007}


def test_a_worker_without_samples_of_a_dataset_says_so(folder, caplog):
    members = [Plain(()), Named(folder, 1)]
    with caplog.at_level(logging.WARNING, "torchobj"):
        assert list(torchobj.interleave(members)) == []
    assert "datasets[0] of a mixture has no samples for worker 0: its mixture ends" in caplog.text
    assert len(set(torchobj.interleave(members, stopping_strategy="all_exhausted"))) == LENGTHS[1]


def test_an_iterable_dataset_can_be_there_once_only(folder):
    same = streamed(folder)
    with pytest.raises(ConfigError, match="datasets\\[1\\] is datasets\\[0\\]"):
        torchobj.interleave([same, same])
    with pytest.raises(ConfigError, match="datasets\\[1\\]: a range without samples"):
        next(iter(torchobj.interleave([same, range(0)])))
