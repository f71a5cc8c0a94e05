"""The memory of tensors as arrays of bytes."""

import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchobj
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.exceptions import ConfigError
from torchobj.store.tensor_memory import advise_huge_pages, memory_of


def test_the_array_shares_the_tensors_memory_for_every_dtype_and_shape():
    for tensor in (
        torch.arange(6.0).reshape(2, 3)[1:],
        torch.ones((), dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(3)),
    ):
        expected = tensor.detach().clone().reshape(-1).view(torch.uint8).tolist()
        assert memory_of(tensor).tolist() == expected
    memory = memory_of(tensor := torch.ones(2, dtype=torch.uint8))
    memory[1] = 7
    assert tensor.tolist() == [1, 7]
    assert memory_of(torch.empty(0, 3)).shape == memory_of(torch.ones(4)[4:]).shape == (0,)


def test_the_array_keeps_the_tensor_alive():
    tensor = torch.ones(3)
    alive, part = weakref.ref(tensor), memory_of(tensor)[2:4]
    del tensor
    gc.collect()
    assert alive() is not None
    del part
    assert alive() is None


def test_tensors_without_plain_memory_are_refused():
    complex_one = torch.ones(2, dtype=torch.complex64)
    negative = torch.ones(2, dtype=torch.complex64).conj().imag
    for tensor in (torch.ones(2, 2).T[:1], torch.ones(2, device="meta"), complex_one.conj(), negative):
        with pytest.raises(ValueError, match="strides"):
            memory_of(tensor)
    store = torchobj.Store("memory://tensor-memory")
    for tensor in (complex_one.conj(), torch.ones(2, 3).T):
        with pytest.raises(ConfigError, match="strides"):
            store.put("k", tensor)


def saved_to_an_object(state):
    torchobj.save(state, "memory://tensor-memory/saved.pt")


def saved_and_loaded(state):
    torchobj.save(state, "memory://tensor-memory/saved.pt")
    torchobj.load("memory://tensor-memory/saved.pt", into=state)
    state |= torchobj.load("memory://tensor-memory/saved.pt")


@pytest.mark.filterwarnings("ignore")
def saved_and_loaded_in_shards(state):
    dcp.save(state, storage_writer=StorageWriter("memory://tensor-memory/shards"))
    dcp.load(state, storage_reader=StorageReader("memory://tensor-memory/shards"))


def put_and_read_into(state):
    store = torchobj.Store("memory://tensor-memory")
    for name, tensor in state.items():
        store.put(name, tensor)
        store.get_many([name], into=[tensor])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("use", [saved_to_an_object, saved_and_loaded, saved_and_loaded_in_shards, put_and_read_into])
def test_storages_can_be_resized_after_their_memory_was_used(use):
    # Small tensors are copied, large ones are sent from their memory.
    state = {"small": torch.ones(3), "large": torch.ones(100_000), "half": torch.ones(50_000, dtype=torch.bfloat16)}
    used = dict(state)
    use(state)
    for tensor in (*used.values(), *state.values()):
        tensor.untyped_storage().resize_(0)


def test_advice_about_pages_changes_no_bytes_and_takes_any_memory():
    for size in (0, 1, 5 << 20):
        memory = memory_of(torch.ones(size, dtype=torch.uint8))
        advise_huge_pages(memory)
        assert memory.sum() == size
