"""Rows of Parquet files: the same as pyarrow reads from local files, divided, shuffled and resumed."""

import itertools
import os
import random
import re
import resource
import signal
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import torchobj
from tests.support.long_tables import often
from torchobj.datasets.containers import parquet
from torchobj.exceptions import ConfigError, ObjectNotFoundError, ParquetError
from torchobj.ranks.sharding import Shard

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


def test_a_child_that_is_forked_while_a_thread_reads_footers_reads_its_own(folder, monkeypatch):
    open_file, reads, forked = parquet.open_file, threading.Event(), threading.Event()

    def open_slowly(*args):
        reads.set()
        forked.wait()
        return open_file(*args)

    other, own = dataset(folder), dataset(folder)
    monkeypatch.setattr(parquet, "open_file", open_slowly)
    thread = threading.Thread(target=lambda: other.schema)
    thread.start()
    reads.wait()
    monkeypatch.setattr(parquet, "open_file", open_file)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os._exit(int(own.schema.names != ["id", "x", "text", "vector", "s"]))
    _, status = os.waitpid(child, 0)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


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
    first, second = ids(samples), ids(samples)
    assert first != second
    samples.set_epoch(0)
    assert ids(samples) == first
    samples.set_epoch(1)
    assert ids(samples) == second


@pytest.mark.parametrize(
    ("options", "workers"),
    often(2, itertools.product([{"shuffle_buffer": 70}, {"batch_rows": 37}, {}, {"uneven": "pad"}], [0, 2])),
)
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


def rows_of(name, **options):
    return list(torchobj.ParquetIterableDataset(f"memory://parquet-bad/{name}/", **options))


def test_a_column_whose_name_has_a_dot_precedes_a_nested_one():
    flat = {"user.id": [1, 2], "user": [{"id": 5, "name.first": "x"}, {"id": 6, "name.first": "y"}], "a.b": [1.5, 2.5]}
    put("dots/a.parquet", parquet_bytes(**flat))
    assert rows_of("dots") == pa.table(flat).to_pylist()
    assert rows_of("dots", columns=["user.id"]) == [{"user.id": 1}, {"user.id": 2}]
    assert rows_of("dots", columns=["user"]) == [{"user": value} for value in flat["user"]]
    assert rows_of("dots", columns=["user.name.first"]) == [{"user": {"name.first": name}} for name in "xy"]
    assert rows_of("dots", columns=["a.b", "user.id"], batch_rows=2)[0]["a.b"].tolist() == [1.5, 2.5]
    for absent in ("a", "user.nam", "user.id.x", "b", "user.", ".user"):
        with pytest.raises(ConfigError, match=rf"columns='{absent}': .*dots/a\.parquet has the columns user\.id, user"):
            rows_of("dots", columns=[absent])


def test_nested_columns_below_names_with_dots_are_read_by_their_paths():
    flat = {"a.b": [{"c": 1, "d": [{"e": 2}]}], "a": [{"b.c": 3, "b": 4}]}
    put("dots-nested/a.parquet", parquet_bytes(**flat))
    assert rows_of("dots-nested", columns=["a.b.c"]) == [{"a.b": {"c": 1}}]
    assert rows_of("dots-nested", columns=["a.b.d.list.element.e"]) == [{"a.b": {"d": [{"e": 2}]}}]
    assert rows_of("dots-nested", columns=["a"]) == [{"a": {"b.c": 3, "b": 4}}]


def test_a_requested_column_that_is_missing_in_a_later_file_is_an_error_that_names_both():
    put("later/a.parquet", parquet_bytes(**{"user.id": [1]}))
    put("later/b.parquet", parquet_bytes(user=[2]))
    with pytest.raises(ConfigError, match=r"columns='user\.id': .*later/b\.parquet has the columns user"):
        rows_of("later", columns=["user.id"])


def array_of(values, kind):
    return pa.array(values, kind)


TEXTS, MORE = (pa.dictionary(kind, pa.string()) for kind in (pa.int8(), pa.int16()))


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (array_of([1], pa.int32()), array_of([2**40], pa.int64()), pa.int64()),
        (array_of([2**40], pa.int64()), array_of([1, None], pa.int16()), pa.int64()),
        (array_of([1], pa.uint8()), array_of([-1], pa.int8()), pa.int16()),
        (array_of([1.5], pa.float32()), array_of([2.5], pa.float64()), pa.float64()),
        (array_of(["a"], pa.string()), array_of(["b"], pa.large_string()), pa.large_string()),
        (array_of(["a"], TEXTS), array_of(["b"], MORE), pa.dictionary(pa.int16(), pa.string())),
        (array_of(["a"], TEXTS), array_of(["b"], pa.string()), pa.string()),
        (array_of([], pa.null()), array_of(["b"], TEXTS), TEXTS),
        (array_of([1], pa.decimal128(5, 2)), array_of([2], pa.decimal128(9, 3)), pa.decimal128(9, 3)),
        (array_of([[1]], pa.list_(pa.int32())), array_of([[2]], pa.list_(pa.int64())), pa.list_(pa.int64())),
        (
            array_of([{"a": 1, "b": "x"}], pa.struct({"a": pa.int32(), "b": pa.string()})),
            array_of([{"b": "y", "a": 2}], pa.struct({"b": pa.string(), "a": pa.int64()})),
            pa.struct({"a": pa.int64(), "b": pa.string()}),
        ),
    ],
    ids=str,
)
def test_columns_that_differ_in_their_width_have_one_type_in_all_batches(first, second, kind):
    for order in ([first, second], [second, first]):
        for number, column in enumerate(order):
            put(f"widths/{number}.parquet", parquet_bytes(c=column))
        samples = torchobj.ParquetIterableDataset("memory://parquet-bad/widths/", batch_rows=9, format="arrow")
        [table] = samples
        expected = [value for column in order for value in column.to_pylist()]
        assert table["c"].to_pylist() == expected
        assert table.schema == samples.schema
        if kind.num_fields < 2:
            assert table["c"].type == kind
        if None not in expected:
            [batch] = rows_of("widths", batch_rows=9)
            assert len(batch["c"]) == len(expected)
        assert [row["c"] for row in rows_of("widths")] == expected


def test_a_batch_spans_dictionaries_that_together_exceed_their_index_type():
    for number in range(3):
        values = pa.array([f"{number}-{row}" for row in range(100)]).cast(TEXTS)
        put(f"categories/{number}.parquet", parquet_bytes(c=values))
    [batch] = rows_of("categories", batch_rows=300)
    assert (
        batch["c"] == [row["c"] for row in rows_of("categories")] == [f"{n}-{r}" for n in range(3) for r in range(100)]
    )


def test_batches_span_files_whose_nullability_and_metadata_differ():
    required = pa.schema([pa.field("x", pa.int64(), nullable=False, metadata={"a": "b"})], metadata={"c": "d"})
    for number, table in enumerate((pa.table({"x": [1]}, schema=required), pa.table({"x": [2]}))):
        out = pa.BufferOutputStream()
        pq.write_table(table, out)
        put(f"nullability/{number}.parquet", out.getvalue().to_pybytes())
    put("nullability/2.parquet", parquet_bytes(x=pa.nulls(1)))
    [table] = rows_of("nullability", batch_rows=9, format="arrow")
    assert table["x"].to_pylist() == [1, 2, None]
    [batch] = rows_of("nullability", batch_rows=2, on_error="skip")
    assert batch["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array([1]), pa.array([1.5])),
        (pa.array(["a"]), pa.array([b"a"])),
        (pa.array([{"a": 1}]), pa.array([{"a": 1, "b": 2}])),
        (pa.array([[1]], pa.list_(pa.int8(), 1)), pa.array([[1, 2]], pa.list_(pa.int8(), 2))),
        (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("us", "UTC"))),
        (pa.nulls(1), pa.array(["text"])),
    ],
    ids=str,
)
def test_columns_of_different_kinds_stay_an_error(first, second):
    for number, column in enumerate((pa.nulls(1), first, second, pa.array([7], pa.int8()))):
        put(f"kinds/{number}.parquet", parquet_bytes(c=column))
    with pytest.raises(ParquetError, match=r"kinds/[23]\.parquet: its columns are c: .*kinds/0\.parquet are c: "):
        rows_of("kinds")


def test_a_column_that_a_file_has_twice_is_an_error_that_names_the_file():
    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"]), out)
    put("twice/a.parquet", out.getvalue().to_pybytes())
    for columns in (None, ["x"]):
        with pytest.raises(ParquetError, match=r"twice/a\.parquet: has 2 columns 'x'"):
            rows_of("twice", columns=columns)
    assert rows_of("twice", columns=["y"]) == [{"y": 3}]


def write_footer(data, *, replaced):
    """A Parquet file in whose footer each occurrence of some bytes is replaced, with the length of the new footer."""
    end = len(data) - 8
    begin = end - int.from_bytes(data[end : end + 4], "little")
    footer = data[begin:end]
    for old, new in replaced:
        assert old in footer
        footer = footer.replace(old, new)
    return data[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def number(value, field):
    """A field of Thrift's compact protocol whose number is `field` more than that before it: 64 bits."""
    zigzag, out = value << 1, bytearray([field << 4 | 6])
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    return bytes([*out, zigzag])


@pytest.mark.parametrize("rows", [2**63 - 1, 2**40, 2**24 + 1])
@pytest.mark.parametrize(
    "options", [{"uneven": "drop"}, {"uneven": "pad", "on_error": lambda *_: None}, {"batch_rows": 10}]
)
def test_a_forged_number_of_rows_is_an_error_that_names_the_file(rows, options):
    data = parquet_bytes(c=range(1000))
    for name in ("a", "c"):
        put(f"forged/{name}.parquet", data)
    # The number of rows of the file, of the row group, and of the values of its column.
    in_file, in_group, values = number(1000, 1), number(1000, 1), number(1000, 1)
    assert in_file == in_group == values
    put("forged/b.parquet", write_footer(data, replaced=[(in_file, number(rows, 1))]))
    with pytest.raises(ParquetError, match=r"forged/b\.parquet: .*rows"):
        rows_of("forged", **options)


@pytest.mark.parametrize("wrong", [999, 1001, 8191])
def test_numbers_of_rows_that_contradict_each_other_are_an_error(wrong):
    data = parquet_bytes(c=range(1000))
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [at for at in range(begin, len(data)) if data[at : at + 3] == number(1000, 1)]
    # Those of the file, of the row group, and of the values of its column.
    assert len(places) == 3
    for at in places:
        put("contradicting/a.parquet", data[:at] + number(wrong, 1) + data[at + 3 :])
        with pytest.raises(ParquetError, match=r"contradicting/a\.parquet: .*rows"):
            rows_of("contradicting", uneven="drop")


def dictionary_bomb(rows=20_000, value=1 << 20):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * value])
    out = pa.BufferOutputStream()
    options = {"compression": "zstd", "write_statistics": False, "store_schema": False}
    pq.write_table(pa.table({"t": texts}), out, **options)
    return out.getvalue().to_pybytes()


def test_a_small_dictionary_that_decodes_to_more_than_memory_is_an_error():
    data = dictionary_bomb()
    assert len(data) < 2000
    put("bomb/a.parquet", data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ParquetError, match=r"bomb/a\.parquet: row group 0 cannot be decoded: .*more than 2147483648"):
        rows_of("bomb")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("is_list", [False, True])
def test_a_large_row_group_with_one_long_value_is_read(monkeypatch, compression, is_list):
    monkeypatch.setattr("torchobj.parquet.row_groups._MAX_DECODED_BYTES", 2_500_000)
    monkeypatch.setattr("torchobj.parquet.row_groups._MAX_DECODED_RATIO", 0)
    texts = [*("ab" * (row % 7) for row in range(4000)), "y" * (100 if is_list else 50_000)]
    column = pa.array([[text, text] for text in texts] if is_list else texts)
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"t": column, "n": range(4001)}), out, compression=compression)
    put("skewed/a.parquet", out.getvalue().to_pybytes())
    assert [row["t"] for row in rows_of("skewed")] == column.to_pylist()
    monkeypatch.setattr("torchobj.parquet.row_groups._MAX_DECODED_BYTES", 90_000)
    with pytest.raises(ParquetError, match=r"row group 0 cannot be decoded: .*more than 90000 bytes"):
        rows_of("skewed")


def test_texts_that_repeat_the_start_of_the_text_before_are_read_and_bounded(monkeypatch):
    monkeypatch.setattr("torchobj.parquet.row_groups._MAX_DECODED_BYTES", 1_000_000)
    texts = [f"s3://bucket/folder/{row:06}" for row in range(5000)]
    for name, values in (("good", texts), ("bad", ["p" * 2000 + str(row) for row in range(5000)])):
        out = pa.BufferOutputStream()
        options = {"use_dictionary": False, "column_encoding": {"t": "DELTA_BYTE_ARRAY"}}
        pq.write_table(pa.table({"t": values}), out, **options)
        put(f"{name}-prefixes/a.parquet", out.getvalue().to_pybytes())
    assert [row["t"] for row in rows_of("good-prefixes")] == texts
    with pytest.raises(ParquetError, match=r"bad-prefixes/a\.parquet: row group 0 .*more than 1000000 bytes"):
        rows_of("bad-prefixes")


def test_files_below_a_prefix_that_are_not_data_are_not_read_and_are_counted_in_the_repr(caplog):
    for key in ("a.parquet", "_temporary/b.parquet", ".part.parquet", "_day=1/c.parquet"):
        put(f"not-data/{key}", parquet_bytes(key=[key]))
    samples = torchobj.ParquetIterableDataset("memory://parquet-bad/not-data/")
    assert [row["key"] for row in samples] == ["_day=1/c.parquet", "a.parquet"]
    assert "2 names that begin with '_' or '.' skipped, such as memory://parquet-bad/not-data/.part.parquet" in repr(
        samples
    )
    assert len(list(samples)) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("_delta_log/00000000000000000000.json", r"a table of Delta Lake.*deltalake\.DeltaTable"),
        ("_delta_log/00000000000000000010.checkpoint.parquet", r"a table of Delta Lake.*deltalake\.DeltaTable"),
        ("metadata/v1.metadata.json", "a table of Iceberg.*plan_files"),
    ],
)
def test_a_table_with_snapshots_is_named_once(log, advice, caplog):
    name = f"snapshots-{log.rpartition('/')[2]}"
    put(f"{name}/table/{log}", b"{}")
    put(f"{name}/table/data/a.parquet", parquet_bytes(a=[1]))
    put(f"{name}/labels.json", b"{}")
    samples = torchobj.ParquetIterableDataset(f"memory://parquet-bad/{name}/")
    assert list(samples) == list(samples) == [{"a": 1}]
    messages = [record.getMessage() for record in caplog.records if "other snapshots" in record.getMessage()]
    assert len(messages) == 1
    assert re.search(advice, messages[0])


def test_labels_beside_parquet_files_are_no_table(caplog):
    put("labels/metadata/labels.json", b"{}")
    put("labels/a.parquet", parquet_bytes(a=[1]))
    assert len(rows_of("labels")) == 1
    assert not caplog.records
