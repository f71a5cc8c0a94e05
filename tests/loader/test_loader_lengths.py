"""The length of the loader of an iterable dataset is that of a full pass of each rank."""

import functools
import itertools
from collections.abc import Sized

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support.long_tables import often
from tests.support.ranks import run_ranks
from torchobj.exceptions import ConfigError

#: Numbers of samples of tar shards, and of rows of files.
SIZES = (7, 0, 12, 3, 9)


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths")
    numbers = itertools.count()
    (path / "objects").mkdir()
    for number in range(17):
        (path / "objects" / f"{number:02}").write_bytes(b"%d" % number)
    for part, size in enumerate(SIZES):
        rows = pa.table({"id": list(itertools.islice(numbers, size))}, pa.schema([("id", pa.int64())]))
        (path / f"tables/part={part}").mkdir(parents=True)
        pq.write_table(rows, path / f"tables/part={part}/rows.parquet", row_group_size=4)
    with torchobj.ShardWriter(f"file://{path}/tar/%02d.tar", maxcount=8) as shards:
        for number in range(30):
            shards.write({"__key__": f"{number:03}", "txt": str(number)})
    return path


def first_byte(reader):
    return reader.read()[0]


def number_of(sample):
    return int(bytes(sample["txt"]))


def row_id(row):
    return row["id"]


def objects(folder, **options):
    return torchobj.ObjectIterableDataset(f"file://{folder}/objects/", transform=first_byte, **options)


def tar(folder, **options):
    return torchobj.TarIterableDataset(f"file://{folder}/tar/", transform=number_of, shuffle_buffer=3, **options)


def rows(folder, **options):
    return torchobj.ParquetIterableDataset(f"file://{folder}/tables/", transform=row_id, **options)


def batches_of_rows(folder, **options):
    return torchobj.ParquetIterableDataset(f"file://{folder}/tables/", batch_rows=5, **options)


def mixture(folder, **options):
    members = [rows(folder, shuffle=True), tar(folder), range(9)]
    return torchobj.interleave(members, [0.5, 0.4, 0.1], epoch_samples=41, **options)


KINDS = {
    "objects": functools.partial(objects, enable_sharding=True, shuffle=True),
    "objects, drop": functools.partial(objects, enable_sharding=True, uneven="drop"),
    "objects, pad": functools.partial(objects, enable_sharding=True, uneven="pad"),
    "tar, drop": functools.partial(tar, uneven="drop"),
    "tar, pad": functools.partial(tar, uneven="pad"),
    "tar, resample": functools.partial(tar, uneven="resample"),
    "rows": rows,
    "rows, shuffled": functools.partial(rows, shuffle=True, shuffle_buffer=4),
    "rows, drop": functools.partial(rows, uneven="drop", shuffle=True),
    "rows, pad": functools.partial(rows, uneven="pad"),
    "rows of folders": functools.partial(rows, partitioning="hive", filters=[("part", "<", 4)]),
    "rows by statistics": functools.partial(rows, filters=[("id", ">=", 11)], uneven="drop"),
    "batches of rows": functools.partial(batches_of_rows, shuffle=True),
    "batches of rows, pad": functools.partial(batches_of_rows, uneven="pad"),
    "mixture": mixture,
}

#: Those whose ranks and workers have other row groups in each epoch.
VARYING = ("rows, shuffled", "batches of rows")

TABLE = [
    ("objects", 2, 3),
    ("rows, drop", 2, 2),
    ("batches of rows", 1, 1),
    *itertools.product(KINDS, (1, 2, 3), (0, 1, 2, 3)),
]


@pytest.mark.parametrize(
    ("kind", "world_size", "workers"),
    often(3, [case for case in dict.fromkeys(TABLE) if case[0] not in VARYING or case[1] * max(1, case[2]) == 1]),
)
def test_the_length_is_that_of_a_full_pass(folder, kind, world_size, workers):
    batches = [{"batch_size": None}]
    if not kind.startswith("batches"):
        batches += [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}]
    for rank, batch in itertools.product(range(world_size), batches):
        dataset = KINDS[kind](folder, rank=rank, world_size=world_size)
        loader = torchobj.DataLoader(dataset, num_workers=workers, **batch)
        for _ in range(2):
            before, during = len(loader), set()
            assert sum(1 for _ in loader if during.add(len(loader)) is None) == before
            assert during <= {before}


def test_a_dataset_that_every_worker_reads_has_its_length_in_each(folder):
    dataset = objects(folder, enable_sharding=False)
    assert len(torchobj.DataLoader(dataset, batch_size=4)) == 5
    assert len(torchobj.DataLoader(dataset, batch_size=4, num_workers=3)) == 15


def test_the_length_of_a_resumed_loader_is_that_of_the_whole_pass(folder):
    loader = torchobj.DataLoader(rows(folder), batch_size=4, num_workers=2)
    whole = len(loader)
    passed = iter(loader)
    for _ in range(3):
        next(passed)
    resumed = torchobj.DataLoader(rows(folder), batch_size=4, num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    assert (len(resumed), len(list(resumed)), len(resumed)) == (whole, whole - 3, whole)


@pytest.mark.parametrize("workers", often(1, (0, 3)))
def test_the_length_is_an_upper_bound_where_samples_are_skipped(folder, workers):
    def odd(sample):
        number = sample["id"] if "id" in sample else int(bytes(sample["txt"]))
        if number % 2:
            raise ValueError
        return number

    def odd_object(reader):
        return odd({"id": int(reader.read())})

    url, skip = f"file://{folder}", {"on_error": "skip"}
    for dataset, (count, left) in {
        torchobj.ObjectIterableDataset(f"{url}/objects/", transform=odd_object, enable_sharding=True, **skip): (17, 9),
        torchobj.ParquetIterableDataset(f"{url}/tables/", transform=odd, **skip): (31, 16),
    }.items():
        loader = torchobj.DataLoader(dataset, batch_size=None, num_workers=workers)
        assert (len(loader), len(list(loader))) == (count, left)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (tar, "without uneven= a pass does not read the index"),
        (functools.partial(rows, filters=[("id", ">", 9)]), "filters= keeps are known only when they are read"),
        (lambda folder: torchobj.interleave([objects(folder), range(3)]), "epoch_samples="),
        (functools.partial(rows, shuffle=True, rank=1, world_size=2), "varies from epoch to epoch"),
        (functools.partial(rows, shuffle=True), "varies from epoch to epoch"),
    ],
    ids=["tar", "filters", "mixture", "ranks", "workers"],
)
def test_what_is_not_counted_has_no_length(folder, create, message):
    loader = torchobj.DataLoader(create(folder), num_workers=2)
    with pytest.raises(TypeError, match=message):
        len(loader)
    assert list(loader)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_has_no_length_from_which_another_loader_would_count_its_batches(folder, kind):
    dataset = KINDS[kind](folder)
    assert dataset
    assert not isinstance(dataset, Sized)
    with pytest.raises(TypeError, match="has no len"):
        len(torch.utils.data.DataLoader(dataset))


class Twice(torchobj.ParquetIterableDataset):
    def __iter__(self):
        return (sample for sample in super().__iter__() for _ in range(2))


class Counted(Twice):
    def __len__(self):
        return 62


def test_a_subclass_with_other_samples_has_its_own_length_or_none(folder):
    loader = torchobj.DataLoader(Twice(f"file://{folder}/tables/", transform=row_id), batch_size=31)
    with pytest.raises(TypeError, match="'Twice' has no len"):
        len(loader)
    assert len(list(loader)) == 2
    loader = torchobj.DataLoader(Counted(f"file://{folder}/tables/", transform=row_id), batch_size=31)
    assert len(loader) == len(list(loader)) == 2


def of_one_rank_alone(rank, folder):
    """What `len` of loaders is on rank 1, and then on both ranks that have prepared the datasets."""
    dist.init_process_group("gloo")
    alone, found = [], []
    kinds = [kind for kind in KINDS if kind not in VARYING]
    loaders = [torchobj.DataLoader(KINDS[kind](folder), batch_size=4, collate_fn=list) for kind in kinds]
    if rank == 1:
        alone = [lengths_of(loader) for loader in loaders]
    dist.barrier()
    for loader in loaders:
        loader.dataset.prepare()
        found.append(lengths_of(loader))
    return dict(zip(kinds, alone, strict=False)), found, [sum(1 for _ in loader) for loader in loaders]


def lengths_of(loader):
    try:
        return len(loader)
    except TypeError as error:
        return str(error)


def test_a_rank_that_calls_len_alone_waits_for_no_other(folder):
    (_, *first), (alone, *second) = run_ranks(of_one_rank_alone, folder)
    assert first[0] == first[1]
    assert second[0] == second[1]
    # Nothing is listed for the epoch of a mixture.
    assert alone.pop("mixture") == second[0][-1]
    assert all("call dataset.prepare() before, on all ranks" in text for text in alone.values())


def test_rows_that_are_not_counted_cannot_be_divided_evenly(folder):
    dataset = rows(folder, filters=[("id", ">", 9)], uneven="drop")
    with pytest.raises(ConfigError, match="uneven='drop': the rows that filters= keeps are known only when they"):
        next(iter(dataset))


@pytest.mark.parametrize("suffix", ["parquet", "txt"])
def test_the_length_requests_what_the_pass_requests_and_nothing_more(bucket, control, suffix):
    for number in range(3):
        body = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": range(50)}), body, row_group_size=20)
        bucket.write(f"{number}.parquet", body.getvalue().to_pybytes())
        bucket.write(f"{number}.txt", b"text")

    def length(dataset):
        return len(torchobj.DataLoader(dataset, batch_size=None))

    def requests(*uses):
        dataset = torchobj.ParquetIterableDataset(f"{bucket.url}/", transform=row_id, config=bucket.config)
        if suffix == "txt":
            dataset = bucket.iterable_dataset(bucket.url, suffixes=suffix, transform=first_byte, config=bucket.config)
        control.clear_requests()
        found = [use(dataset) for use in uses]
        return found, sorted((request.operation, request.target) for request in control.requests())

    [samples], alone = requests(list)
    counts, with_length = requests(length, lambda dataset: len([*dataset]), length)
    assert set(counts) == {len(samples)}
    assert with_length == alone
    # The constructor of a list uses the length after the pass was begun.
    assert requests(lambda dataset: list(torchobj.DataLoader(dataset, batch_size=None))) == ([samples], alone)
