"""Values of Parquet files and tables that Python or a tensor cannot represent: their row fails, and no other."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import torchobj
from torchobj.exceptions import ConfigError, ParquetError

FAR = 9 * 10**17


def integers(*values, kind):
    return pa.array(values, pa.int64()).cast(kind)


def text(*values):
    return pa.array(values, pa.binary()).view(pa.string())


class Refusing(pa.ExtensionScalar):
    def as_py(self, **_):
        if self.value.as_py() == 2:
            raise RuntimeError("no value")
        return self.value.as_py()


class Numbers(pa.ExtensionType):
    def __init__(self):
        super().__init__(pa.int64(), "tests.numbers")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, *_):
        return cls()

    def __arrow_ext_scalar_class__(self):
        return Refusing


#: Columns of three rows; some values of the second one cannot be converted.
COLUMNS = {
    "date after 9999": pa.array([1, 3_000_000, 2], pa.int32()).cast(pa.date32()),
    "date before 1": pa.array([1, -800_000, 2], pa.int32()).cast(pa.date32()),
    "time after 9999": integers(1, FAR, 2, kind=pa.timestamp("us")),
    "time in a zone": integers(1, 253402300799999999, 2, kind=pa.timestamp("us", "Asia/Tokyo")),
    "duration": integers(1, 10**15, 2, kind=pa.duration("s")),
    "text": text(b"a", b"\xff\xfe", b"c"),
    "list": pa.ListArray.from_arrays([0, 1, 2, 3], text(b"a", b"\xff\xfe", b"c")),
    "struct": pa.StructArray.from_arrays(
        [integers(1, FAR, 2, kind=pa.timestamp("us")), pa.array([1.5, 2, None])], "ab"
    ),
    "fields of one name": pa.StructArray.from_arrays(
        [pa.array([1, 2, 3]), pa.array([4, 5, 6])], names=["a", "a"], mask=pa.array([True, False, True])
    ),
    "map": pa.MapArray.from_arrays([0, 1, 2, 3], text(b"a", b"\xff", b"c"), pa.array([1, 2, 3])),
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), integers(1, FAR, kind=pa.timestamp("us"))),
}
EXAMPLES = ["date after 9999", "text", "struct"]
CASES = [pytest.param(name, marks=[] if name in EXAMPLES else pytest.mark.matrix) for name in COLUMNS]


def expected(column):
    """What pyarrow converts each value to, alone, or the type of its exception."""
    found = []
    for at in range(len(column)):
        try:
            found.append(column[at].as_py())
        except Exception as error:
            found.append(type(error))
    return found


def put(name, *tables, **options):
    for number, table in enumerate(tables):
        with torchobj.ObjectWriter(f"memory://parquet-values/{name}/{number}.parquet") as file:
            pq.write_table(table, file, **options)
    return f"memory://parquet-values/{name}/"


def passed(samples, count):
    """The samples of a pass whose loop goes on after an exception."""
    iterator, found = iter(samples), []
    for _ in range(count):
        try:
            found.append(next(iterator))
        except ParquetError as error:
            found.append(error)
    with pytest.raises(StopIteration):
        next(iterator)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_value_that_python_cannot_represent_fails_its_row_and_no_other(name):
    url = put(name, pa.table({"id": [0, 1, 2], "x": COLUMNS[name]}), pa.table({"id": [3, 4, 5], "x": COLUMNS[name]}))
    kept = [{"id": at, "x": expected(COLUMNS[name])[at % 3]} for at in (0, 2, 3, 5)]
    if name == "struct":
        kept[1]["x"]["b"] = kept[3]["x"]["b"] = pytest.approx(float("nan"), nan_ok=True)
    found = passed(torchobj.ParquetIterableDataset(url), 6)
    assert [each for each in found if not isinstance(each, ParquetError)] == kept
    for at, file in ((1, 0), (4, 1)):
        assert f"{url}{file}.parquet: row group 0: row 1, column 'x': " in str(found[at])
        assert type(found[at].__cause__) is expected(COLUMNS[name])[1]
    skipping = torchobj.ParquetIterableDataset(url, on_error="skip")
    assert list(skipping) == kept
    assert skipping.failed_samples == 2
    failures = []
    replaced = list(torchobj.ParquetIterableDataset(url, on_error=lambda *failure: failures.append(failure)))
    assert replaced == [kept[0], None, kept[1], kept[2], None, kept[3]]
    assert [(row, file) for row, file, _ in failures] == [(1, f"{url}0.parquet"), (1, f"{url}1.parquet")]
    assert [row["id"] for row in torchobj.ParquetIterableDataset(url, columns=["id"])] == [*range(6)]


@pytest.mark.parametrize("name", CASES)
def test_a_value_that_python_cannot_represent_fails_its_batch_with_its_column(name):
    column = pa.chunked_array([COLUMNS[name]])
    url = put(f"batch {name}", pa.table({"id": [0, 1, 2], "x": column}), pa.table({"id": [3, 4, 5], "x": column}))
    found = passed(torchobj.ParquetIterableDataset(url, batch_rows=2), 3)
    assert "0.parquet: row group 0: row 1, column 'x': " in str(found[0])
    assert found[1]["id"].tolist() == [2, 3]
    assert "1.parquet: row group 0: row 1, column 'x': " in str(found[2])
    skipping = torchobj.ParquetIterableDataset(url, batch_rows=2, on_error="skip")
    assert [batch["id"].tolist() for batch in skipping] == [[2, 3]]
    assert skipping.failed_samples == 2
    arrow = torchobj.ParquetIterableDataset(url, batch_rows=2, format="arrow")
    assert sum(table.num_rows for table in arrow) == 6


def test_a_batch_that_begins_in_another_file_names_the_file_and_row_of_its_failure():
    good = pa.table({"x": pa.array([1, 2, 3], pa.int32()).cast(pa.date32())})
    url = put("crossing", pa.table({"x": COLUMNS["date after 9999"]}), good)
    failures = []
    [replaced] = torchobj.ParquetIterableDataset(url, batch_rows=6, on_error=lambda *each: failures.append(each))
    [(row, file, error)] = failures
    assert (replaced, row, file) == (None, 1, f"{url}0.parquet")
    assert "0.parquet: row group 0: row 1, column 'x': " in str(error)


def test_an_extension_type_that_refuses_a_value_fails_its_row_and_its_batch():
    pa.register_extension_type(Numbers())
    try:
        url = put("extension", pa.table({"x": pa.ExtensionArray.from_storage(Numbers(), pa.array([1, 2, 3]))}))
        assert list(torchobj.ParquetIterableDataset(url, on_error="skip")) == [{"x": 1}, {"x": 3}]
        found = passed(torchobj.ParquetIterableDataset(url, batch_rows=2), 2)
        assert "row 1, column 'x': the value cannot be converted: RuntimeError: no value" in str(found[0])
        assert found[1] == {"x": [3]}
    finally:
        pa.unregister_extension_type("tests.numbers")


def test_rows_that_fail_among_thousands_are_found_and_a_shuffled_pass_resumes_past_them():
    bad = {5, 1023, 1024, 1025, 2999}
    days = [3_000_000 if row in bad else row for row in range(3000)]
    table = pa.table({"id": range(3000), "x": pa.array(days, pa.int32()).cast(pa.date32())})
    url = put("thousands", table, row_group_size=2000)
    kept = [row for row in range(3000) if row not in bad]
    assert [row["id"] for row in torchobj.ParquetIterableDataset(url, on_error="skip")] == kept

    def samples():
        return torchobj.ParquetIterableDataset(url, on_error="skip", shuffle_buffer=500, seed=1)

    whole = [row["id"] for row in samples()]
    assert sorted(whole) == kept
    interrupted, resumed = samples(), samples()
    iterator = iter(interrupted)
    head = [next(iterator)["id"] for _ in range(1200)]
    resumed.load_state_dict(interrupted.state_dict())
    assert head + [row["id"] for row in resumed] == whole


def test_a_value_that_does_not_fit_the_type_of_all_files_fails_its_row_and_its_batch():
    large = pa.table({"c": pa.array([7, 2**63 + 5, 8], pa.uint64())})
    url = put("overflow", large, pa.table({"c": [1]}))
    samples = torchobj.ParquetIterableDataset(url)
    found = passed(samples, 4)
    assert [found[0], *found[2:]] == [{"c": 7}, {"c": 8}, {"c": 1}]
    assert "0.parquet: row group 0: row 1, column 'c': " in str(found[1])
    for options in ({}, {"format": "arrow"}):
        found = passed(torchobj.ParquetIterableDataset(url, batch_rows=2, **options), 2)
        assert "0.parquet: row group 0: row 1, column 'c': " in str(found[0])
        assert [int(each) for each in found[1]["c"]] == [8, 1]


def test_a_missing_integer_fails_its_batch_with_file_row_and_column():
    url = put("missing", pa.table({"n": [1, None, 3], "v": pa.array([[1], None, [2]], pa.list_(pa.int8(), 1))}))
    found = passed(torchobj.ParquetIterableDataset(url, ["n"], batch_rows=2), 2)
    assert "0.parquet: row group 0: row 1, column 'n': " in str(found[0])
    assert "a value is missing" in str(found[0])
    assert torch.equal(found[1]["n"], torch.tensor([3]))
    found = passed(torchobj.ParquetIterableDataset(url, ["v"], batch_rows=2), 2)
    assert "row 1, column 'v': " in str(found[0])
    assert torch.equal(found[1]["v"], torch.tensor([[2]], dtype=torch.int8))


def test_a_row_of_a_table_dataset_that_python_cannot_represent_is_named_with_its_column():
    torchobj.Store("memory://parquet-values").put("object", b"x")
    table = pa.table({"url": ["memory://parquet-values/object"] * 3, "day": COLUMNS["date after 9999"]})
    samples = torchobj.TableDataset(table, "url", transform=lambda row: row["day"])
    assert samples[0] == datetime.date(1970, 1, 2)
    for read in (lambda: samples[1], lambda: samples.column("day")):
        with pytest.raises(ConfigError, match=r"the table: row 1, column 'day': .*OverflowError"):
            read()
    with pytest.raises(ConfigError, match="'day' are no classes"):
        samples.class_to_idx("day")
    replacing = torchobj.TableDataset(table, "url", transform=lambda row: row["day"], on_error="replace")
    assert replacing[1] == datetime.date(1970, 1, 3)
    assert replacing.failed_samples == 1


@pytest.mark.parametrize("base", [None, "memory://parquet-values/"])
def test_a_url_that_is_not_text_is_named_with_its_row_and_column(base):
    with torchobj.ObjectWriter("memory://parquet-values/urls/a.parquet") as file:
        pq.write_table(
            pa.table({"url": text(b"memory://parquet-values/object", b"memory://parquet-values/\xff")}), file
        )
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1, column 'url': .*UnicodeDecodeError.* UTF-8"):
        torchobj.TableDataset("memory://parquet-values/urls/a.parquet", "url", base_url=base)
