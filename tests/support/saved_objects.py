"""Objects to save and load, and their comparison."""

import importlib
import io
import math
import zipfile
import zlib
from typing import NamedTuple
from unittest import mock

import pytest
import torch

import torchobj
from torchobj.checkpoint.archive import device_memory

planning = importlib.import_module("torchobj.checkpoint.archive.plan")

MIB = 1 << 20

#: Ignores torch's warnings about these kinds of tensors.
QUIET = pytest.mark.filterwarnings(
    "ignore:.*quantize.*are deprecated",
    "ignore:Validating sparse tensor",
    "ignore:.*Sparse.*beta",
    "ignore:TypedStorage",
    "ignore:.*experimental and many operators",
)


def random_tensor(dtype, shape=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def stock(value):
    """The file of `torch.save`."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def raw(tensor):
    """The elements of a tensor as bytes, so that NaNs compare equal."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""


def whole(planned):
    """The bytes of a plan, with CRC-32 filled in."""
    out = io.BytesIO()
    sums = {}
    for piece in planned.pieces():
        assert out.tell() == getattr(piece, "start", out.tell())
        if isinstance(piece, planning.Hole):
            data = bytes(device_memory.bytes_of(piece.storage).numpy())
            sums[piece.start] = zlib.crc32(data)
            out.write(data)
        elif isinstance(piece, planning.Field):
            out.write(sums[piece.hole].to_bytes(4, "little"))
        else:
            out.write(piece)
    assert out.tell() == planned.size
    return out.getvalue()


def same(left, right):
    """Returns whether two objects are equal, including types, dtypes and strides."""
    if isinstance(left, torch.Tensor):
        assert type(left) is type(right)
        assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout)
        assert left.requires_grad == right.requires_grad
        if left.layout is torch.sparse_coo:
            return same(left._indices(), right._indices()) and same(left._values(), right._values())
        if left.layout is torch.sparse_csr:
            return all(
                same(getattr(left, part)(), getattr(right, part)())
                for part in ("crow_indices", "col_indices", "values")
            )
        assert left.stride() == right.stride()
        assert raw(left) == raw(right)
        return True
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        return all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        assert len(left) == len(right)
        return all(same(*both) for both in zip(left, right, strict=True))
    assert left == right or (left != left and right != right)
    return True


def put_stock(bucket, key, value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    bucket.write(key, out.getvalue())
    return out.getvalue()


def save(bucket, value, key="ckpt.pt", **options):
    return torchobj.save(value, f"{bucket.url}/{key}", config=bucket.config, **options)


def load(bucket, key="ckpt.pt", **options):
    return torchobj.load(f"{bucket.url}/{key}", config=bucket.config, **options)


def all_ways(bucket, value, **options):
    """The value saved by us and loaded by torch, the other way round, and by us only, also with copied small tensors."""
    save(bucket, value, "ours.pt")
    with mock.patch.object(planning, "_COPIED_BYTES", MIB):
        save(bucket, value, "copied.pt")
    body = bucket.body("ours.pt")
    assert zipfile.ZipFile(io.BytesIO(body)).testzip() is None
    stock = put_stock(bucket, "stock.pt", value)
    assert len(stock) == len(body)
    yield torch.load(io.BytesIO(body), **options)
    yield load(bucket, "stock.pt", **options)
    yield load(bucket, "ours.pt", **options)
    copied = bucket.body("copied.pt")
    assert zipfile.ZipFile(io.BytesIO(copied)).testzip() is None
    assert len(stock) == len(copied)
    yield load(bucket, "copied.pt", **options)


def flip(bucket, key, at, to="flipped.pt"):
    body = bytearray(bucket.body(key))
    body[at] ^= 1
    bucket.write(to, bytes(body))


def payload_of(bucket, key, tensor):
    return bucket.body(key).index(raw(tensor))


class Point(NamedTuple):
    x: int
    y: int


def blank(value):
    """The same structure with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) if value.is_sparse else torch.full_like(value, 9)
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(blank(inner) for inner in value)
    return None
