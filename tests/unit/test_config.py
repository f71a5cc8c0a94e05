"""Configurations are checked where they are made, and are the same in Python and in Rust."""

import dataclasses
import pickle

import pytest

import torchobj
from torchobj import _torchobj
from torchobj.config import store_config
from torchobj.exceptions import ConfigError


def test_defaults_are_those_of_rust():
    config = torchobj.StoreConfig()
    assert {name: getattr(config, name) for name in _torchobj.default_config()} == _torchobj.default_config()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"part_bytes": 1 << 20}, "part_bytes=1048576: must be 5 MiB..5 GiB"),
        ({"part_bytes": 8.5}, "part_bytes=8.5"),
        ({"part_bytes": True}, "part_bytes=True"),
        ({"max_in_flight": 0}, "max_in_flight=0: must be 1..4096"),
        ({"max_in_flight": "many"}, "max_in_flight='many'"),
        ({"max_in_flight_cap": 0}, "max_in_flight_cap=0: must be 1..4096"),
        ({"max_attempts": -1}, "max_attempts=-1"),
        ({"idle_timeout_s": 0}, "idle_timeout_s=0: must be 0.01..86400 s"),
        ({"idle_timeout_s": float("nan")}, "idle_timeout_s=nan"),
        ({"min_bytes_per_s": -1}, "min_bytes_per_s=-1: must be 0..1073741824"),
        ({"min_bytes_per_s": 0.5}, "min_bytes_per_s=0.5"),
        ({"checksum": "md5"}, "checksum='md5': must be auto, crc64nvme, crc32c or none"),
        ({"addressing_style": "dns"}, "addressing_style='dns'"),
        ({"encryption": "rot13"}, "encryption='rot13'"),
        ({"kms_key_id": "k"}, "kms_key_id='k'"),
        ({"endpoint_url": "localhost:9000"}, "endpoint_url='localhost:9000': must be a URL"),
        ({"key_rules": "none"}, "key_rules='none'"),
        ({"requester_pays": True, "anonymous": True}, "requester_pays=True"),
        ({"customer_key_file": "/k", "encryption": "AES256"}, "customer_key_file"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(setting, words):
    with pytest.raises(ConfigError) as caught:
        torchobj.StoreConfig(**setting)
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("kind", [torchobj.StoreConfig, torchobj.S3ClientConfig])
def test_a_value_of_no_type_of_its_field_is_refused_by_name(kind):
    class Other:
        """Of no type that any field takes."""

    for field in dataclasses.fields(kind):
        with pytest.raises(ConfigError, match=f"^{field.name}=.*: must be "):
            kind(**{field.name: Other()})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"region": 5}, "region=5: must be a string, or None"),
        (
            {"endpoint_url": "http://user:PASS@host"},
            "endpoint_url: must have no user and password; the AWS SDKs' places are for credentials",
        ),
        (
            {"endpoint_url": "user:PASS@host"},
            "endpoint_url: must have no user and password; the AWS SDKs' places are for credentials",
        ),
        ({"endpoint_url": b"http://x"}, "endpoint_url=b'http://x': must be a string, or None"),
        ({"anonymous": 1}, "anonymous=1: must be True or False"),
        ({"hedge": None}, "hedge=None: must be True or False"),
        ({"ca_bundle": 3}, "ca_bundle=<class 'int'>: must be a path, or None"),
        ({"max_attempts": "3"}, "max_attempts='3': must be 1..1000"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_allowed(setting, words):
    with pytest.raises(ConfigError) as caught:
        torchobj.StoreConfig(**setting)
    assert str(caught.value) == words


def test_a_key_that_is_given_in_place_of_its_file_is_not_in_the_message():
    with pytest.raises(ConfigError, match="customer_key_file=<class 'bytes'>: must be a path") as caught:
        torchobj.StoreConfig(customer_key_file=b"thirty-two bytes of a secret key")
    assert "secret" not in str(caught.value)


def test_a_number_of_requests_is_fixed_and_auto_has_a_cap():
    fixed, auto = torchobj.StoreConfig(max_in_flight=300), torchobj.StoreConfig(max_in_flight_cap=20)
    assert (fixed.max_in_flight_number, fixed.adaptive_cap) == (300, None)
    assert (auto.max_in_flight_number, auto.adaptive_cap) == (20, 20)


def test_a_configuration_is_frozen_and_pickles():
    config = torchobj.StoreConfig(region="eu-west-1", max_in_flight=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.region = "x"
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_of_s3torchconnector_says_the_same():
    theirs = torchobj.S3ClientConfig(throughput_target_gbps=100.0, part_size=16 << 20, unsigned=True, max_attempts=3)
    ours = theirs.to_store_config()
    assert (ours.max_in_flight, ours.part_bytes, ours.anonymous, ours.max_attempts) == (250, 16 << 20, True, 3)
    assert torchobj.S3ClientConfig().to_store_config() == torchobj.StoreConfig()
    assert torchobj.S3ClientConfig(force_path_style=True).to_store_config().addressing_style == "path"
    with pytest.raises(ConfigError, match="max_attempts=0"):
        torchobj.S3ClientConfig(max_attempts=0)


def test_region_and_endpoint_replace_those_of_the_configuration():
    config = store_config(torchobj.StoreConfig(region="a", endpoint_url="http://a"), "b", None)
    assert (config.region, config.endpoint_url) == ("b", "http://a")
    with pytest.raises(ConfigError, match="config="):
        store_config({"region": "a"})
