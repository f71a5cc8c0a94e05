"""Columns of CSV files: the types that are inferred keep every digit, as those of pandas do."""

import io
import itertools
import logging

import pandas as pd
import pyarrow as pa
import pytest

import torchobj
from torchobj.exceptions import ConfigError

DIGITS = "123456789012345678901234567890"

#: Values of a column, and the type that it must have.
KEPT = {
    "above int64": (["9223372036854775808", "9223372036854775809"], "uint64"),
    "largest uint64": (["18446744073709551615", "18446744073709551614", "1"], "uint64"),
    "above uint64": (["18446744073709551616", "18446744073709551617"], "string"),
    "thirty digits": ([DIGITS, f"{DIGITS}1", "5"], "string"),
    "below int64": (["-9223372036854775809", "-9223372036854775810"], "string"),
    "both signs": (["-1", "9223372036854775808"], "string"),
    "missing": (["9223372036854775809", "", "NA", "9223372036854775810"], "uint64"),
    "missing small": (["9007199254740993", "", "9007199254740992"], "int64"),
    "plus": (["+9007199254740993", "+9007199254740992", "3"], "int64"),
    "spaces": ([" 9223372036854775809", "9223372036854775810 "], "uint64"),
    "whole and fraction": (["9007199254740993", "9007199254740992", "1.5"], "string"),
    "whole with a point": (["1234567890123456789.0", "1234567890123456788.0"], "string"),
    "decimals": (["0.1234567890123456789012", "0.1234567890123456789013"], "string"),
    "seventeen digits": (["9.0000000000000001", "9.0000000000000002"], "string"),
    "scientific": (["1.234567890123456789e18", "1.234567890123456788e18"], "string"),
    "infinite": (["1e400", "2e400", "1"], "string"),
    "hexadecimal": (["0x10", "0x0010", "7"], "string"),
    "true and one": (["true", "1", "0", "false"], "string"),
    "zeros": (["007", "7", "0"], "int64"),
    "zeros above int64": (["09223372036854775809", "9223372036854775810"], "uint64"),
    "plain": (["1", "-2", "3"], "int64"),
    "boolean": (["true", "False", ""], "bool"),
    "measurements": (["1.5", "-2", "1e-400", "2e-400", "inf", "nan", "6.02214076e23"], "double"),
    "written from floats": ([f"{x:.18e}" for x in (0.1, 1 / 3, 1e300 / 7, 1234567890123456789.0)], "double"),
    "exact expansions": ([f"{x:.25f}" for x in (0.1, 0.1, 2.0**70 / 3, -(2.0**60))], "double"),
    "one value in two forms": (["0.1", "0.10000000000000001", "0.1000000000000000000"], "double"),
}
EXAMPLES = ["above int64", "above uint64", "measurements"]
CASES = [pytest.param(name, marks=[] if name in EXAMPLES else pytest.mark.matrix) for name in KEPT]


def table_of(values, **options):
    store = torchobj.Store("memory://csv-table")
    rows = "".join(f'memory://csv-table/object,"{value}"\n' for value in values)
    store.put("object", b"x")
    store.put("table.csv", f"url,id\n{rows}".encode(options.get("encoding", "utf-8")))
    return torchobj.TableDataset("memory://csv-table/table.csv", "url", **options)


@pytest.mark.parametrize("name", CASES)
def test_the_inferred_type_of_a_column_keeps_the_digits_of_its_values(name):
    values, kind = KEPT[name]
    samples = table_of(values)
    found = samples.column("id")
    assert str(samples.table.schema.field("id").type) == kind
    stripped = [value.strip() for value in values]
    if kind == "string":
        assert found == stripped
    elif kind != "double":
        known = {"true": True, "False": False}
        assert found == [known.get(text, int(text) if text.strip("NA") and text not in known else None)
                         for text in stripped]  # fmt: skip
    assert len(samples.class_to_idx("id")) == len({value for value in found if value is not None and value == value})


@pytest.mark.parametrize("name", CASES)
def test_values_that_pandas_tells_apart_are_told_apart(name):
    values, kind = KEPT[name]
    of_pandas = pd.read_csv(io.StringIO("id\n" + "".join(f'"{value}"\n' for value in values)))["id"].tolist()
    samples = table_of(values)
    found = samples.column("id")
    for first, second in itertools.combinations(range(len(values)), 2):
        # Pandas keeps the texts of missing values beside other texts.
        if of_pandas[first] != of_pandas[second] and pd.notna(of_pandas[first]) and found[first] is not None:
            assert found[first] != found[second], (values[first], values[second])
    if kind == "double":
        assert found == pytest.approx(of_pandas, abs=0, rel=0, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whole and fraction", "column 'id': stays text, because '9007199254740993' would lose digits as a float64"),
        ("zeros", "column 'id': '007' is read as a number, without its zeros"),
    ],
)
def test_a_type_that_differs_from_the_appearance_of_a_column_is_logged_with_what_to_pass(name, message, caplog):
    with caplog.at_level(logging.WARNING, logger="torchobj"):
        table_of(KEPT[name][0])
    assert message in caplog.text
    assert "memory://csv-table/table.csv" in caplog.text
    assert "column_types=" in caplog.text


def test_given_types_are_not_inferred_and_are_not_logged(caplog):
    values, _ = KEPT["whole and fraction"]
    with caplog.at_level(logging.WARNING, logger="torchobj"):
        assert table_of(values, column_types={"id": float}).column("id") == [float(value) for value in values]
        assert table_of(["007", "7"], column_types={"id": str}).column("id") == ["007", "7"]
        assert table_of(["007", "7"], column_types={"id": int}).column("id") == [7, 7]
    assert not caplog.records
    with pytest.raises(ConfigError, match="table.csv"):
        table_of(["18446744073709551616"], column_types={"id": int})


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_digits_are_kept_in_other_encodings(encoding):
    assert table_of(["9223372036854775809", "1"], encoding=encoding).column("id") == [2**63 + 1, 1]
    assert table_of(["0x10", "7"], encoding=encoding).column("id") == ["0x10", "7"]


@pytest.mark.parametrize("frame", [pd.DataFrame, pa.table])
def test_unsigned_integers_of_other_tables_are_kept(frame):
    torchobj.Store("memory://csv-table").put("object", b"x")
    ids = pa.array([2**64 - 1, 2**64 - 2], pa.uint64())
    ids = ids.to_pandas() if frame is pd.DataFrame else ids
    samples = torchobj.TableDataset(frame({"url": ["memory://csv-table/object"] * 2, "id": ids}), "url")
    assert [row["id"] for row in samples] == samples.column("id") == [2**64 - 1, 2**64 - 2]
    with pytest.raises(ConfigError, match="column 'id'"):
        next(iter(torchobj.DataLoader(samples, batch_size=2)))


@pytest.mark.parametrize("encoding", [None, "utf-16"])
def test_a_cell_of_several_megabytes_is_read_as_by_pandas(tmp_path, encoding):
    file = tmp_path / "long.csv"
    texts = ["short", "é" * 1_500_000, 'with "quotes"\nand lines' * 60_000, ""]
    urls = [f"memory://csv/{number}" for number in range(4)]
    frame = pd.DataFrame({"url": urls, "text": texts, "n": ["9007199254740993", 2, 3, 4]})
    frame.to_csv(file, index=False, encoding=encoding)
    table = torchobj.TableDataset(file, "url", encoding=encoding).table
    expected = pd.read_csv(file, encoding=encoding, keep_default_na=False)
    # Not with assert ==, whose difference would take minutes.
    assert bool(table["text"].to_pylist() == expected["text"].tolist() == texts)
    assert table["n"].to_pylist() == expected["n"].tolist()


def test_columns_of_one_name_are_named_with_what_to_do(tmp_path):
    file = tmp_path / "twice.csv"
    file.write_bytes(b"url,a,a\nmemory://csv/1,1,2\n")
    message = r"twice\.csv: 2 columns 'a'; its columns are url, a, a\. Rename one of them, or pass columns="
    with pytest.raises(ConfigError, match=message):
        torchobj.TableDataset(file, "url")
    assert torchobj.TableDataset(file, "url", columns=["url"]).table.num_rows == 1
