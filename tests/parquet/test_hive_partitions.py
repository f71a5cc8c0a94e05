"""Columns from the names of folders: those of `pyarrow.dataset`, and names that are not."""

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from torchobj.exceptions import ConfigError, ParquetError
from torchobj.parquet.hive_partitions import hive_partitions


def found(*keys, partitioning=None):
    return hive_partitions([(f"s3://b/{key}", key) for key in keys], partitioning)


NAMES = [
    ["year=2024/month=05", "year=2023/month=12"],
    ["year=2024/month=05", "year=2023/month=xx"],
    ["n=a%20b%2Fc", "n=%C3%A4"],
    ["n=a b", "n=ä+"],
    ["n=a%zz", "n=%"],
    ["n=", "n=1"],
    ["n=__HIVE_DEFAULT_PARTITION__", "n=1"],
    ["a=b=c", "a==d"],
    ["y=99999999999", "y=1"],
    ["y=-1", "y=007"],
    ["x/y=1/z", "other/y=2"],
    ["a.b=1/Ü=2", "a.b=3/Ü=4"],
    ["%79%20z=1/m%2Fx=%3D", "y z=2/m%2Fx=b"],
    ["_p= 1/n=+1", "_p=0x10/n=1"],
]


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_names_types_and_values_are_those_of_pyarrow(tmp_path, number):
    keys = sorted(f"{name}/rows.parquet" for name in NAMES[number])
    for key in keys:
        (tmp_path / key).parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": [1]}), tmp_path / key)
    oracle = ds.dataset(tmp_path, partitioning="hive", ignore_prefixes=[])
    partitions = found(*keys)
    assert [oracle.schema.field("id"), *partitions.schema] == list(oracle.schema)
    files = {file.path: ds.get_partition_keys(file.partition_expression) for file in oracle.get_fragments()}
    assert [files[str(tmp_path / key)] for key in keys] == [partitions.values(at) for at in range(len(keys))]


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        (["y=1/a", "b"], ParquetError, "s3://b/b: no folder is named y=..., which those of other files are"),
        (["y=1/m=2/a", "y=1/b"], ParquetError, "s3://b/y=1/b: no folder is named m="),
        (["y=1/y=2/a"], ParquetError, "s3://b/y=1/y=2/a: has 2 folders named y=..., which is no name of a column"),
        (["y=1/%79=2/a"], ParquetError, "s3://b/y=1/%79=2/a: has 2 folders named y=..., which is no name of a column"),
        (["=5/a"], ParquetError, "s3://b/=5/a: has a folder whose name begins with '='"),
        (["y=%FF/a", "y=1/b"], ParquetError, "s3://b/y=%FF/a: the names .*not valid UTF-8 after URL decoding: %FF"),
        (["%FF=1/a"], ParquetError, "s3://b/%FF=1/a: the names .*not valid UTF-8 after URL decoding: %FF"),
        (["y=__HIVE_DEFAULT_PARTITION__/a"], ParquetError, "no folder named y=... has a value"),
        (["a", "b=c"], ConfigError, "s3://b/a has no folder with a name such as year=2024; pass partitioning=None"),
    ],
    ids=[
        "no folder",
        "one of two",
        "twice",
        "twice when decoded",
        "no name",
        "no text",
        "no text as name",
        "no value",
        "no partition",
    ],
)
def test_names_that_are_no_columns_are_refused(keys, kind, message):
    with pytest.raises(kind, match=message):
        found(*keys)


def test_a_value_that_is_not_of_the_given_type_is_refused():
    given = ds.HivePartitioning(pa.schema([("y", pa.int32())]))
    assert found("y=1/m=2/a", partitioning=given).values(0) == {"y": 1}
    with pytest.raises(
        ParquetError, match="y=x/b: the names of its folders cannot be read as columns: error parsing 'x' as"
    ):
        found("y=1/a", "y=x/b", partitioning=given)


def test_files_are_chosen_by_their_folders():
    partitions = found(*(f"y={year}/m={month}/a" for year in (1, 2, 3) for month in (1, 2)))
    schema = pa.schema([*partitions.schema, ("id", pa.int64())])
    assert partitions.files_of((ds.field("y") > 1) & (ds.field("m") == 2), schema) == [3, 5]
    assert partitions.files_of((ds.field("y") > 2) | (ds.field("id") == 2), schema) == [0, 1, 2, 3, 4, 5]
    assert partitions.files_of((ds.field("y") > 3) & (ds.field("id") == 2), schema) == []
