"""Rows of Parquet files and of tables: missing floats are NaN, and the default collation names what it refuses."""

import copy
import datetime
import math
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

import torchobj
from torchobj.exceptions import ConfigError
from torchobj.parquet.rows import TableRow

COLUMNS = {
    "f16": pa.array([1.5, None], pa.float16()),
    "f32": pa.array([1.5, None], pa.float32()),
    "f64": pa.array([1.5, None], pa.float64()),
    "list": pa.array([[1.5, None], None], pa.list_(pa.float32())),
    "struct": pa.array([{"a": None, "b": None, "c": [None]}, None],
                       pa.struct({"a": pa.float64(), "b": pa.int64(), "c": pa.list_(pa.float64())})),
    "integer": pa.array([1, None], pa.int64()),
    "text": pa.array(["a", None]),
}  # fmt: skip


def parquet(name, columns):
    with torchobj.ObjectWriter(f"memory://table-rows/{name}/a.parquet") as file:
        pq.write_table(pa.table(columns), file)
    return torchobj.ParquetIterableDataset(f"memory://table-rows/{name}/")


def table(_, columns):
    torchobj.Store("memory://table-rows").put("object", b"x")
    urls = ["memory://table-rows/object"] * len(next(iter(columns.values())))
    return torchobj.TableDataset(pa.table({**columns, "url": urls}), "url", transform=without_object)


def without_object(row):
    del row["url"]
    return row


KINDS = pytest.mark.parametrize("kind", [parquet, table])


@KINDS
def test_missing_floats_are_nan_and_other_missing_values_none(kind):
    first, second = list(kind("floats", COLUMNS))
    assert [first[name] for name in ("f16", "f32", "f64", "integer", "text")] == [1.5, 1.5, 1.5, 1, "a"]
    assert first["list"][0] == 1.5
    assert first["struct"]["b"] is None
    missing = [
        second["f16"],
        second["f32"],
        second["f64"],
        first["list"][1],
        first["struct"]["a"],
        first["struct"]["c"][0],
    ]
    assert all(isinstance(value, float) and math.isnan(value) for value in missing)
    assert [second[name] for name in ("list", "struct", "integer", "text")] == [None] * 4


@KINDS
def test_a_missing_column_is_named_with_its_row(kind):
    dataset = kind("missing", {"f64": COLUMNS["f64"]})
    row = next(iter(dataset)) if isinstance(dataset, torch.utils.data.IterableDataset) else dataset[0]
    with pytest.raises(KeyError, match=r"no column 'f46' in row 0 of .*: its columns are f64"):
        row["f46"]


@KINDS
@pytest.mark.parametrize("loader", [torchobj.DataLoader, torch.utils.data.DataLoader])
def test_rows_with_missing_floats_are_collated(kind, loader):
    [batch] = loader(kind("collated", {name: COLUMNS[name] for name in ("f32", "f64")}), batch_size=2)
    assert type(batch) is dict
    assert batch["f64"].isnan().tolist() == batch["f32"].isnan().tolist() == [False, True]


@KINDS
@pytest.mark.parametrize("loader", [torchobj.DataLoader, torch.utils.data.DataLoader])
@pytest.mark.parametrize(
    ("column", "row", "described"),
    [
        ([1, None], 1, "a missing value"),
        ([None, 1], 0, "a missing value"),
        ([None, "a"], 0, "a missing value"),
        ([[1, 2], [3, None]], 1, "a missing value"),
        ([{"a": 1}, {"a": None}], 1, "a missing value"),
        ([datetime.date(2020, 1, 2)] * 2, 0, "a value of type date"),
        ([[1], [1, 2]], 0, "a value of type list"),
        (pa.array([1, 2**63 + 5], pa.uint64()), 1, "9223372036854775813, which is not in the range of int64,"),
        ([{"bytes": b"x", "path": None}] * 2, 0, "a file of Hugging Face datasets, a dict of bytes and path,"),
    ],
)
def test_what_cannot_be_collated_is_named_with_its_column_row_and_table(kind, loader, column, row, described):
    where = r"memory://table-rows/named/a\.parquet: row group 0: " if kind is parquet else "the table: "
    with pytest.raises(ConfigError, match=f"{where}row {row}, column 'c': {described} cannot be collated; pass a tran"):
        list(loader(kind("named", {"id": [1, 2], "c": column}), batch_size=2))


@KINDS
def test_the_error_reaches_the_trainer_from_a_worker(kind):
    loader = torchobj.DataLoader(kind("worker", {"c": [1, None]}), batch_size=2, num_workers=1)
    with pytest.raises(ConfigError, match="row 1, column 'c': a missing value cannot be collated"):
        list(loader)


def test_rows_of_the_shuffle_buffer_have_nan_too():
    with torchobj.ObjectWriter("memory://table-rows/shuffled/a.parquet") as file:
        pq.write_table(pa.table({"x": pa.nulls(20, pa.float32())}), file)

    def samples():
        return torchobj.ParquetIterableDataset("memory://table-rows/shuffled/", shuffle_buffer=8)

    loader = torchobj.DataLoader(samples(), batch_size=4)
    next(iter(loader))
    resumed = torchobj.DataLoader(samples(), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert [batch["x"].isnan().all().item() for batch in resumed] == [True] * 4


def test_a_row_is_pickled_and_copied_as_a_dict():
    row = TableRow({"a": 1}, "the table", 5)
    for other in (pickle.loads(pickle.dumps(row)), copy.copy(row), copy.deepcopy(row)):
        assert type(other) is dict
        assert other == row == {"a": 1}


def test_the_collation_of_other_types_is_that_of_torch():
    assert default_collate_fn_map[int].__module__ == "torch.utils.data._utils.collate"
    labels = pa.array([1, 2**64 - 1], pa.uint64())
    numbers = table(None, {"label": labels})
    numbers.transform = lambda row: torch.tensor(row["label"], dtype=torch.uint64)
    [batch] = torchobj.DataLoader(numbers, batch_size=2)
    assert batch.tolist() == labels.to_pylist()


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_that_one_of_two_tables_lacks_is_named_with_both(first):
    tables = [parquet(f"columns-{number}", {"id": [1, 2]} | ({"extra": [3, 4]} if number else {})) for number in (0, 1)]
    rows = [list(each) for each in tables]
    with pytest.raises(ConfigError, match=r"columns-0/.*row group 0 has no column 'extra', which .*columns-1/.* has"):
        torch.utils.data.default_collate([*rows[first], *rows[1 - first]])
