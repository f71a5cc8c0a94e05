"""The arguments of s3torchconnector are converted to a `StoreConfig`, in its classes only."""

import dataclasses
import functools

import pytest

import torchobj
from torchobj import S3Checkpoint, S3ClientConfig, S3IterableDataset, S3MapDataset, S3Options, StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.s3torchconnector.client_config import connector_config
from torchobj.s3torchconnector.dcp import S3FileSystem, S3StorageReader, S3StorageWriter


def test_a_value_of_an_unknown_type_is_refused_with_the_name_of_its_field():
    for field in dataclasses.fields(S3ClientConfig):
        with pytest.raises(ConfigError, match=f"^{field.name}=.*: must be "):
            S3ClientConfig(**{field.name: object()})


def test_an_unknown_field_is_refused_with_its_name():
    with pytest.raises(TypeError, match="'max_attemps'"):
        S3ClientConfig(max_attemps=3)
    with pytest.raises(AttributeError, match="'max_attemps'"):
        S3ClientConfig().max_attemps  # noqa: B018


def test_a_config_of_s3torchconnector_says_the_same():
    theirs = S3ClientConfig(throughput_target_gbps=100.0, part_size=16 << 20, unsigned=True, max_attempts=3)
    ours = theirs.to_store_config()
    assert (ours.max_in_flight, ours.part_bytes, ours.s3.anonymous, ours.max_attempts) == (250, 16 << 20, True, 3)
    assert S3ClientConfig().to_store_config() == StoreConfig()
    assert S3ClientConfig(force_path_style=True).to_store_config().s3.addressing_style == "path"
    with pytest.raises(ConfigError, match="max_attempts=0"):
        S3ClientConfig(max_attempts=0)


def test_region_and_endpoint_replace_those_of_the_configuration():
    config = connector_config(None, S3ClientConfig(profile="p", max_attempts=3), "r", "http://e")
    assert config == StoreConfig(s3=S3Options(profile="p", region="r", endpoint_url="http://e"), max_attempts=3)
    given = StoreConfig(s3=S3Options(region="a"), hedge=False)
    assert connector_config(None, given, None, None) is given
    assert connector_config(given, None, "b", None) == StoreConfig(s3=S3Options(region="b"), hedge=False)
    assert connector_config(None, None, None, None, "http://e") == StoreConfig(s3=S3Options(endpoint_url="http://e"))
    assert connector_config(None, None, None, None) is None


@pytest.mark.parametrize(
    "call",
    [
        functools.partial(S3MapDataset.from_prefix, "s3://b/"),
        functools.partial(S3MapDataset.from_objects, ["s3://b/k"]),
        functools.partial(S3IterableDataset.from_prefix, "s3://b/"),
        functools.partial(S3IterableDataset.from_objects, ["s3://b/k"]),
        S3Checkpoint,
    ],
)
def test_a_configuration_with_two_names_is_passed_by_one_and_has_the_right_type(call):
    for name in ("config", "s3client_config"):
        for value in ({}, 0, ""):
            with pytest.raises(ConfigError, match="must be a StoreConfig or an S3ClientConfig"):
                call(**{name: value})
    with pytest.raises(ConfigError, match="^config: must be None if s3client_config is set$"):
        call(config=StoreConfig(), s3client_config=StoreConfig())


@pytest.mark.parametrize("kind", [S3MapDataset, S3IterableDataset])
def test_the_constructor_and_the_classmethods_of_a_dataset_have_the_names_of_both(kind):
    theirs = {"region": "r", "endpoint": "http://e", "s3client_config": S3ClientConfig(max_attempts=3)}
    ours = {"region": "r", "endpoint_url": "http://e", "config": StoreConfig(max_attempts=3)}
    manifest = torchobj.Manifest.from_urls(["s3://b/k"])
    for create, source in (
        (kind, "s3://b/"),
        (kind.from_prefix, "s3://b/"),
        (kind.from_objects, ["s3://b/k"]),
        (kind.from_manifest, manifest),
    ):
        for arguments in (theirs, ours):
            dataset = create(source, **arguments)
            assert (dataset.region, dataset.endpoint) == ("r", "http://e")
            assert dataset._listing.config.max_attempts == 3
        with pytest.raises(ConfigError, match="^endpoint_url: must be None if endpoint is set$"):
            create(source, endpoint="http://a", endpoint_url="http://b")


def test_classes_of_checkpoints_have_their_settings():
    config = S3ClientConfig(max_attempts=3)
    for storage in (S3StorageWriter, S3StorageReader):
        assert storage("r", "s3://b/run", config)._config == StoreConfig(s3=S3Options(region="r"), max_attempts=3)
    assert S3FileSystem("r")._config == StoreConfig(s3=S3Options(region="r"))
    assert S3Checkpoint("r", "http://e", config)._config.s3 == S3Options(region="r", endpoint_url="http://e")
