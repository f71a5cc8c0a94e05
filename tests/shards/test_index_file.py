"""Files of indexes: they are read as they were written, and damaged ones are refused."""

import io
import json

import pyarrow
import pyarrow.parquet
import pytest

from torchobj.exceptions import TarIndexError
from torchobj.shards import index_file
from torchobj.shards.index_file import TarShard

SHARDS = (TarShard("a.tar", 4096, '"etag"'), TarShard("empty.tar", 1024, None), TarShard("s3://b/c.tar", 10240, None))
COLUMNS = {
    "shard": ["a.tar", "a.tar", "s3://b/c.tar"],
    "key": ["x/1", "x/1", "é"],
    "field": ["cls", "seg.png", "json"],
    "offset": [512, 1536, 512],
    "size": [1, 0, 512],
    "begin": [0, 0, 0],
    "end": [1536, 1536, 1024],
}


def written(shards=SHARDS, source=None, **changed):
    file = io.BytesIO()
    index_file.write(file, shards, index_file.members_table({**COLUMNS, **changed}), source=source)
    return file.getvalue()


def test_an_index_is_read_as_it_was_written():
    table = index_file.read(written(source="abc"), "i")
    assert (table.shards, table.source) == (SHARDS, "abc")
    assert table.members.to_pydict() == COLUMNS
    assert repr(table) == "<IndexTable of 3 shards, 3 members>"


def test_an_index_of_shards_without_members_is_read():
    table = index_file.read(written(**{name: [] for name in COLUMNS}), "i")
    assert table.shards == SHARDS
    assert table.members.num_rows == 0
    assert table.source is None


def test_an_index_of_several_row_groups_is_read():
    count = 150_000
    columns = {
        "shard": ["a.tar"] * count,
        "key": [str(number) for number in range(count)],
        "field": ["jpg"] * count,
        **{name: list(range(0, 512 * count, 512)) for name in ("offset", "begin", "end")},
        "size": [0] * count,
    }
    shards = [TarShard("a.tar", 512 * count, None)]
    table = index_file.read(written(shards, **columns), "i")
    assert table.members["key"].to_pylist() == columns["key"]
    assert table.members["end"].to_pylist() == columns["end"]


def test_other_programs_read_plain_strings():
    table = pyarrow.parquet.read_table(io.BytesIO(written()))
    assert table.to_pydict() == COLUMNS
    assert str(table.schema.field("shard").type) == "string"


def test_equal_members_give_equal_bytes():
    assert written() == written()


@pytest.mark.parametrize(
    "changed",
    [
        {"offset": [-1, 1536, 512]},
        {"offset": [512, 1537, 512]},
        {"size": [-1, 0, 512]},
        {"size": [1, 0, 513]},
        {"begin": [513, 0, 0]},
        {"begin": [-1, 0, 0]},
        {"end": [1536, 1536, 10241]},
        {"end": [1536, 1536, 1025]},
        {"begin": [1, 1, 0]},
        {"field": ["cls", "seg.png", "__key__"]},
        {"field": ["cls", "__url__", "json"]},
        {"shard": ["a.tar", "b.tar", "s3://b/c.tar"]},
        {"shards": [*SHARDS, SHARDS[0]]},
        {"shards": [*SHARDS, TarShard("d.tar", -1, None)]},
        {"shards": [*SHARDS, TarShard("d.tar", 1, 5)]},
        {"shards": [*SHARDS, TarShard(None, 1, None)]},
    ],
)
def test_ranges_outside_of_their_shard_are_refused(changed):
    with pytest.raises(TarIndexError, match=r"memory://b/i: damaged.*torchobj index"):
        index_file.read(written(**changed), "memory://b/i")


def test_a_range_whose_end_overflows_is_refused():
    with pytest.raises(TarIndexError, match="i: not an index of tar shards, or damaged: overflow"):
        index_file.read(written(size=[1, 0, (1 << 63) - 1]), "i")


def test_a_truncated_or_changed_file_is_refused():
    data = written()
    for damaged in (b"", b"PAR1", data[:-1], data[len(data) // 2 :], data[:100] + b"\xff" * 8 + data[108:]):
        with pytest.raises(TarIndexError, match="i: "):
            index_file.read(damaged, "i")


def test_another_parquet_file_is_refused():
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), file)
    with pytest.raises(TarIndexError, match="of another kind; this version of torchobj reads indexes of format 1"):
        index_file.read(file.getvalue(), "i")


def test_an_index_of_another_format_or_with_other_columns_is_refused():
    metadata = {"torchobj.tar_index.format": "2", "torchobj.tar_index.shards": json.dumps([])}
    for version, reason in (("2", "of format '2'"), ("1", r"its columns are \['x'\]")):
        file = io.BytesIO()
        table = pyarrow.table({"x": [1]}).replace_schema_metadata(metadata | {"torchobj.tar_index.format": version})
        pyarrow.parquet.write_table(table, file)
        with pytest.raises(TarIndexError, match=reason):
            index_file.read(file.getvalue(), "i")
