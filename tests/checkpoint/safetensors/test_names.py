"""Names of files and folders of safetensors."""

import pytest

from torchobj.checkpoint.safetensors import names
from torchobj.exceptions import CheckpointError, ConfigError


@pytest.mark.parametrize(
    "name", ["a.safetensors", "model-00001-of-00002.safetensors", "unet/model.safetensors", "..a.safetensors"]
)
def test_shards_of_the_folder_and_its_folders_are_accepted(name):
    names.check_shard(name)


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "x/../../a.safetensors",
        "..\\a.safetensors",
        "/etc/a.safetensors",
        "\\a.safetensors",
        "C:\\a.safetensors",
        "C:a.safetensors",
        "s3://other/a.safetensors",
        "./a.safetensors",
        "x//a.safetensors",
        "",
        "..",
        "pytorch_model.bin",
        "a.safetensors/",
    ],
)
def test_other_files_are_refused(name):
    with pytest.raises(CheckpointError, match="not a file of safetensors in the folder of the index"):
        names.check_shard(name)


def test_a_format_is_given_by_the_suffix_or_the_argument():
    assert names.is_safetensors("s3://bucket/A.SafeTensors", None)
    assert names.is_safetensors("s3://bucket/a.bin", "safetensors")
    assert not names.is_safetensors("s3://bucket/a.safetensors.pt", None)
    with pytest.raises(ConfigError, match="format='gguf': must be 'safetensors'"):
        names.is_safetensors("s3://bucket/a.gguf", "gguf")


@pytest.mark.parametrize(
    ("name", "is_of_model", "is_tensor_shard"),
    [
        (names.WHOLE, True, False),
        (names.INDEX, True, False),
        (names.shard(1, 2), True, False),
        (names.tensor_shard(3, 1, 2), True, True),
        (names.tensor_shard(100_000, 1, 2), True, True),
        ("shard-00001-model.safetensors", False, False),
        ("shard-00001-of-00002.safetensors", False, False),
        ("shard-1-model-00001-of-00002.safetensors", False, False),
        ("adapter_model.safetensors", False, False),
        ("model.fp16.safetensors", False, False),
    ],
)
def test_names_of_weights_are_those_that_a_save_gives(name, is_of_model, is_tensor_shard):
    assert names.is_of_model(name) == is_of_model
    assert names.is_tensor_shard(name) == is_tensor_shard
