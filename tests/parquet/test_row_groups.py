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


def test_a_file_whose_writer_is_not_named_in_utf8_is_refused():
    put(
        "writer.parquet",
        parquet_bytes(pa.table({"x": [1]})).replace(b"parquet-cpp-arrow version", b"\xffarquet-cpp-arrow version"),
    )
    with pytest.raises(ParquetError, match=r"writer.parquet: its footer cannot be read: 'utf-8' codec"):
        rows_of("writer.parquet")
