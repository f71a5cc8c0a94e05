"""`torchobj.load` of files of safetensors: into new tensors, existing ones, and other devices."""

import io
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.saved_objects import MIB, random_tensor, raw
from torchobj import exceptions
from torchobj.checkpoint.archive import device_memory
from torchobj.checkpoint.safetensors import load as loading
from torchobj.checkpoint.safetensors.header import DTYPES

safetensors = pytest.importorskip("safetensors.torch")

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
NAMES = st.text(st.characters(codec="utf-8"), max_size=4)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=5)


def equal(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride())
        assert raw(tensor) == raw(other), name
    return True


@settings(max_examples=60)
@given(TENSORS, st.dictionaries(NAMES, NAMES, max_size=2))
def test_what_was_saved_is_loaded(described, metadata):
    tensors = {name: random_tensor(DTYPES[dtype], shape, seed=len(name)) for name, (dtype, shape) in described.items()}
    url = "memory://identity/m.safetensors"
    torchobj.save(tensors, url, metadata=metadata)
    loaded = torchobj.load(url)
    assert equal(loaded, tensors)
    assert loaded.metadata == metadata
    into = {name: random_tensor(tensor.dtype, tensor.shape, seed=99) for name, tensor in tensors.items()}
    assert torchobj.load(url, into=into) is into
    assert equal(into, tensors)


def test_scalars_and_files_of_safetensors_itself_are_loaded():
    tensors = {"a": torch.tensor(2.5), "b": torch.tensor([True, False]), "c": torch.ones(2, 0, dtype=torch.int8)}
    torchobj.Store("memory://theirs").put("m.safetensors", safetensors.save(tensors))
    loaded = torchobj.load("memory://theirs/m.safetensors")
    assert equal(loaded, tensors)
    assert loaded.metadata == {}
    assert loaded["a"].shape == ()


STATE = {
    "model.0.weight": torch.arange(12.0).reshape(3, 4),
    "model.0.bias": torch.arange(3.0),
    "model.01": torch.ones(1),
    "head": torch.arange(4),
}


@pytest.fixture
def url():
    torchobj.save(STATE, "memory://loads/m.safetensors")
    return "memory://loads/m.safetensors"


def test_keys_select_tensors_by_name_and_prefix(url):
    assert equal(
        torchobj.load(url, keys=["model.0"]), {name: STATE[name] for name in ("model.0.bias", "model.0.weight")}
    )
    assert list(torchobj.load(url, keys=["head"])) == ["head"]
    into = {"head": torch.zeros(4, dtype=torch.int64)}
    assert torchobj.load(url, keys=["head"], into=into)["head"].tolist() == [0, 1, 2, 3]
    with pytest.raises(exceptions.ConfigError, match="there is no entry 'heads'; similar names: head"):
        torchobj.load(url, keys=["heads"])
    with pytest.raises(exceptions.ConfigError, match="must be a list of names"):
        torchobj.load(url, keys="head")


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_keys_read_only_what_they_select(bucket, control, config):
    tensors = {"a": torch.ones(3 * MIB), "b": torch.ones(MIB), "c": torch.zeros(10)}
    torchobj.save(tensors, f"{bucket.url}/m.safetensors", config=config)
    control.clear_requests()
    assert list(torchobj.load(f"{bucket.url}/m.safetensors", keys=["b"], config=config)) == ["b"]
    assert sum(request.bytes_sent for request in control.requests()) < 4 * MIB + (700 << 10)


def test_tensors_that_are_not_contiguous_or_overlap_are_filled(url):
    base = torch.zeros(3, 8)
    shared = torch.zeros(3)
    into = {
        "model.0.weight": torch.nn.Parameter(base[:, ::2]),
        "model.0.bias": shared,
        "model.01": shared[2:],
        "head": torch.zeros(4, dtype=torch.int64),
    }
    version = base._version
    torchobj.load(url, into=into)
    assert torch.equal(into["model.0.weight"], STATE["model.0.weight"])
    assert torch.equal(base[:, 1::2], torch.zeros(3, 4))
    assert shared[:2].tolist() == [0, 1] and shared[2].item() in (1, 2)
    assert into["head"].tolist() == [0, 1, 2, 3]
    assert base._version > version


def test_differences_are_reported_before_anything_is_written(url):
    into = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    into["model.0.bias"] = torch.zeros(4)
    into["other"] = into.pop("head")
    with pytest.raises(
        exceptions.ConfigError, match=r"other: not in the checkpoint; head: only in the checkpoint; model\.0\.bias: "
    ):
        torchobj.load(url, into=into)
    assert not any(tensor.any() for tensor in into.values())
    with pytest.raises(exceptions.ConfigError, match=r"give its state_dict\(\)"):
        torchobj.load(url, into=torch.nn.Linear(2, 2))


def test_map_location_is_that_of_torch_load(url):
    assert equal(torchobj.load(url, "cpu"), STATE)
    assert equal(torchobj.load(url, torch.device("cpu")), STATE)
    assert equal(torchobj.load(url, {"cpu": "cpu"}), STATE)
    locations = []
    assert equal(torchobj.load(url, lambda storage, location: locations.append(location) or storage), STATE)
    assert locations == ["cpu"] * 4
    on_meta = torchobj.load(url, {"cpu": "meta"})
    assert {name: tensor.shape for name, tensor in on_meta.items()} == {
        name: each.shape for name, each in STATE.items()
    }
    assert all(tensor.is_meta for tensor in on_meta.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_an_error_before_anything_is_read(url, monkeypatch):
    monkeypatch.setattr(loading, "read", None)
    with pytest.raises((RuntimeError, AssertionError), match="(?i)cuda"):
        torchobj.load(url, "cuda:0")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_are_loaded_to_a_gpu(url):
    loaded = torchobj.load(url, "cuda")
    assert all(tensor.is_cuda for tensor in loaded.values())
    assert equal({name: tensor.cpu() for name, tensor in loaded.items()}, STATE)
    torchobj.save(loaded, "memory://loads/gpu.safetensors")
    assert torchobj.get("memory://loads/gpu.safetensors") == torchobj.get(url)


def test_tensors_that_cannot_be_filled_directly_by_a_device_are_read_through_blocks(url, monkeypatch):
    monkeypatch.setattr(device_memory, "is_reachable", lambda device: False)
    assert equal(torchobj.load(url), STATE)
    into = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    assert equal(torchobj.load(url, into=into), STATE)


def test_each_tensor_owns_its_memory(url):
    loaded = torchobj.load(url)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in loaded.values())


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_progress_counts_the_bytes_of_the_tensors(bucket, config):
    tensors = {"a": torch.ones(3 * MIB), "b": torch.ones(5)}
    torchobj.save(tensors, f"{bucket.url}/m.safetensors", config=config)
    for into in (None, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}):
        seen = []
        torchobj.load(f"{bucket.url}/m.safetensors", into=into, config=config, progress=seen.append)
        assert seen[-1].bytes_done == seen[-1].bytes_total == 12 * MIB + 20
        assert [state.bytes_done for state in seen] == sorted(state.bytes_done for state in seen)


def test_a_file_of_torch_under_the_name_of_safetensors_is_refused_and_the_other_way_round(url):
    torch.save(STATE, out := io.BytesIO())
    store = torchobj.Store("memory://loads")
    store.put("pickled.safetensors", out.getvalue())
    with pytest.raises(
        exceptions.CheckpointError, match=r"^memory://loads/pickled\.safetensors: .* torch\.save: rename it"
    ):
        torchobj.load("memory://loads/pickled.safetensors")
    store.put("weights.bin", bytes(torchobj.get(url)))
    with pytest.raises(exceptions.CheckpointError, match="looks like safetensors: pass format='safetensors'"):
        torchobj.load("memory://loads/weights.bin")
    assert equal(torchobj.load("memory://loads/weights.bin", format="safetensors"), STATE)


def test_a_file_without_code_is_loaded_with_any_weights_only_and_is_not_verified(url, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "torchobj")
    # torch warns that it changes the default of `weights_only`.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert equal(torchobj.load(url), STATE)
    assert equal(torchobj.load(url, weights_only=True, verify=False), STATE)
    assert f"{url}: not verified: files of safetensors have no checksums" in caplog.text


def test_a_file_that_is_replaced_while_it_is_loaded_is_an_error(bucket, config, monkeypatch):
    url = f"{bucket.url}/m.safetensors"
    torchobj.save({"a": torch.ones(MIB)}, url, config=config)
    read = loading.read

    def replaced_first(*given):
        torchobj.save({"a": torch.zeros(MIB)}, url, config=config)
        read(*given)

    monkeypatch.setattr(loading, "read", replaced_first)
    with pytest.raises(exceptions.ObjectChangedError, match=r"m\.safetensors"):
        torchobj.load(url, config=config)
