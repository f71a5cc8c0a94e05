"""Folders of safetensors are written as `huggingface_hub` writes them, and the index last."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.checkpoint.safetensors.folder import plans_of

safetensors = pytest.importorskip("safetensors.torch")
huggingface_hub = pytest.importorskip("huggingface_hub")


def tensors_of(sizes):
    return {
        f"layer.{number}": torch.full((size,), number % 256, dtype=torch.uint8) for number, size in enumerate(sizes)
    }


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 20))
def test_the_division_into_shards_is_that_of_huggingface_hub(sizes, limit):
    tensors = tensors_of(sizes)
    expected = huggingface_hub.split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    # Empty tensors of torch have one storage there.
    if 0 in sizes:
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()} or tensors
        expected = huggingface_hub.split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    planned = dict(plans_of(tensors, "memory://a/f/", None, limit))
    index = planned.pop("memory://a/f/model.safetensors.index.json", None)
    assert list(planned) == [f"memory://a/f/{file}" for file in expected.filename_to_tensors]
    assert (index is not None) == expected.is_sharded
    if index is not None:
        [(_, text)] = index.literals
        assert text.decode() == json.dumps(
            {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}, indent=2
        )


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_a_folder_is_the_one_of_huggingface_hub(bucket, config, tmp_path):
    tensors = {f"layer.{number}.weight": torch.full((1000,), float(number)) for number in range(5)}
    huggingface_hub.save_torch_state_dict(tensors, tmp_path, max_shard_size=9000)
    seen = []
    saved = torchobj.save(
        tensors,
        f"{bucket.url}/model/",
        format="safetensors",
        metadata={"format": "pt"},
        max_shard_bytes=9000,
        config=config,
        progress=seen.append,
    )
    theirs = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {key.removeprefix("model/"): bucket.body(key) for key in bucket.keys()} == theirs
    index = theirs["model.safetensors.index.json"]
    assert (saved.url, saved.size) == (f"{bucket.url}/model/model.safetensors.index.json", len(index))
    assert seen[-1].bytes_done == seen[-1].bytes_total == sum(map(len, theirs.values()))


def test_a_folder_of_one_file_has_no_index():
    for limit in (None, 100):
        url = f"memory://single-{limit}/f/"
        saved = torchobj.save(tensors_of([3, 4]), url, format="safetensors", max_shard_bytes=limit)
        assert [info.key for info in torchobj.Store(f"memory://single-{limit}").list()] == ["f/model.safetensors"]
        assert saved.url == f"{url}model.safetensors"


def test_earlier_weights_are_deleted_first_and_other_files_stay():
    store = torchobj.Store("memory://again")
    url = "memory://again/f/"
    torchobj.save(tensors_of([9] * 5), url, format="safetensors", max_shard_bytes=10)
    for other in ("f/config.json", "f/model.fp16.safetensors", "f/sub/model.safetensors", "model.safetensors"):
        store.put(other, b"other")
    torchobj.save(tensors_of([9] * 2), url, format="safetensors", max_shard_bytes=10)
    assert sorted(info.key for info in store.list()) == [
        "f/config.json",
        "f/model-00001-of-00002.safetensors",
        "f/model-00002-of-00002.safetensors",
        "f/model.fp16.safetensors",
        "f/model.safetensors.index.json",
        "f/sub/model.safetensors",
        "model.safetensors",
    ]
    torchobj.save(tensors_of([9]), url, format="safetensors")
    assert "f/model.safetensors.index.json" not in [info.key for info in store.list()]
    assert torchobj.load(url)["layer.0"].numel() == 9


def test_without_overwrite_a_folder_with_weights_is_refused():
    url = "memory://kept/f/"
    torchobj.save(tensors_of([9] * 2), url, format="safetensors", overwrite=False, max_shard_bytes=10)
    with pytest.raises(exceptions.PreconditionFailedError, match=r"f/model-00001-of-00002\.safetensors: exists"):
        torchobj.save(tensors_of([8]), url, format="safetensors", overwrite=False)
    assert torchobj.load(url).keys() == {"layer.0", "layer.1"}


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_a_save_that_fails_leaves_a_folder_without_weights(bucket, config, control):
    url = f"{bucket.url}/f/"
    options = {"format": "safetensors", "max_shard_bytes": 10, "config": config}
    torchobj.save(tensors_of([9] * 3), url, **options)
    control.faults({"operation": "PutObject", "skip": 1, "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.StoreError):
        torchobj.save(tensors_of([8] * 3), url, **options)
    assert bucket.keys() == ["f/model-00001-of-00003.safetensors"]
    with pytest.raises(
        exceptions.CheckpointError, match="has neither model.safetensors.index.json nor model.safetensors"
    ):
        torchobj.load(url, config=config)


def test_nothing_is_deleted_if_the_tensors_are_refused():
    url, tensor = "memory://refused/f/", torch.ones(9)
    torchobj.save(tensors_of([9] * 2), url, format="safetensors", max_shard_bytes=10)
    for tensors, error in (
        ({"a": tensor, "b": tensor}, exceptions.CheckpointError),
        ({"a": 1}, exceptions.ConfigError),
    ):
        with pytest.raises(error):
            torchobj.save(tensors, url, format="safetensors", max_shard_bytes=10)
    assert torchobj.load(url).keys() == {"layer.0", "layer.1"}


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("memory://a/f/", {"max_shard_bytes": 0, "format": "safetensors"}, "max_shard_bytes=0: must be"),
        ("memory://a/f/", {"max_shard_bytes": "5GB", "format": "safetensors"}, "max_shard_bytes='5GB': must be"),
        ("memory://a/f.safetensors", {"max_shard_bytes": 5}, "must be a folder: end with a slash"),
        ("memory://a/f/", {"if_version": "1", "format": "safetensors"}, "is a folder, which has no version"),
        ("memory://a/f/", {}, "ends with a slash and names no object"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(url, options, message):
    with pytest.raises(exceptions.ConfigError, match=message):
        torchobj.save({"a": torch.ones(2)}, url, **options)
