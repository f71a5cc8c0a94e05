"""Parquet files as other writers leave them: what pyarrow reads is read, and what is encrypted is called so."""

import base64
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow.parquet import encryption

import torchobj
from torchobj.exceptions import ConfigError, ParquetError


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


class Keys(encryption.KmsClient):
    """Keeps the keys of a file in it."""

    def __init__(self, _):
        super().__init__()

    def wrap_key(self, key, _):
        return base64.b64encode(key)


def encrypted(table, **options):
    keys, settings = encryption.KmsConnectionConfig(), encryption.EncryptionConfiguration(footer_key="key", **options)
    properties = encryption.CryptoFactory(Keys).file_encryption_properties(keys, settings)
    out = io.BytesIO()
    with pq.ParquetWriter(out, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    return out.getvalue()


def test_an_encrypted_file_is_called_encrypted_and_its_other_columns_are_read():
    table = pa.table({"a": [1, 2], "secret": ["x", "y"], "s": [{"b": 1}, {"b": 2}]})
    folder = "memory://parquet-writers/encrypted"
    for name, options, what in (
        ("whole", {"uniform_encryption": True}, "its footer"),
        ("footer", {"column_keys": {"key": ["secret"]}}, "its footer"),
        ("text", {"column_keys": {"key": ["secret"]}, "plaintext_footer": True}, "column 'secret'"),
        ("nested", {"column_keys": {"key": ["s.b"]}, "plaintext_footer": True}, r"column 's\.b'"),
    ):
        put(f"encrypted/{name}.parquet", encrypted(table, **options))
        with pytest.raises(ParquetError, match=rf"{name}\.parquet: {what} is encrypted: .*decrypt it with pyarrow"):
            rows_of(f"encrypted/{name}.parquet")
        with pytest.raises(ConfigError, match=rf"{name}\.parquet: {what} is encrypted"):
            torchobj.TableDataset(f"{folder}/{name}.parquet", "secret", base_url=folder)
    assert rows_of("encrypted/text.parquet", columns=["a", "s"]) == table.select(["a", "s"]).to_pylist()
    assert rows_of("encrypted/nested.parquet", columns=["a", "secret"]) == table.select(["a", "secret"]).to_pylist()


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


TENSORS = np.arange(48, dtype=np.float32).reshape(4, 2, 3, 2)


def nested(values, *sizes):
    column = pa.array(values.reshape(-1))
    for size in reversed(sizes):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


@pytest.mark.parametrize("group", [1, 3, 4])
def test_tensors_of_a_fixed_shape_keep_it_in_batches(group):
    permuted = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 6], permutation=[1, 0]), nested(TENSORS, 12)
    )
    columns = {
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS),
        "permuted": permuted,
        "nested": nested(TENSORS, 2, 3, 2),
        "of_tensors": pa.ListArray.from_arrays([0, 1, 1, 3, 4], nested(TENSORS, 2, 6)),
        "n": [1, 2, 3, 4],
    }
    put("tensors.parquet", parquet_bytes(pa.table(columns), row_group_size=group))
    batches = rows_of("tensors.parquet", batch_rows=3)
    for name, expected in (("tensor", TENSORS), ("nested", TENSORS), ("permuted", permuted.to_numpy_ndarray())):
        first, second = (batch[name] for batch in batches)
        assert torch.equal(torch.cat([first, second]), torch.from_numpy(expected.copy())), name
    lists = [*batches[0]["of_tensors"], *batches[1]["of_tensors"]]
    assert [tuple(each.shape) for each in lists] == [(1, 2, 6), (0, 2, 6), (2, 2, 6), (1, 2, 6)]
    assert torch.equal(torch.cat(lists), torch.from_numpy(TENSORS.reshape(4, 2, 6)))


def test_missing_values_within_tensors_of_a_fixed_shape_are_nan_or_named():
    kind = pa.list_(pa.list_(pa.float32(), 2), 2)
    put("missing.parquet", parquet_bytes(pa.table({"x": pa.array([[[1, None], [3, 4]]], kind)})))
    [batch] = rows_of("missing.parquet", batch_rows=1)
    assert batch["x"].shape == (1, 2, 2)
    assert batch["x"][0, 0, 1].isnan()
    put("missing.parquet", parquet_bytes(pa.table({"x": pa.array([[[1, 2], [3, 4]], [[1, 2], None]], kind)})))
    with pytest.raises(ParquetError, match=r"row 1, column 'x': .*a list is missing"):
        rows_of("missing.parquet", batch_rows=2)
