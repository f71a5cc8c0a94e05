"""`torchobj bench --estimate`: what it prints is what an epoch requests."""

import io
import random
import tarfile
import time

import pytest

import torchobj
from torchobj import CacheOptions, StoreConfig, _torchobj
from torchobj.cli.estimate import gets_of
from torchobj.config import config_file
from torchobj.shards import TarIndex

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

MIB = 1 << 20


@pytest.fixture
def config(bucket):
    return bucket.config.replaced(hedge=False)


@pytest.fixture
def gets(control):
    """Returns the number of reads of objects since the last call."""

    def count():
        number = sum(request.method == "GET" and bool(request.key) for request in control.requests())
        control.clear_requests()
        return number

    return count


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Adds lines to the configuration file of the command line."""

    monkeypatch.setattr(config_file, "_read", {})

    def add(*lines):
        file = tmp_path / "torchobj.toml"
        file.write_text("\n".join([file.read_text(), *lines]))
        config_file._read.clear()

    return add


def shard(sizes):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, size in enumerate(sizes):
            member = tarfile.TarInfo(f"{number:05}.bin")
            member.size = size
            tar.addfile(member, io.BytesIO(bytes(size)))
    return file.getvalue()


def size_of(reader):
    return len(reader.read())


@pytest.mark.providers("s3", "gs")
def test_an_epoch_of_objects_sends_what_is_estimated(cli, bucket, config, gets):
    sizes = [0, 1, 1000, 16 * MIB - 1, 16 * MIB, 29 * MIB]
    for number, size in enumerate(sizes):
        bucket.write(f"data/{number}", bytes(size))
    listed, objects = cli.records("bench", "--estimate", f"{bucket.url}/data/")
    assert (listed["objects"], listed["bytes"], listed["lists"]) == (6, sum(sizes), 1)
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=size_of, config=config)
    gets()
    assert sum(map(int, torchobj.DataLoader(dataset, shuffle=True))) == sum(sizes)
    assert objects["gets"] == gets() == 1 + 1 + 1 + 1 + 3 + 7
    assert (objects["reads"], objects["bytes"], objects["start_gets"]) == ("objects", sum(sizes), 0)
    assert "dollars" not in objects and objects["cached_gets"] == 0


def test_a_read_is_divided_as_settings_say():
    small = StoreConfig(part_bytes=5 * MIB, max_in_flight=2)
    assert [gets_of(size * MIB, small) for size in (1, 16, 20, 1000)] == [1, 4, 4, 200]
    large = StoreConfig(part_bytes=64 * MIB)
    assert [gets_of(size * MIB, large) for size in (15, 20, 65, 640)] == [1, 1, 2, 64 + 1]


def test_an_epoch_of_tar_shards_sends_what_is_estimated(cli, bucket, config, gets):
    for number, sizes in enumerate([[MIB] * 9, [100_000] * 3, [3 * MIB, 10]]):
        bucket.write(f"tar/{number}.tar", shard(sizes))
    url = f"{bucket.url}/tar/"
    _, in_order = cli.records("bench", "--estimate", url)
    gets()
    assert sum(1 for _ in torchobj.TarIterableDataset(url, config=config)) == 14
    assert in_order["gets"] == gets() == 3 + 1 + 1
    assert not in_order["is_bound"]
    cli.lines("index", url)
    _, in_order, shuffled = cli.records("bench", "--estimate", url)
    assert (shuffled["gets"], shuffled["start_gets"], shuffled["is_bound"]) == (14, 3, True)
    assert len(TarIndex.load(f"{url}0.tar.index.parquet", config=config)) == 9
    dataset = torchobj.TarMapDataset(url, config=config)
    gets()
    assert len(dataset) == 14
    assert gets() == shuffled["start_gets"]
    keys = [sample["__key__"] for sample in torchobj.DataLoader(dataset, batch_size=None, shuffle=True)]
    assert len(keys) == 14
    # Neighbours below a MiB, of which the second shard has three, are read together if they follow each other.
    assert 14 - 3 <= gets() <= shuffled["gets"]


@pytest.mark.parametrize("columns", [None, "a,c"])
def test_an_epoch_of_parquet_files_sends_what_is_estimated(cli, bucket, config, gets, columns):
    values = random.Random(0)
    for number in range(2):
        rows = {name: pyarrow.array([values.randbytes(1000) for _ in range(2400)]) for name in "abc"}
        file = io.BytesIO()
        parquet.write_table(pyarrow.table(rows), file, row_group_size=1200, compression="none", use_dictionary=False)
        bucket.write(f"tables/{number}.parquet", file.getvalue())
    url = f"{bucket.url}/tables/"
    options = () if columns is None else ("--columns", columns)
    _, tables = cli.records("bench", "--estimate", url, *options)
    names = None if columns is None else columns.split(",")
    dataset = torchobj.ParquetIterableDataset(url, names, batch_rows=100, format="arrow", config=config)
    gets()
    assert dataset.schema.names == (names or ["a", "b", "c"])
    assert gets() == tables["start_gets"] == 2
    assert sum(batch.num_rows for batch in dataset) == 4800
    # Row groups of more than a MiB are requests of their own.
    assert gets() == tables["gets"] == (4 if columns is None else 8)
    assert tables["bytes"] == pytest.approx(4800 * 1000 * (2 if columns else 3), rel=0.02)


def test_a_large_row_group_is_several_requests(cli, bucket, config, gets):
    file = io.BytesIO()
    values = random.Random(0)
    table = pyarrow.table({"a": [values.randbytes(100_000) for _ in range(240)]})
    parquet.write_table(table, file, compression="none", use_dictionary=False)
    bucket.write("large/0.parquet", file.getvalue())
    _, tables = cli.records("bench", "--estimate", f"{bucket.url}/large/")
    dataset = torchobj.ParquetIterableDataset(f"{bucket.url}/large/", config=config)
    assert dataset.schema.names == ["a"]
    gets()
    assert sum(1 for _ in dataset) == 240
    assert gets() == tables["gets"] == 5


def test_later_epochs_send_what_the_cache_does_not_have(cli, bucket, config, gets, settings, tmp_path):
    for number in range(300):
        bucket.write(f"data/{number:03}", bytes([number % 256]) * 10_000)
    settings("cache = { max_bytes = 1_048_576 }")
    _, half = cli.records("bench", "--estimate", f"{bucket.url}/data/")
    cache = CacheOptions(folder=tmp_path / "cache", max_bytes=MIB, min_free_bytes=0)
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=size_of, config=config.replaced(cache=cache))
    loader = torchobj.DataLoader(dataset, batch_size=20, shuffle=True)
    for epoch in range(2):
        gets()
        assert sum(map(len, loader)) == 300
        while _torchobj.request_stats()["cache_pending"]:
            time.sleep(0.001)
        expected = half["cached_gets"] if epoch else half["gets"]
        assert gets() == pytest.approx(expected, rel=0.01)


def test_prices_of_the_configuration_file_give_dollars(cli, bucket, settings):
    for number in range(10):
        bucket.write(f"data/{number}", bytes(100))
    url = f"{bucket.url}/data/"
    done = cli.run("bench", "--estimate", url)
    assert done.exit_code == 0 and "$" not in done.stdout and "prices" in done.stderr
    settings("prices = { get_per_1000 = 0.4, list_per_1000 = 5 }")
    listed, objects = cli.records("bench", "--estimate", url)
    assert listed["dollars"] == pytest.approx(0.005)
    assert (objects["dollars"], objects["cached_dollars"]) == (pytest.approx(0.004), 0)
    lines = cli.lines("bench", "--estimate", url)
    assert lines[0] == f"{url}: 10 objects, 0.98 KiB, listed with 1 request ($0.0050)"
    assert lines[-1].split() == ["objects", "0", "10", "0.98", "KiB", "$0.0040", "0", "$0.00"]


@pytest.mark.parametrize("price", ["-0.1", "nan", "inf", '"0.1"', "true"])
def test_prices_that_are_none_are_refused(cli, bucket, settings, price):
    bucket.write("data/0", b"1")
    settings(f"prices = {{ get_per_1000 = {price} }}")
    assert "get_per_1000=" in cli.error("bench", "--estimate", f"{bucket.url}/data/")


def test_what_cannot_be_estimated_is_a_typed_error(cli, bucket):
    bucket.write("tables/0.parquet", b"no table")
    url = f"{bucket.url}/tables/"
    assert "not a Parquet file" in cli.error("bench", "--estimate", url)
    assert "no objects" in cli.error("bench", "--estimate", f"{bucket.url}/missing/")
    assert cli.run("bench", url, "--columns", "a").exit_code == 2
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": [1]}), file)
    bucket.write("tables/0.parquet", file.getvalue())
    bucket.write("tables/_temporary/0.parquet", b"no data")
    _, tables = cli.records("bench", "--estimate", url)
    assert tables["start_gets"] == 1
    assert "columns='b'" in cli.error("bench", "--estimate", url, "--columns", "b")
