"""`torchobj bench --estimate`: what it prints is what an epoch requests."""

import io
import random
import tarfile

import pytest

import torchobj
from tests.support.disk_caches import new_gets, written
from torchobj import CacheOptions, StoreConfig, _torchobj
from torchobj.cli.estimate import list_target, parts_of, ways_to_read
from torchobj.cli.targets import parse_target
from torchobj.config import config_file
from torchobj.shards import TarIndex

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

MIB = 1 << 20


@pytest.fixture
def config(bucket):
    return bucket.config.replaced(hedge=False)


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
def test_an_epoch_of_objects_sends_what_is_estimated(cli, bucket, config, control):
    sizes = [0, 1, 1000, 16 * MIB - 1, 16 * MIB, 29 * MIB]
    for number, size in enumerate(sizes):
        bucket.write(f"data/{number}", bytes(size))
    listed, objects = cli.records("bench", "--estimate", f"{bucket.url}/data/")
    assert (listed["objects"], listed["bytes"], listed["lists"]) == (6, sum(sizes), 1)
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=size_of, config=config)
    new_gets(control)
    assert sum(map(int, torchobj.DataLoader(dataset, shuffle=True))) == sum(sizes)
    assert objects["gets"] == new_gets(control) == 1 + 1 + 1 + 1 + 3 + 7
    assert (objects["reads"], objects["bytes"], objects["start_gets"]) == ("objects", sum(sizes), 0)
    assert not {"dollars", "cached_gets", "cached_dollars"} & objects.keys()


def test_a_read_is_divided_as_settings_say():
    small = StoreConfig(part_bytes=5 * MIB, max_in_flight=2)
    assert [len(parts_of(size * MIB, small)) for size in (1, 16, 20, 1000)] == [1, 4, 4, 200]
    large = StoreConfig(part_bytes=64 * MIB)
    assert [len(parts_of(size * MIB, large)) for size in (15, 20, 65, 640)] == [1, 1, 2, 64 + 1]


def test_an_epoch_of_tar_shards_sends_what_is_estimated(cli, bucket, config, control):
    for number, sizes in enumerate([[MIB] * 9, [100_000] * 3, [40 * MIB, *[MIB] * 9]]):
        bucket.write(f"tar/{number}.tar", shard(sizes))
    url = f"{bucket.url}/tar/"
    _, in_order = cli.records("bench", "--estimate", url)
    new_gets(control)
    assert sum(1 for _ in torchobj.TarIterableDataset(url, config=config)) == 22
    assert in_order["gets"] == new_gets(control) == 3 + 1 + 13
    assert not in_order["is_bound"]
    cli.lines("index", url)
    _, in_order, shuffled = cli.records("bench", "--estimate", url)
    # The sample of 40 MiB is read by parts.
    gets = 21 + len(parts_of(40 * MIB, config))
    assert (shuffled["gets"], shuffled["start_gets"], shuffled["is_bound"]) == (gets, 3, True) and gets > 22
    assert len(TarIndex.load(f"{url}0.tar.index.parquet", config=config)) == 9
    dataset = torchobj.TarMapDataset(url, config=config)
    new_gets(control)
    assert len(dataset) == 22
    assert new_gets(control) == shuffled["start_gets"]
    keys = [sample["__key__"] for sample in torchobj.DataLoader(dataset, batch_size=None, shuffle=True)]
    assert len(keys) == 22
    # Neighbours below a MiB, of which the second shard has three, are read together if they follow each other.
    assert gets - 3 <= new_gets(control) <= gets


@pytest.mark.parametrize("columns", [None, "a,c"])
def test_an_epoch_of_parquet_files_sends_what_is_estimated(cli, bucket, config, control, columns):
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
    new_gets(control)
    assert dataset.schema.names == (names or ["a", "b", "c"])
    assert new_gets(control) == tables["start_gets"] == 2
    assert sum(batch.num_rows for batch in dataset) == 4800
    # Row groups of more than a MiB are requests of their own.
    assert new_gets(control) == tables["gets"] == (4 if columns is None else 8)
    assert tables["bytes"] == pytest.approx(4800 * 1000 * (2 if columns else 3), rel=0.02)


def test_a_large_row_group_is_several_requests(cli, bucket, config, control):
    file = io.BytesIO()
    values = random.Random(0)
    table = pyarrow.table({"a": [values.randbytes(100_000) for _ in range(240)]})
    parquet.write_table(table, file, compression="none", use_dictionary=False)
    bucket.write("large/0.parquet", file.getvalue())
    _, tables = cli.records("bench", "--estimate", f"{bucket.url}/large/")
    dataset = torchobj.ParquetIterableDataset(f"{bucket.url}/large/", config=config)
    assert dataset.schema.names == ["a"]
    new_gets(control)
    assert sum(1 for _ in dataset) == 240
    assert new_gets(control) == tables["gets"] == 5


def test_later_epochs_send_what_the_cache_does_not_have(cli, bucket, config, control, settings, tmp_path):
    for number in range(300):
        bucket.write(f"data/{number:03}", bytes([number % 256]) * 10_000)
    settings('cache = { folder = "cache", max_bytes = 1_048_576 }')
    _, half = cli.records("bench", "--estimate", f"{bucket.url}/data/")
    cache = CacheOptions(folder=tmp_path / "cache", max_bytes=MIB, min_free_bytes=0)
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=size_of, config=config.replaced(cache=cache))
    loader = torchobj.DataLoader(dataset, batch_size=20, shuffle=True)
    for epoch in range(2):
        new_gets(control)
        assert sum(map(len, loader)) == 300
        written()
        expected = half["cached_gets"] if epoch else half["gets"]
        assert new_gets(control) == pytest.approx(expected, rel=0.01)


def test_prices_of_the_configuration_file_give_dollars(cli, bucket, settings):
    for number in range(10):
        bucket.write(f"data/{number}", bytes(100))
    url = f"{bucket.url}/data/"
    done = cli.run("bench", "--estimate", url)
    assert done.exit_code == 0 and not {"$", "dollars", "prices", "later"} & {*done.stdout.split()}
    assert "prices" in done.stderr
    settings("prices = { get_per_1000 = 0.4, list_per_1000 = 5 }", 'cache = { folder = "cache" }')
    listed, objects = cli.records("bench", "--estimate", url)
    assert listed["dollars"] == pytest.approx(0.005)
    assert (objects["dollars"], objects["cached_dollars"]) == (pytest.approx(0.004), 0)
    lines = cli.lines("bench", "--estimate", url)
    assert lines[0] == f"{url}: 10 objects, 0.98 KiB, listed with 1 request ($0.0050)"
    assert lines[-1].split() == ["objects", "0", "10", "0.98", "KiB", "$0.0040", "0", "$0.00"]


@pytest.mark.parametrize("price", ["-0.1", "nan", "inf", '"0.1"', "true"])
def test_invalid_prices_are_refused(cli, bucket, settings, price):
    bucket.write("data/0", b"1")
    settings(f"prices = {{ get_per_1000 = {price} }}")
    assert "get_per_1000=" in cli.error("bench", "--estimate", f"{bucket.url}/data/")


def test_what_cannot_be_estimated_is_a_typed_error(cli, bucket):
    bucket.write("tables/0.parquet", b"no table")
    url = f"{bucket.url}/tables/"
    assert "not a Parquet file" in cli.error("bench", "--estimate", url)
    assert "no objects" in cli.error("bench", "--estimate", f"{bucket.url}/missing/")
    assert cli.run("bench", url, "--columns", "a").exit_code == 2
    for name in ("--concurrency", "--limit", "--seconds"):
        done = cli.run("bench", url, "--estimate", name, "3")
        assert done.exit_code == 2 and f"{name}: not with --estimate" in done.stderr
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": [1]}), file)
    bucket.write("tables/0.parquet", file.getvalue())
    bucket.write("tables/_temporary/0.parquet", b"no data")
    _, tables = cli.records("bench", "--estimate", url)
    assert tables["start_gets"] == 1
    done = cli.run("bench", "--estimate", url, "--columns", "b")
    assert "columns='b'" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("line", "gets"),
    [("", 0), ("admit = false, ", None), ("max_bytes = 1_048_576, ", 1), ("max_object_bytes = 1_048_576, ", 1)],
)
def test_later_epochs_are_named_where_the_cache_keeps_objects(cli, bucket, settings, line, gets):
    bucket.write("data/0", bytes(2 * MIB))
    bucket.write("data/1", bytes(1000))
    settings(f'cache = {{ {line}folder = "cache" }}')
    _, objects = cli.records("bench", "--estimate", f"{bucket.url}/data/")
    assert objects.get("cached_gets") == gets
    assert ("later, cache of" in cli.lines("bench", "--estimate", f"{bucket.url}/data/")[2]) == (gets is not None)


def test_local_files_have_no_later_epochs(cli, bucket, settings, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0").write_bytes(b"1")
    (tmp_path / "torchobj.toml").write_text('["file://"]\ncache = { folder = "cache" }')
    _, objects = cli.records("bench", "--estimate", f"file://{tmp_path}/data/")
    assert objects["gets"] == 1 and "cached_gets" not in objects


def test_objects_with_a_key_of_the_customer_have_no_later_epochs(cli, bucket, settings, tmp_path):
    bucket.write("data/0", b"1")
    (tmp_path / "key").write_bytes(bytes(range(32)))
    settings('cache = { folder = "cache" }')
    file = tmp_path / "torchobj.toml"
    file.write_text(file.read_text().replace("s3 = {", f's3 = {{ customer_key_file = "{tmp_path}/key",'))
    _, objects = cli.records("bench", "--estimate", f"{bucket.url}/data/")
    assert "customer_key_file" in file.read_text() and "cached_gets" not in objects


def test_files_of_the_cache_fill_what_is_estimated(cli, bucket, config, control, tmp_path):
    # A page more or less for the trailer; two blocks; parts.
    sizes = [0, 1, 3800, 4050, 65_536, 65_537 + 4096 * 3, 29 * MIB]
    for number, size in enumerate(sizes):
        bucket.write(f"data/{number}", bytes(size))
    cache = CacheOptions(folder=tmp_path / "cache", min_free_bytes=0)
    config = config.replaced(cache=cache)
    dataset = torchobj.ObjectMapDataset(f"{bucket.url}/data/", transform=size_of, config=config)
    assert sum(map(int, torchobj.DataLoader(dataset))) == sum(sizes)
    written()
    store = torchobj.Store(bucket.url, config=config)
    target = parse_target(f"{bucket.url}/data/", raw=False)
    [reads] = ways_to_read(list_target(target, store, "data/"), store, config, None)
    assert _torchobj.CacheFiles(tmp_path / "cache").used_bytes() == reads.disk_bytes
    new_gets(control)
    assert sum(map(int, torchobj.DataLoader(dataset))) == sum(sizes)
    assert new_gets(control) == reads.later(1 << 30).billed_gets == 0
