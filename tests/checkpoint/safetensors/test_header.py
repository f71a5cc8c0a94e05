"""Headers of safetensors: what is written is parsed again, and nothing is trusted."""

import json
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.saved_objects import random_tensor
from torchobj.checkpoint.safetensors.header import DTYPES, LENGTH_BYTES, encoded, header_end, parse
from torchobj.exceptions import CheckpointError, ConfigError

safetensors = pytest.importorskip("safetensors")

#: What UTF-8 can represent.
TEXT = st.characters(codec="utf-8")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def file_of(header, data_bytes):
    """The header with its length, and the size of the file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, LENGTH_BYTES + len(text) + data_bytes


def parsed(header, data_bytes):
    data, size = file_of(header, data_bytes)
    assert header_end(data, size) == len(data)
    return parse(data, size)


def described(**fields):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | fields


@settings(max_examples=50)
@given(st.dictionaries(st.text(TEXT, max_size=5), st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=6))
def test_what_is_encoded_is_parsed_again(described):
    described = {name: value for name, value in described.items() if value[0] != "F4" or value[1]}
    described.pop("__metadata__", None)
    tensors = {name: random_tensor(DTYPES[dtype], shape) for name, (dtype, shape) in described.items()}
    header, names = encoded(tensors, {"format": "pt"})
    assert len(header) % 8 == 0
    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    found = parse(header, size)
    assert found.metadata == {"format": "pt"}
    assert sorted(names) == sorted(tensor.name for tensor in found.tensors) == sorted(tensors)
    for tensor in found.tensors:
        of = tensors[tensor.name]
        assert (tensor.dtype, tensor.shape, tensor.end - tensor.start) == (of.dtype, of.shape, of.nbytes)


#: Header, bytes of data, and the error.
DAMAGED = {
    "no dtype": ({"a": {"shape": [2, 3], "data_offsets": [0, 24]}}, 24, "expected dtype, shape and data_offsets"),
    "no object": ({"a": [1]}, 24, "expected dtype, shape"),
    "unknown dtype": ({"a": described(dtype="F31")}, 24, "'a': torch .* has no dtype for 'F31'"),
    "dtype of no name": ({"a": described(dtype=["F32"])}, 24, "has no dtype for"),
    "negative shape": ({"a": described(shape=[-2, -3])}, 24, "not sizes"),
    "shape of floats": ({"a": described(shape=[2.0, 3])}, 24, "not sizes"),
    "shape of bools": ({"a": described(shape=[True, 6])}, 24, "not sizes"),
    "shape of text": ({"a": described(shape="23")}, 24, "not sizes"),
    "negative start": ({"a": described(data_offsets=[-24, 0])}, 24, "not sizes"),
    "three offsets": ({"a": described(data_offsets=[0, 24, 24])}, 24, "not sizes"),
    "end before start": ({"a": described(data_offsets=[24, 0])}, 24, "-24 bytes, but F32 of shape .* has 24"),
    "other size": ({"a": described(shape=[7])}, 24, "24 bytes, but F32 of shape .* has 28"),
    "overflow to a small size": ({"a": described(shape=[2**62, 4, 6])}, 24, "too large"),
    "overflow of an empty one": ({"a": described(shape=[2**62, 0, 6], data_offsets=[0, 0])}, 0, "too large"),
    "length beyond 63 bits": ({"a": described(shape=[2**63])}, 24, "not sizes"),
    "gap at the start": ({"a": described(data_offsets=[8, 32])}, 32, "a gap before it, expected a start of 0"),
    "gap": ({"a": described(), "b": described(data_offsets=[32, 56])}, 56, "'b'.* a gap before it"),
    "overlap": ({"a": described(), "b": described(data_offsets=[16, 40])}, 40, "'b'.* an overlap with it"),
    "the same bytes twice": ({"a": described(), "b": described()}, 24, "an overlap with it"),
    "truncated": ({"a": described()}, 23, "end at byte .*, but the object has"),
    "longer": ({"a": described()}, 25, "end at byte .*, but the object has"),
    "data of nothing": ({}, 1, "end at byte"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": described()}, 24, "not valid JSON"),
    "metadata of no object": ({"__metadata__": "a", "a": described()}, 24, "not valid JSON"),
    "a name twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0, "'a' occurs twice"),
    "a field twice": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}', 0, "a name twice"),
    "an array": (b"[]", 0, "expected {"),
    "nothing": (b"", 0, "expected {"),
    "odd columns of F4": ({"a": described(dtype="F4", shape=[3, 3], data_offsets=[0, 4])}, 4, "even number|no dtype"),
}


@pytest.mark.parametrize(("header", "data_bytes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_header_is_refused(header, data_bytes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        parsed(header, data_bytes)
    assert str(caught.value).startswith("its header is damaged: ")
    data, _ = file_of(header, data_bytes)
    # It is not only we who refuse it, except for ambiguous and excessive ones.
    if not re.search("twice|too large|shape of bools", message):
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data + bytes(data_bytes))


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001, 1000])
def test_a_header_that_cannot_be_is_refused_at_once(length):
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=f"a header of {length:,} bytes"):
        header_end(length.to_bytes(8, "little") + b"{", 1 << 40 if length > 1000 else 900)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("size", range(8))
def test_an_object_that_is_shorter_than_a_length_is_refused(size):
    with pytest.raises(CheckpointError, match=f"it has {size} bytes"):
        header_end(bytes(size), size)


VALID = {
    "__metadata__": {"format": "pt"},
    "model.weight": described(),
    "bias": described(dtype="I64", shape=[1], data_offsets=[24, 32]),
    "none": described(dtype="BOOL", shape=[0, 4], data_offsets=[32, 32]),
}


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 127)), min_size=1, max_size=3))
def test_a_mutated_header_is_refused_or_says_what_safetensors_reads(mutations):
    data, _ = file_of(VALID, 32)
    mutated = bytearray(data + bytes(32))
    for at, byte in mutations:
        mutated[at % len(data)] = byte
    mutated = bytes(mutated)
    try:
        end = header_end(mutated, len(mutated))
        found = parse(mutated[:end], len(mutated))
    except CheckpointError:
        return
    expected = dict(safetensors.deserialize(mutated))
    assert {tensor.name: list(tensor.shape) for tensor in found.tensors} == {
        name: view["shape"] for name, view in expected.items()
    }
    covered = [(tensor.start, tensor.end) for tensor in found.tensors]
    assert [end, *(stop for _, stop in covered)] == [*(start for start, _ in covered), len(mutated)]


@settings(max_examples=100)
@given(st.binary(max_size=40), st.integers(0, 200))
def test_any_bytes_are_refused_with_an_error_of_ours(data, size):
    try:
        end = header_end(data, max(size, len(data)))
        parse(data[:end], max(size, len(data)))
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({1: torch.ones(1)}, None, "1: must be a str"),
        ({"__metadata__": torch.ones(1)}, None, "must be a str other than __metadata__"),
        ({"a\ud800": torch.ones(1)}, None, "UTF-8"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, None, "a: a tensor of torch.complex128 .* not in safetensors"),
        ({}, {"a": 1}, "metadata=.*must be a dict of str"),
        ({}, ["a"], "metadata=.*must be a dict of str"),
        ({}, {"a": "\ud800"}, "UTF-8"),
    ],
)
def test_what_cannot_be_in_a_header_is_refused(tensors, metadata, message):
    with pytest.raises(ConfigError, match=message):
        encoded(tensors, metadata)
