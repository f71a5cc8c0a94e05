"""Columns from the names of folders, and filters of rows: the same as those of `pyarrow.dataset`, which is the oracle."""

import contextlib
import datetime
import itertools
import math
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

import torchobj
from tests.support.long_tables import often
from torchobj.exceptions import ConfigError, ParquetError

YEARS, MONTHS = (2023, 2024), ("01", "a b/c", "xx")
ROWS = 37


def table_of(number):
    random = np.random.default_rng(number)
    floats = [None if at % 7 == 0 else math.nan if at % 5 == 0 else float(at) for at in range(ROWS)]
    return pa.table(
        {
            "id": pa.array(np.arange(ROWS) + number * 100),
            "x": pa.array(floats, pa.float64()),
            "n": pa.array([None if at % 3 == 0 else at for at in range(ROWS)], pa.int32()),
            "text": [f"{number}-{at:02}" for at in range(ROWS)],
            "day": pa.array([datetime.date(2024, 1, 1 + at % 28) for at in range(ROWS)]),
            "s": [{"a": at, "b": str(at)} for at in range(ROWS)],
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(random.random((ROWS, 2, 2))),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hive")
    for number, (year, month) in enumerate(itertools.product(YEARS, MONTHS)):
        part = path / f"year={year}" / f"month={month.replace(' ', '%20').replace('/', '%2F')}"
        part.mkdir(parents=True)
        pq.write_table(table_of(number), part / "rows.parquet", row_group_size=10)
    return path


def dataset(folder, *args, **options):
    return torchobj.ParquetIterableDataset(f"file://{folder}/", *args, partitioning="hive", **options)


def tables(folder, **options):
    found = list(dataset(folder, batch_rows=50, format="arrow", **options))
    return pa.concat_tables(found) if found else None


def expected(folder, filters, partitioning="hive"):
    """The rows of `pyarrow.dataset`, in the order of the files and rows."""
    return ds.dataset(folder, partitioning=partitioning).to_table(filter=filters)


FILTERS = [
    [("year", "=", 2024), ("id", ">", 420)],
    (ds.field("x") < 9) | ds.field("n").is_null(),
    ~(ds.field("x") < 9),
    [("year", "=", 2024)],
    [[("month", "=", "a b/c")], [("id", "<", 5)]],
    ds.field("x").is_nan(),
    ds.field("x").is_null(nan_is_null=True),
    ds.field("n") > 8,
    ds.field("n").is_valid() & (ds.field("year") < 2024),
    ds.field("id") + ds.field("year") > 2200,
    ds.field("text").isin(["0-03", "4-20", "nothing"]),
    pc.starts_with(ds.field("text"), "3-1"),
    ds.field("day") >= datetime.date(2024, 1, 20),
    ds.field("s", "a") > 30,
    ds.field("id") != ds.field("n"),
    pc.binary_join_element_wise(ds.field("year").cast("string"), ds.field("month"), "-") == "2023-01",
    ds.field("id") > 10_000,
    ds.field("year") > 3000,
    ds.scalar(True),
    ds.scalar(False),
    [("n", "in", {3, 4, 5}), ("month", "not in", ["xx"])],
]


@pytest.mark.parametrize("number", often(3, range(len(FILTERS))))
def test_the_rows_are_those_of_pyarrow(folder, number):
    filters = FILTERS[number]
    oracle = expected(folder, pq.filters_to_expression(filters))
    found = tables(folder, filters=filters)
    if found is None:
        assert not oracle.num_rows
        found = dataset(folder, filters=filters).schema
        found = pa.Table.from_batches([], found)
    assert found.schema == oracle.schema
    np.testing.assert_equal(found.to_pydict(), oracle.to_pydict())
    few = dataset(folder, columns=["text", "year"], filters=filters)
    assert list(few) == oracle.select(["text", "year"]).to_pylist()
    with contextlib.suppress(TypeError):
        assert len(torchobj.DataLoader(few, batch_size=None)) == oracle.num_rows


@pytest.mark.parametrize(
    ("filters", "length"),
    [
        (None, 222),
        ([("year", "=", 2024)], 111),
        ([("year", ">", 2024)], 0),
        ([("id", ">=", 410)], 27 + 37),
        ([("id", ">", 410)], None),
        ([("year", "=", 2024), ("text", ">=", "5")], 37),
        # NaN and missing values are not among the statistics.
        ([("x", "<", 1000.0)], None),
        ([("n", "<", 1000)], None),
    ],
)
def test_the_length_is_known_where_statistics_or_folders_tell_it(folder, filters, length):
    rows = dataset(folder, filters=filters, columns=["id"])
    loader = torchobj.DataLoader(rows, batch_size=None)
    if length is None:
        with pytest.raises(TypeError, match="known only when they are read"):
            len(loader)
    else:
        assert len(loader) == len(list(rows)) == length


def test_the_types_of_folders_are_those_of_pyarrow_or_given(folder):
    schema = pa.schema([("month", pa.string()), ("year", pa.int16())])
    given = ds.HivePartitioning(schema, null_fallback="xx")
    oracle = expected(folder, None, given)
    rows = torchobj.ParquetIterableDataset(f"file://{folder}/", columns=["id", "month", "year"], partitioning=given)
    assert rows.schema == oracle.select(["id", "month", "year"]).schema
    assert list(rows) == oracle.select(["id", "month", "year"]).to_pylist()
    assert {row["month"] for row in rows} == {"01", None, "a b/c"}
    only_year = ds.HivePartitioning(
        pa.schema([("year", pa.dictionary(pa.int8(), pa.string()))]), {"year": pa.array(["2023", "2024"])}
    )
    rows = torchobj.ParquetIterableDataset(f"file://{folder}/", columns=["id", "year"], partitioning=only_year)
    assert [row["year"] for row in rows] == ["2023"] * 111 + ["2024"] * 111


def test_folders_alone_are_rows_without_a_request_for_data(folder):
    rows = dataset(folder, columns=["month"])
    assert rows.schema == pa.schema([("month", pa.string())])
    assert [row["month"] for row in rows] == [month for _ in YEARS for month in MONTHS for _ in range(ROWS)]
    batches = list(dataset(folder, columns=["year", "id"], batch_rows=100))
    assert torch.equal(torch.cat([batch["year"] for batch in batches]), torch.tensor([2023] * 111 + [2024] * 111).int())


def put(bucket, key, table, **options):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    bucket.write(key, sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("filters", "footers", "groups"),
    [
        # Decided by the folders: nothing of the others is read.
        ([("year", "=", 2024), ("month", "=", 5)], {"2024/month=5"}, {("2024/month=5", group) for group in range(3)}),
        # By statistics too: the types are those of the first file, whose footer is read.
        ([("year", "=", 2024), ("id", ">", 25)], {"2023/month=4", "2024/month=4", "2024/month=5"},
         {("2024/month=4", 2), ("2024/month=5", 2)}),
        ([("year", "=", 1999)], {"2023/month=4"}, set()),
    ],
    ids=["folders", "statistics", "nothing"],
)  # fmt: skip
def test_files_and_row_groups_that_are_excluded_are_not_read(bucket, control, filters, footers, groups):
    names = [f"{year}/month={month}" for year in YEARS for month in (4, 5)]
    # Row groups too far apart for one request, and footers that are read alone.
    table = pa.table({"id": range(30), "data": [bytes([at]) * 9000 for at in range(30)]})
    for name in names:
        put(bucket, f"year={name}/rows.parquet", table, row_group_size=10, compression="none", use_dictionary=False)
    rows = torchobj.ParquetIterableDataset(
        f"{bucket.url}/", partitioning="hive", filters=filters, columns=["id"], config=bucket.config
    )
    control.clear_requests()
    found = list(rows)
    assert found == [
        {"id": at} for name, group in sorted(groups) for at in range(group * 10, group * 10 + 10) if ((name, group) and
        ("id", ">", 25) not in filters) or at > 25
    ]  # fmt: skip
    read = [
        next(name for name in names if name.replace("=", "%3D") in request.target or name in request.target)
        for request in control.requests()
        if request.operation not in ("ListObjectsV2", "objects.list") and "rows.parquet" in request.target
    ]
    assert set(read) == footers
    assert len(read) == len(footers) + len(groups)


def test_ranks_and_workers_together_have_each_row_once(folder):
    filters = [("n", ">", 8), ("month", "!=", "xx")]
    oracle = expected(folder, pq.filters_to_expression(filters))["id"].to_pylist()
    found = []
    for rank in range(2):
        rows = dataset(folder, filters=filters, columns=["id"], shuffle=True, shuffle_buffer=8, rank=rank, world_size=2)
        loader = torchobj.DataLoader(rows, batch_size=4, num_workers=2)
        found += [int(each) for batch in loader for each in batch["id"]]
    assert sorted(found) == sorted(oracle)
    assert found != sorted(found)


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_buffer": 8}, {"batch_rows": 7}], ids=str)
def test_a_pass_is_resumed_exactly(folder, options):
    def loader():
        rows = dataset(folder, filters=[("n", ">", 8)], columns=["id", "year"], **options)
        return torchobj.DataLoader(rows, batch_size=None, num_workers=2)

    whole = [str(sample) for sample in loader()]
    for done in (1, len(whole) // 2, len(whole) - 1):
        first, second = loader(), loader()
        samples = iter(first)
        assert [str(next(samples)) for _ in range(done)] == whole[:done]
        second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        assert [str(sample) for sample in second] == whole[done:]


def test_a_state_of_other_filters_is_refused(folder):
    def passed(filters):
        rows = dataset(folder, columns=["id"], filters=filters)
        return rows, iter(rows)

    # The texts of the expressions have the first and last values of a long list.
    some = ds.field("id").isin(range(0, 600, 2))
    others = ds.field("id").isin([*range(0, 300, 2), *range(301, 400, 2), *range(400, 600, 2)])
    assert str(some) == str(others)
    for filters, other in (([("n", ">", 8)], [("n", ">", 9)]), ([("n", ">", 8)], None), (some, others)):
        rows, samples = passed(filters)
        next(samples)
        resumed, _ = passed(other)
        resumed.load_state_dict(rows.state_dict())
        with pytest.raises(ConfigError, match="filters=.*cannot be resumed"):
            iter(resumed)


def test_spawned_workers_have_the_filters_and_the_folders(folder):
    rows = torchobj.ParquetIterableDataset(
        f"file://{folder}/",
        columns=["id"],
        partitioning=ds.HivePartitioning(pa.schema([("year", pa.int16())])),
        filters=ds.field("n") > ds.field("year") - 1994,
    )
    copy = pickle.loads(pickle.dumps(rows))
    expression = ds.field("n") > ds.field("year") - 1994
    assert list(copy) == expected(folder, expression).select(["id"]).to_pylist() != []
    loader = torchobj.DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    assert list(loader) == list(copy)


BAD = {
    "a column that no file has": ({}, [("absent", ">", 3)], ConfigError, "FieldRef.Name.absent.*its columns are id, y"),
    "a column that one file lacks": ({"b": {"z": [1]}}, [("id", ">", 0)], ConfigError, "column 'id': .*b.parquet has"),
    "another type": ({}, [("id", ">", "x")], ConfigError, r"filters=.*greater.*a.parquet|a.parquet: .*greater"),
    "no boolean": ({}, ds.field("id"), ConfigError, "must evaluate to bool"),
    "a position": ({}, ds.field(0) > 1, ConfigError, "names a column by its position"),
    "text": ({}, "id > 3", ConfigError, "filters='id > 3': must be an expression of pyarrow"),
    "no operator": ({}, [("id", "~", 3)], ConfigError, "must be an expression of pyarrow.*is not a valid operator"),
    "nothing": ({}, [], ConfigError, "must be an expression of pyarrow"),
    "a number": ({}, 5, ConfigError, "must be an expression of pyarrow"),
}


@pytest.mark.parametrize("case", BAD)
def test_filters_that_cannot_be_evaluated_are_refused(tmp_path, case):
    more, filters, kind, message = BAD[case]
    for name, columns in {"a": {"id": [1, 2], "y": [3, 4]}, **more}.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    with pytest.raises(kind, match=message):
        next(iter(torchobj.ParquetIterableDataset(f"file://{tmp_path}/", filters=filters)))


def test_a_filter_of_another_type_than_that_of_the_folders_names_this_type_and_the_way(tmp_path):
    for month in ("01", "02"):
        (tmp_path / f"month={month}").mkdir()
        pq.write_table(pa.table({"id": [int(month)]}), tmp_path / f"month={month}" / "rows.parquet")
    with pytest.raises(ConfigError, match=r"folders give month \(int32\): compare .* 1 for int32.*HivePartitioning"):
        next(iter(dataset(tmp_path, filters=[("month", "=", "01")])))
    assert [row["id"] for row in dataset(tmp_path, filters=[("month", "=", 1)])] == [1]
    texts = ds.HivePartitioning(pa.schema([("month", pa.string())]))
    rows = torchobj.ParquetIterableDataset(f"file://{tmp_path}/", partitioning=texts, filters=[("month", "=", "01")])
    assert list(rows) == [{"id": 1, "month": "01"}]


def test_a_filter_of_a_column_that_is_selected_in_part_is_refused(folder):
    with pytest.raises(ConfigError, match="column 's': columns= selects only a part of it"):
        next(iter(dataset(folder, columns=["s.a"], filters=ds.field("s", "b") > "1")))


def test_a_value_that_the_filter_cannot_evaluate_fails_its_row_group(tmp_path):
    pq.write_table(pa.table({"t": ["1", "2", "x", "4", "5", "6"]}), tmp_path / "a.parquet", row_group_size=2)
    options = {"filters": ds.field("t").cast("int32") > 1}
    with pytest.raises(ParquetError, match=r"a.parquet: row group 1: filters=.*Failed to parse string: 'x'"):
        list(torchobj.ParquetIterableDataset(f"file://{tmp_path}/", **options))
    left = torchobj.ParquetIterableDataset(f"file://{tmp_path}/", on_error="skip", **options)
    assert [row["t"] for row in left] == ["2", "5", "6"]


def test_statistics_that_are_wrong_are_an_error_where_they_were_counted(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(10)}), path, use_dictionary=False)
    data = path.read_bytes()
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:at] + data[at:].replace((9).to_bytes(8, "little"), (5).to_bytes(8, "little")))
    rows = torchobj.ParquetIterableDataset(f"file://{tmp_path}/", filters=[("id", "<", 7)])
    with pytest.raises(ParquetError, match="the filters keep 7 rows, its statistics say 10"):
        list(rows)


def test_files_without_statistics_are_read(tmp_path):
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "a.parquet", write_statistics=False)
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    rows = torchobj.ParquetIterableDataset(f"file://{tmp_path}/", filters=[("id", ">", 6)])
    assert [row["id"] for row in rows] == [7, 8, 9]


def test_a_damaged_footer_is_an_error_or_has_other_rows(tmp_path):
    path, random = tmp_path / "a.parquet", np.random.default_rng(45)
    pq.write_table(pa.table({"id": range(40), "t": [f"{at}" for at in range(40)]}), path, row_group_size=10)
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for _ in range(300):
        damaged = bytearray(data)
        damaged[random.integers(begin, len(data) - 8)] = random.integers(256)
        path.write_bytes(damaged)
        rows = torchobj.ParquetIterableDataset(
            f"file://{tmp_path}/", filters=(ds.field("id") > 15) & (ds.field("t") < "3")
        )
        with contextlib.suppress(ParquetError, ConfigError):
            assert len(list(rows)) <= 40
