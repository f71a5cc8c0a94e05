"""`RowFilter`: the columns that an expression uses, and what statistics say of row groups."""

import math
import struct

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.parquet.test_pages import footer_of, with_footer
from torchobj.exceptions import ConfigError
from torchobj.parquet.row_filter import RowFilter
from torchobj.parquet.row_groups import open_file

SCHEMA = pa.schema(
    [(f"c{number}", pa.int64()) for number in range(50)]
    + [("s", pa.struct([("a", pa.int64())])), ("a.b", pa.string()), ("t", pa.fixed_shape_tensor(pa.float32(), [2]))]
)


@pytest.mark.parametrize(
    ("filters", "columns"),
    [
        ([("c0", ">", 1)], {"c0"}),
        ([[("c49", ">", 1), ("c3", "=", 2)], [("c7", "in", [1, 2])]], {"c3", "c7", "c49"}),
        ((ds.field("c5") > ds.field("c4")) | ds.field("s", "a").is_null(), {"c4", "c5", "s"}),
        (ds.field("a.b") == "x", {"a.b"}),
        (ds.field("a.b") == "FieldPath(0)", {"a.b"}),
        (ds.field("t").is_valid(), {"t"}),
        (ds.scalar(value=True), set()),
    ],
    ids=["first", "lists", "nested", "dot", "text", "tensor", "none"],
)
def test_its_columns_are_those_without_which_it_cannot_be_evaluated(filters, columns):
    assert set(RowFilter(filters).columns(SCHEMA, "file:///x", pa.schema([]))) == columns


def test_the_digest_depends_on_all_values_and_not_on_the_order_of_a_set():
    numbers = [*range(1000)]
    lists = [numbers, [*numbers[:500], 5000, *numbers[501:]], numbers[::-1], numbers[1:]]
    digests = [RowFilter([("c0", "in", each)]).digest for each in lists]
    assert len(set(digests)) == len(lists)
    # That of every version of pyarrow from 19 on, so that an upgrade does not prevent a job from being resumed.
    assert RowFilter([("c0", ">", 1)]).digest[:8] == "b4532a81"
    # Their order is that in which they were built, because their hashes are equal.
    sets = [{0, 8}, {8, 0}]
    assert [*sets[0]] != [*sets[1]]
    assert len({RowFilter([[("c0", "not in", each), ("c1", ">", 1)]]).digest for each in sets}) == 1


def test_a_name_that_two_columns_have_is_ambiguous():
    schema = pa.schema([("a", pa.int64()), ("a", pa.int64()), ("b", pa.int64())])
    assert RowFilter([("b", ">", 1)]).columns(schema, "file:///x", pa.schema([])) == ["b"]
    with pytest.raises(ConfigError, match="file:///x: Multiple matches for FieldRef.Name.a."):
        RowFilter([("a", ">", 1)]).columns(schema, "file:///x", pa.schema([]))


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        ([("id", ">", 4)], [0, None, 2]),
        ([("id", "<", 100)], [4, 4, 2]),
        ([("year", "=", 2024), ("id", "<", 4)], [4, 0, 0]),
        ([("year", "=", 2023)], [0, 0, 0]),
        # A missing value is not less, and NaN is not in the statistics.
        ([("n", "<", 100)], [None, None, None]),
        ([("x", "<", 100.0)], [None, None, None]),
        ([("x", ">", 100.0)], [0, 0, 0]),
    ],
)
def test_statistics_count_the_rows_of_row_groups_that_they_decide(filters, rows):
    sink = pa.BufferOutputStream()
    table = pa.table({"id": range(10), "n": [1, None] * 5, "x": [1.0, math.nan] * 5})
    pq.write_table(table, sink, row_group_size=4)
    assert rows_of(sink.getvalue().to_pybytes(), filters) == rows


def rows_of(data, filters):
    file = open_file("file:///x", data, len(data), None)
    schema, chosen = pa.schema([*file.schema, ("year", pa.int32())]), RowFilter(filters)
    schema = pa.schema([schema.field(name) for name in chosen.columns(schema, "file:///x", pa.schema([]))])
    return chosen.rows_of(file, data, schema, ds.field("year") == 2024)


@pytest.mark.parametrize(
    ("values", "first", "other"),
    [
        # For which pyarrow ends the process, or reads beyond them.
        (pa.array(range(70, 80)), b"\x08" + (70).to_bytes(8, "little"), b"\x01F"),
        (pa.array([b"0123456789abcdef"] * 10, pa.binary(16)), b"\x100123456789abcdef", b"\x040123"),
        (pa.array([1.5] * 10), b"\x08" + struct.pack("<d", 1.5), b"\x09" + struct.pack("<d", 1.5) + b"."),
    ],
    ids=["integer", "fixed", "float"],
)
def test_statistics_that_are_not_of_their_type_decide_nothing(values, first, other):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": values}), sink, use_dictionary=False)
    data = sink.getvalue().to_pybytes()
    filters = ds.field("id") > values[-1]
    assert rows_of(data, filters) == [0]
    damaged = with_footer(data, footer_of(data)[1].replace(first, other))
    assert rows_of(damaged, filters) == [None]


def test_rows_keep_their_order():
    table = pa.table({"id": range(200_000)})
    chunks = pa.concat_tables([table.slice(begin, 7_000) for begin in range(0, 200_000, 7_000)])
    assert RowFilter(ds.field("id") >= 5).kept(chunks).column("id").to_pylist() == list(range(5, 200_000))
