"""The length of an iterable dataset, and of its loader, is that of a full pass of each rank."""

import functools
import itertools
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import torchobj
from tests.support.long_tables import often
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

#: Those whose ranks have other row groups in each epoch.
VARYING = ("rows, shuffled", "batches of rows")

TABLE = [
    ("objects", 2, 3),
    ("rows, drop", 2, 2),
    ("batches of rows", 1, 2),
    *itertools.product(KINDS, (1, 2, 3), (0, 1, 3)),
]


@pytest.mark.parametrize(
    ("kind", "world_size", "workers"),
    often(3, [case for case in dict.fromkeys(TABLE) if case[0] not in VARYING or case[1] == 1]),
)
def test_the_length_is_that_of_a_full_pass(folder, kind, world_size, workers):
    for rank in range(world_size):
        dataset = KINDS[kind](folder, rank=rank, world_size=world_size)
        batch = {"batch_size": None}
        if not kind.startswith("batches"):
            batch = {"batch_size": 4, "drop_last": rank == 1}
        loader = torchobj.DataLoader(dataset, num_workers=workers, **batch)
        before = []
        for _ in range(2):
            before.append(len(loader))
            during = set()
            passed = sum(1 for _ in loader if during.add(len(loader)) is None)
            assert [passed] == before[-1:]
            assert during <= {passed}
        assert len(dataset) == len(list(dataset))


def test_a_dataset_that_every_worker_reads_has_its_length_in_each(folder):
    dataset = objects(folder, enable_sharding=False)
    assert len(dataset) == 17
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


def test_the_length_is_an_upper_bound_where_samples_are_skipped(folder):
    def odd(row):
        if row["id"] % 2:
            raise ValueError
        return row["id"]

    dataset = torchobj.ParquetIterableDataset(f"file://{folder}/tables/", transform=odd, on_error="skip")
    loader = torchobj.DataLoader(dataset, batch_size=None)
    assert (len(loader), len(list(loader))) == (31, 16)


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (tar, "without uneven= a pass does not read the index"),
        (functools.partial(rows, filters=[("id", ">", 9)]), "filters= keeps are known only when they are read"),
        (lambda folder: torchobj.interleave([objects(folder), range(3)]), "epoch_samples="),
        (functools.partial(rows, shuffle=True, rank=1, world_size=2), "varies from epoch to epoch"),
    ],
    ids=["tar", "filters", "mixture", "varying"],
)
def test_what_is_not_counted_has_no_length(folder, create, message):
    dataset = create(folder)
    assert dataset
    for sized in (dataset, torchobj.DataLoader(dataset), torch.utils.data.DataLoader(dataset)):
        with pytest.raises(TypeError, match=message):
            len(sized)
    assert list(dataset)


def test_rows_that_are_not_counted_cannot_be_divided_evenly(folder):
    dataset = rows(folder, filters=[("id", ">", 9)], uneven="drop")
    with pytest.raises(ConfigError, match="uneven='drop': the rows that filters= keeps are known only when they"):
        next(iter(dataset))


@pytest.mark.parametrize("kind", ["batches of rows", "rows, pad", "objects", "tar, resample"])
def test_the_loader_of_torch_does_not_warn_of_the_length(folder, kind):
    size = None if kind.startswith("batches") else 1
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(KINDS[kind](folder), batch_size=size, num_workers=workers)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            length = len(loader)
            assert len(list(loader)) == length


@pytest.mark.parametrize("suffix", ["parquet", "txt"])
def test_the_length_requests_what_the_pass_requests_and_nothing_more(bucket, control, suffix):
    for number in range(3):
        body = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": range(50)}), body, row_group_size=20)
        bucket.write(f"{number}.parquet", body.getvalue().to_pybytes())
        bucket.write(f"{number}.txt", b"text")

    def requests(*uses):
        dataset = torchobj.ParquetIterableDataset(f"{bucket.url}/", transform=row_id, config=bucket.config)
        if suffix == "txt":
            dataset = bucket.iterable_dataset(bucket.url, suffixes=suffix, transform=first_byte, config=bucket.config)
        control.clear_requests()
        found = [use(dataset) for use in uses]
        return found, sorted((request.operation, request.target) for request in control.requests())

    [samples], alone = requests(lambda dataset: [sample for sample in dataset])  # noqa: C416  list would use the length
    counts, with_length = requests(len, lambda dataset: len([*dataset]), len)
    assert set(counts) == {len(samples)}
    assert with_length == alone
    # The constructor of a list uses the length after the pass was begun.
    assert requests(list) == ([samples], alone)
