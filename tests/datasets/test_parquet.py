"""Rows of Parquet files: the same as pyarrow reads from local files, divided, shuffled and resumed."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import torchobj
from torchobj.datasets.sharding import Shard
from torchobj.exceptions import ConfigError, ObjectNotFoundError, ParquetError

FILES, GROUP = 5, 60


def table_of(number):
    rows = 140 + number * 27
    return pa.table(
        {
            "id": np.arange(rows) + number * 10_000,
            "x": np.random.default_rng(number).random(rows, dtype=np.float32),
            "text": [f"{number}-{row}" for row in range(rows)],
            "vector": [[row, row + 1] for row in range(rows)],
            "s": [{"a": row, "b": str(row)} for row in range(rows)],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parquet")
    for number in range(FILES):
        pq.write_table(table_of(number), path / f"part-{number}.parquet", row_group_size=GROUP)
    return path


def dataset(folder, *args, **options):
    return torchobj.ParquetIterableDataset(f"file://{folder}/", *args, **options)


def ids(samples):
    return [int(number) for sample in samples for number in np.atleast_1d(sample["id"])]


def test_rows_equal_those_that_pyarrow_reads(folder):
    expected = pq.read_table(folder).to_pylist()
    assert list(dataset(folder)) == expected
    assert list(dataset(folder, columns=["text", "id"])) == [{n: row[n] for n in ("id", "text")} for row in expected]
    assert [row["s"] for row in dataset(folder, columns=["s.a"])] == [{"a": row["s"]["a"]} for row in expected]


def test_batches_cross_row_groups_and_only_the_last_is_smaller(folder):
    whole = pq.read_table(folder)
    batches = list(dataset(folder, batch_rows=64))
    assert [len(batch["id"]) for batch in batches[:-1]] == [64] * (len(whole) // 64)
    assert torch.equal(torch.cat([batch["id"] for batch in batches]), torch.from_numpy(whole["id"].to_numpy()))
    assert batches[0]["x"].dtype == torch.float32
    assert [each.tolist() for each in batches[0]["vector"][:2]] == [[0, 1], [1, 2]]
    assert batches[0]["text"] == whole["text"][:64].to_pylist()
    arrow = list(dataset(folder, batch_rows=200, format="arrow"))
    assert pa.concat_tables(arrow).equals(whole)


def test_the_types_of_a_batch_depend_on_those_of_the_columns_and_not_on_the_values():
    columns = {
        "a": [1.5, None, 3.0],
        "b": [[1], [2, 3], None],
        "c": [True, False, True],
        "d": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)),
    }
    with torchobj.ObjectWriter("memory://parquet-nulls/x.parquet") as file:
        pq.write_table(pa.table(columns), file)
    first, second = torchobj.ParquetIterableDataset("memory://parquet-nulls/", batch_rows=2)
    assert first["a"][0] == 1.5
    assert first["a"][1].isnan()
    assert second["a"].tolist() == [3.0]
    assert [each.tolist() for each in first["b"]] == [[1], [2, 3]]
    assert second["b"] == [None]
    assert torch.equal(first["c"], torch.tensor([True, False]))
    assert torch.equal(first["d"], torch.tensor([[1, 2], [3, 4]], dtype=torch.int16))


def test_missing_integers_in_a_tensor_are_an_error_that_names_the_column():
    with torchobj.ObjectWriter("memory://parquet-integers/x.parquet") as file:
        pq.write_table(pa.table({"n": [1, None, 3]}), file)
    url = "memory://parquet-integers/"
    with pytest.raises(ParquetError, match="column 'n': 1 of 3 values are missing"):
        list(torchobj.ParquetIterableDataset(url, batch_rows=9))
    [table] = torchobj.ParquetIterableDataset(url, batch_rows=9, format="arrow")
    assert table["n"].to_pylist() == [1, None, 3]


def test_columns_in_another_order_and_without_values_are_those_of_the_first_file():
    put("order/a.parquet", parquet_bytes(x=[1], y=["a"]))
    put("order/b.parquet", parquet_bytes(y=pa.nulls(1), x=[2]))
    rows = list(torchobj.ParquetIterableDataset("memory://parquet-bad/order/"))
    assert rows == [{"x": 1, "y": "a"}, {"x": 2, "y": None}]
    assert list(rows[1]) == ["x", "y"]


def test_a_column_type_in_the_footer_that_differs_from_the_schema_is_an_error_and_not_the_end_of_the_process():
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a" * 9, "b" * 9] * 50}), out, use_dictionary=False, compression="none")
    data = bytearray(out.getvalue().to_pybytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    kinds = set()
    # Field 1 of the metadata of a column is its type: 6 (bytes) in zigzag encoding becomes 5 (double).
    for at in (at for at in range(footer, len(data) - 9) if data[at : at + 2] == b"\x15\x0c"):
        damaged = bytearray(data)
        damaged[at + 1] = 10
        put("types/x.parquet", bytes(damaged))
        try:
            list(torchobj.ParquetIterableDataset("memory://parquet-bad/types/"))
        except ParquetError as error:
            kinds.add(type(error))
    assert kinds == {ParquetError}


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_workers_yield_each_row_once_shuffled_and_find_every_row_group_announced(folder, context):
    loader = torchobj.DataLoader(
        dataset(folder, shuffle=True, shuffle_buffer=100, seed=3),
        batch_size=16,
        num_workers=2,
        multiprocessing_context=context,
    )
    found = ids(loader)
    expected = pq.read_table(folder)["id"].to_pylist()
    assert found != expected
    assert sorted(found) == expected
    # The first row group of each worker is needed at once.
    assert loader.stats().misses <= 2


def test_each_epoch_has_its_own_order_and_a_seed_repeats_it(folder):
    samples = dataset(folder, shuffle=True, shuffle_buffer=50)
    first = ids(samples)
    assert ids(samples) == first
    samples.set_epoch(1)
    assert ids(samples) != first


@pytest.mark.parametrize("options", [{}, {"uneven": "pad"}, {"shuffle_buffer": 70}, {"batch_rows": 37}])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_pass_continues_exactly_at_random_points(folder, options, workers):
    size = None if "batch_rows" in options else 16

    def loader():
        return torchobj.DataLoader(
            dataset(folder, shuffle=True, seed=5, **options), batch_size=size, num_workers=workers
        )

    whole = [ids([batch]) for batch in loader()]
    drawn = random.Random(11)
    for stop in sorted(drawn.randrange(1, len(whole)) for _ in range(2 if workers else 20)):
        interrupted = loader()
        batches = iter(interrupted)
        head = [ids([next(batches)]) for _ in range(stop)]
        state = interrupted.state_dict()
        resumed = loader()
        resumed.load_state_dict(state)
        assert head + [ids([batch]) for batch in resumed] == whole, stop


def test_a_state_of_other_shards_or_columns_is_refused(folder):
    samples = dataset(folder, shuffle=True)
    next(iter(samples))
    state = samples.state_dict()
    other = dataset(folder, columns=["id"], shuffle=True)
    other.load_state_dict(state)
    with pytest.raises(ConfigError, match="cannot be resumed"):
        iter(other)


@pytest.mark.parametrize(("uneven", "rows"), [("drop", 485), ("pad", 485), (None, None)])
def test_two_ranks_yield_the_same_number_of_rows_if_asked_to(folder, uneven, rows, monkeypatch):
    found = []
    for rank in range(2):
        samples = dataset(folder, uneven=uneven)
        monkeypatch.setattr(samples, "_shard", lambda rank=rank: Shard(rank, 2))
        found.append(ids(samples))
    if rows is not None:
        assert [len(part) for part in found] == [rows, rows]
    assert sorted(found[0] + found[1]) == pq.read_table(folder)["id"].to_pylist()


def put(name, data):
    torchobj.Store("memory://parquet-bad").put(name, data)


def parquet_bytes(**columns):
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return out.getvalue().to_pybytes()


def test_a_file_of_another_schema_is_named():
    put("schema/a.parquet", parquet_bytes(a=[1]))
    put("schema/b.parquet", parquet_bytes(a=["text"]))
    with pytest.raises(
        ParquetError, match=r"b\.parquet: its columns are a: string; those of .*a\.parquet are a: int64"
    ):
        list(torchobj.ParquetIterableDataset("memory://parquet-bad/schema/"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a Parquet file"),
        (b"x" * 100, "not a Parquet file"),
        (b"PAR1" + b"\xff" * 20 + b"\xff\xff\xff\x7fPAR1", "its footer has 2147483655 bytes"),
        (b"PAR1" + b"\x01" * 50 + b"\x20\x00\x00\x00PAR1", "cannot be read"),
    ],
)
def test_what_is_not_a_parquet_file_is_an_error_that_names_it(data, message):
    put("garbage/x.parquet", data)
    with pytest.raises(ParquetError, match=rf"garbage/x\.parquet: .*{message}"):
        list(torchobj.ParquetIterableDataset("memory://parquet-bad/garbage/"))


def test_a_damaged_row_group_is_skipped_and_counted_and_the_others_are_read():
    data = bytearray()
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": np.arange(900)}), out, row_group_size=300, compression="zstd", use_dictionary=False)
    data = bytearray(out.getvalue().to_pybytes())
    start = pq.read_metadata(pa.BufferReader(bytes(data))).row_group(1).column(0).data_page_offset
    data[start : start + 200] = b"\xff" * 200
    put("damaged/x.parquet", bytes(data))
    url = "memory://parquet-bad/damaged/"
    with pytest.raises(ParquetError, match=r"x\.parquet: row group 1 cannot be decoded"):
        list(torchobj.ParquetIterableDataset(url))
    samples = torchobj.ParquetIterableDataset(url, on_error="skip")
    assert ids(samples) == [*range(300), *range(600, 900)]
    assert samples.failed_samples == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": "id"}, "columns"),
        ({"columns": []}, "columns"),
        ({"batch_rows": 0}, "batch_rows"),
        ({"format": "pandas"}, "format"),
        ({"format": "arrow"}, "without batch_rows"),
        ({"batch_rows": 5, "shuffle_buffer": 5}, "shuffle_buffer"),
        ({"uneven": "resample"}, "uneven"),
        ({"shuffle": 1}, "shuffle"),
        ({"seed": -1}, "seed"),
        ({"on_error": "replace"}, "on_error"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        torchobj.ParquetIterableDataset("memory://parquet-bad/", **arguments)


def test_missing_columns_and_files_are_errors(folder):
    with pytest.raises(ConfigError, match=r"columns='none': .*part-0.parquet has the columns id, x"):
        list(dataset(folder, columns=["none"]))
    with pytest.raises(ConfigError, match="no object below it ends with"):
        list(torchobj.ParquetIterableDataset("memory://parquet-bad/empty/"))
    with pytest.raises(ObjectNotFoundError, match="b.parquet"):
        list(torchobj.ParquetIterableDataset("memory://parquet-bad/none/b.parquet"))
