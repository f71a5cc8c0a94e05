"""Footers and headers of pages, as pyarrow reads them."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import torchobj
from torchobj.exceptions import ParquetError


def parquet_bytes(table, **options):
    out = io.BytesIO()
    pq.write_table(table, out, **options)
    return out.getvalue()


def put(name, data):
    torchobj.Store("memory://parquet-writers").put(name, data)


def rows_of(name, **options):
    return list(torchobj.ParquetIterableDataset(f"memory://parquet-writers/{name}", **options))


def footer_of(data):
    end = len(data) - 8
    begin = end - int.from_bytes(data[end : end + 4], "little")
    return begin, data[begin:end]


def with_footer(data, footer):
    begin, _ = footer_of(data)
    return data[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def without_total(data, rows, total=0):
    """The file with another number of rows in its footer, as writers leave it that do not count them."""
    _, footer = footer_of(data)
    # Field 3 of the footer, the first of 64 bits; numbers are in zigzag encoding.
    number = b"\x16" + varint(rows << 1)
    assert number in footer
    return with_footer(
        data, footer.replace(number, b"\x16" + varint(total << 1 if total >= 0 else (-total << 1) - 1), 1)
    )


@pytest.mark.parametrize("total", [0, -1])
def test_a_file_whose_footer_has_no_number_of_rows_is_read_as_by_pyarrow(total):
    table = pa.table({"n": range(3000), "t": [str(row) for row in range(3000)]})
    data = without_total(parquet_bytes(table, row_group_size=1000), 3000, total)
    assert pq.ParquetFile(io.BytesIO(data)).read().equals(table)
    put("uncounted.parquet", data)
    assert rows_of("uncounted.parquet") == table.to_pylist()
    assert len(rows_of("uncounted.parquet", batch_rows=700)) == 5
    path = "memory://parquet-writers/uncounted.parquet"
    named = torchobj.TableDataset(path, "t", base_url="memory://parquet-writers/")
    assert named.table["n"].to_pylist() == [*range(3000)]


def of_old_writer(data, writer, sizes):
    """The file with another writer, and the compressed sizes of columns of row groups, as some wrote them too small."""
    _, footer = footer_of(data)
    own = b"parquet-cpp-arrow version " + pa.cpp_version.encode()
    assert bytes([len(own)]) + own in footer
    footer = footer.replace(bytes([len(own)]) + own, bytes([len(writer)]) + writer)
    for size, smaller in sizes:
        number = b"\x16" + varint(size << 1)
        assert number in footer
        footer = footer.replace(number, b"\x16" + varint(smaller << 1))
    return with_footer(data, footer)


@pytest.mark.parametrize("writer", [b"parquet-mr version 1.2.8", b"parquet-mr", b"parquet-mr version 1.2.9"])
def test_dictionaries_whose_header_is_not_in_the_size_of_the_column_are_read_as_by_pyarrow(writer):
    table = pa.table({"a": ["x" * 5, "y" * 9] * 500, "b": ["z" * 7, None] * 500, "list": [["p", "q"], ["r"]] * 500})
    data = parquet_bytes(table, compression="none", store_schema=False)
    columns = pq.read_metadata(io.BytesIO(data)).row_group(0)
    sizes = {columns.column(number).total_compressed_size for number in range(columns.num_columns)}
    assert len(sizes) == 3
    old = of_old_writer(data, writer, [(size, size - 14) for size in sizes])
    put("old.parquet", old)
    if writer.endswith(b"9"):
        # A size that its writer has computed correctly.
        with pytest.raises(ParquetError, match=r"old\.parquet: row group 0 cannot be decoded"):
            rows_of("old.parquet")
        return
    expected = pq.ParquetFile(io.BytesIO(old)).read().to_pylist()
    assert expected == table.to_pylist()
    assert rows_of("old.parquet") == expected
    assert rows_of("old.parquet", columns=["b"]) == [{"b": row["b"]} for row in expected]


@pytest.mark.matrix
def test_a_footer_with_a_text_that_is_longer_than_the_limit_of_pyarrow_is_read():
    table, out = pa.table({"a": [1, 2]}), io.BytesIO()
    with pq.ParquetWriter(out, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"notes": "x" * 101_000_000})
    data = out.getvalue()
    with pytest.raises(OSError, match="limit"):
        pq.ParquetFile(io.BytesIO(data))
    put("noted.parquet", data)
    assert rows_of("noted.parquet") == table.to_pylist()
