"""Buffers share their memory with tensors, arrays and views, and keep it while one of those exists."""

import gc
import pickle

import numpy
import pytest
import torch

import torchobj
from torchobj.exceptions import ConfigError


@pytest.fixture
def store():
    return torchobj.Store("memory://buffers")


def test_a_buffer_is_viewed_without_a_copy(store):
    store.put("k", bytes(range(256)))
    buffer = store.get("k")
    assert (len(buffer), bytes(buffer)) == (256, bytes(range(256)))
    array, tensor, view = (
        numpy.frombuffer(buffer, numpy.uint8),
        torch.frombuffer(buffer, dtype=torch.uint8),
        memoryview(buffer),
    )
    array[3] = 99
    assert (tensor[3], view[3], bytes(buffer)[3]) == (99, 99, 99)
    assert tensor.data_ptr() == array.ctypes.data


def test_views_keep_the_memory_after_the_buffer_is_gone(store):
    store.put("k", b"x" * 1_000_000)
    tensor = torch.frombuffer(store.get("k"), dtype=torch.uint8)
    gc.collect()
    for _ in range(20):
        store.get("k")
    assert bool((tensor == ord("x")).all())


def test_an_empty_buffer_is_a_buffer(store):
    store.put("empty", b"")
    buffer = store.get("empty")
    assert (len(buffer), bytes(buffer), buffer == b"") == (0, b"", True)
    assert memoryview(buffer).nbytes == 0


def test_buffers_are_compared_by_their_bytes_and_pickled(store):
    store.put("k", b"abc")
    buffer = store.get("k")
    assert buffer == b"abc"
    assert buffer != b"abd"
    assert buffer != "abc"
    assert pickle.loads(pickle.dumps(buffer)) == buffer
    assert repr(buffer) == "<torchobj.Buffer of 3 bytes>"


def test_any_contiguous_buffer_can_be_put(store):
    tensor = torch.arange(6, dtype=torch.bfloat16)
    for data in (b"ab", bytearray(b"ab"), memoryview(b"ab"), numpy.array([1, 2], numpy.int32), tensor):
        store.put("k", data)
        expected = tensor.view(torch.uint8).numpy().tobytes() if data is tensor else bytes(data)
        assert store.get("k") == expected
    for data in (memoryview(b"abcd")[::2], numpy.zeros((4, 4))[:, ::2]):
        with pytest.raises(BufferError, match="not C-contiguous"):
            store.put("k", data)
    with pytest.raises(ConfigError, match="must be contiguous"):
        store.put("k", torch.zeros(4, 4)[:, ::2])
    with pytest.raises(TypeError):
        store.put("k", "text")


def test_get_into_writes_to_the_callers_memory(store):
    keys = ["a", "b", "c"]
    for key in keys:
        store.put(key, key.encode() * 1000)
    into = [bytearray(2000), numpy.zeros(1000, numpy.uint8), torch.zeros(250, dtype=torch.int32)]
    assert store.get_many(keys, into=into) == [1000, 1000, 1000]
    assert into[0] == b"a" * 1000 + bytes(1000)
    assert into[1].tobytes() == b"b" * 1000
    assert into[2].numpy().tobytes() == b"c" * 1000


def test_a_read_only_or_too_small_buffer_is_refused(store):
    store.put("k", bytes(1000))
    with pytest.raises(ValueError, match="read-only"):
        store.get_many(["k"], into=[bytes(1000)])
    with pytest.raises(ConfigError, match="the buffer of 999 bytes is too small for 1000") as caught:
        store.get_many(["k"], into=[bytearray(999)])
    assert "memory://buffers/k" in str(caught.value)
    with pytest.raises(ConfigError, match="2 buffers for 1 objects"):
        store.get_many(["k"], into=[bytearray(1000), bytearray(1000)])
