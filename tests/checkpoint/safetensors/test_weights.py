"""Folders with an index are one state, and an index that contradicts its files is an error."""

import json

import pytest
import torch

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions

safetensors = pytest.importorskip("safetensors.torch")

A, B, C = (torch.full((1000,), value) for value in (1.0, 2.0, 3.0))
MAP = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}


def write(store, *, weight_map=MAP, text=None, **files):
    contents = {"one": {"a": A, "b": B}, "two": {"c": C}} | files
    for name, tensors in contents.items():
        if tensors is not None:
            store.put(f"f/{name}.safetensors", safetensors.save(tensors))
    index = {"metadata": {"total_size": 12000, "total_parameters": 3000}, "weight_map": weight_map}
    store.put("f/model.safetensors.index.json", json.dumps(index).encode() if text is None else text)


@pytest.fixture
def store(request):
    return torchobj.Store(f"memory://{request.node.name.partition('[')[0][:60].replace('_', '-')}")


def load(store, url="f/", **options):
    return torchobj.load(f"{store.url}/{url}", **options)


@pytest.mark.parametrize("url", ["f/", "f/model.safetensors.index.json"])
def test_a_folder_is_loaded_as_one_state(store, url):
    write(store)
    state = load(store, url)
    assert {name: tensor[0].item() for name, tensor in state.items()} == {"a": 1, "b": 2, "c": 3}
    assert state.metadata == {"total_size": 12000, "total_parameters": 3000}
    into = {name: torch.zeros(1000) for name in "abc"}
    load(store, url, into=into)
    assert all(torch.equal(into[name], state[name]) for name in "abc")


def test_a_folder_without_an_index_is_its_single_file(store):
    store.put("f/model.safetensors", safetensors.save({"a": A}, {"format": "pt"}))
    state = load(store)
    assert list(state) == ["a"] and state.metadata == {"format": "pt"}
    with pytest.raises(exceptions.ObjectNotFoundError):
        load(store, "f/model.safetensors.index.json")


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_keys_read_only_the_files_that_they_need(bucket, control):
    store = torchobj.Store(f"{bucket.url}/", config=bucket.config)
    write(store, two=None)
    control.clear_requests()
    state = torchobj.load(f"{bucket.url}/f/", keys=["b"], config=bucket.config)
    assert state.keys() == {"b"}
    assert not [request for request in control.requests() if "two" in request.target]


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_a_missing_folder_and_a_missing_bucket_are_errors(bucket):
    message = f"{bucket.url}/f/: has neither model.safetensors.index.json nor model.safetensors"
    with pytest.raises(exceptions.CheckpointError, match=message):
        torchobj.load(f"{bucket.url}/f/", config=bucket.config)
    scheme = bucket.url.partition("://")[0]
    with pytest.raises(exceptions.BucketNotFoundError):
        torchobj.load(f"{scheme}://no-such-bucket/f/", config=bucket.config)
    with pytest.raises(exceptions.ConfigError, match="names no object"):
        torchobj.load(f"{bucket.url}/", config=bucket.config)


CONTRADICTIONS = {
    "a missing shard": ({"two": None}, r"f/two\.safetensors: does not exist, but the index names it"),
    "a tensor in no shard": (
        {"one": {"a": A}},
        r"f/one\.safetensors: has no tensor 'b', which the index expects in it",
    ),
    "a tensor in another shard": (
        {"one": {"a": A}, "two": {"b": B, "c": C}},
        r"f/one\.safetensors: has no tensor 'b', which the index expects in it",
    ),
    "a tensor twice": (
        {"two": {"b": B, "c": C}},
        r"f/two\.safetensors: has the tensor 'b', which the index expects in .*f/one\.safetensors",
    ),
    "a tensor that is not listed": (
        {"two": {"d": B, "c": C}},
        r"f/two\.safetensors: has the tensor 'd', which the index expects in no file",
    ),
    "a path of another folder": (
        {"weight_map": MAP | {"a": "../g/one.safetensors"}},
        r"f/model\.safetensors\.index\.json: the index is damaged: it names the file '\.\./g/one\.safetensors'",
    ),
    "an absolute path": ({"weight_map": {"a": "/etc/one.safetensors"}}, "it names the file '/etc/one.safetensors'"),
    "another format": ({"weight_map": {"a": "pytorch_model.bin"}}, "it names the file 'pytorch_model.bin'"),
    "no text": ({"weight_map": {"a": 1}}, 'index is damaged: not valid JSON: .* expected "'),
    "no weight_map": ({"text": b"{}"}, "the index is damaged: it has no weight_map"),
    "no object": ({"text": b"[]"}, "the index is damaged: not valid JSON"),
    "nothing": ({"text": b""}, "the index is damaged: not valid JSON"),
    "a name twice": (
        {"text": b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'},
        "the index is damaged: the name 'a' occurs twice",
    ),
    "two maps": ({"text": b'{"weight_map": {}, "weight_map": {}}'}, "the name 'weight_map' occurs twice"),
}


@pytest.mark.parametrize(("files", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_an_index_that_contradicts_its_files_is_an_error(store, files, message):
    for name in ("one", "two"):
        store.delete(f"f/{name}.safetensors")
    write(store, **files)
    with pytest.raises(exceptions.CheckpointError, match=message) as caught:
        load(store)
    assert str(caught.value).startswith(store.url)


def test_an_index_that_is_too_large_is_refused(store, monkeypatch):
    monkeypatch.setattr("torchobj.checkpoint.safetensors.weights._INDEX_BYTES", 100)
    write(store)
    with pytest.raises(exceptions.CheckpointError, match="the index is damaged: it has .* bytes; the limit is 100"):
        load(store)


def test_metadata_of_an_index_is_optional_and_other_members_are_ignored(store):
    write(store, text=json.dumps({"comment": [1, {"a": None}], "weight_map": MAP}).encode())
    assert load(store).metadata == {}


def test_files_of_folders_within_the_folder_are_read(store):
    store.put("f/unet/one.safetensors", safetensors.save({"a": A}))
    write(store, weight_map={"a": "unet/one.safetensors"}, one=None, two=None)
    assert torch.equal(load(store)["a"], A)
