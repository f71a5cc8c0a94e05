"""Configurations are validated at construction and have the same fields and defaults in Python and Rust."""

import copy
import dataclasses
import functools
import inspect
import math
import pickle
from pathlib import Path

import pytest

import torchobj
from torchobj import _torchobj
from torchobj.config import store_config
from torchobj.exceptions import ConfigError

ANY, S3, GCS = torchobj.StoreConfig, torchobj.S3Options, torchobj.GCSOptions


def test_defaults_are_the_same_as_in_rust():
    defaults, config = _torchobj.default_config(), torchobj.StoreConfig()
    assert defaults.pop("file") == dataclasses.asdict(config.file)
    values = vars(config) | vars(config.advanced)
    assert {name: values[name] for name in defaults} == defaults
    assert set(dataclasses.asdict(config.advanced)) <= set(defaults)


def refused(kind, setting, words):
    with pytest.raises(ConfigError) as caught:
        kind(**setting)
    assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"part_bytes": 1 << 20}, "part_bytes=1048576: must be 5 MiB..5 GiB"),
        ({"part_bytes": 8.5}, "part_bytes=8.5"),
        ({"part_bytes": True}, "part_bytes=True"),
        ({"max_in_flight": 0}, "max_in_flight=0: must be 1..4096"),
        ({"max_in_flight": "many"}, "max_in_flight='many'"),
        ({"max_attempts": -1}, "max_attempts=-1"),
        ({"idle_timeout_s": 0}, "idle_timeout_s=0: must be 0.01..86400 s"),
        ({"idle_timeout_s": float("nan")}, "idle_timeout_s=nan"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_allowed_range(setting, words):
    refused(torchobj.StoreConfig, setting, words)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"max_in_flight_cap": 0}, "max_in_flight_cap=0: must be 1..4096"),
        ({"min_bytes_per_s": -1}, "min_bytes_per_s=-1: must be 0..1073741824"),
        ({"min_bytes_per_s": 0.5}, "min_bytes_per_s=0.5"),
        ({"whole_below_bytes": 1}, "whole_below_bytes=1: must be 1 MiB..5 GiB"),
        ({"commit_timeout_s": 0}, "commit_timeout_s=0: must be 0.01..86400 s"),
    ],
)
def test_an_advanced_value_out_of_range_is_refused_with_the_allowed_range(setting, words):
    refused(torchobj.AdvancedOptions, setting, words)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
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
def test_an_s3_option_that_is_not_allowed_is_refused_with_the_allowed_values(setting, words):
    refused(torchobj.S3Options, setting, words)


KMS_KEY = "projects/p/locations/eu/keyRings/r/cryptoKeys/k"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"endpoint_url": "localhost:4443"}, "endpoint_url='localhost:4443': must be a URL"),
        ({"endpoint_url": "http://host/?token=x"}, "endpoint_url: must have no query or fragment"),
        (
            {"endpoint_url": "http://user:PASS@host"},
            "endpoint_url: must have no user and password; use Application Default Credentials",
        ),
        ({"user_project": "a b"}, "user_project='a b': must be the ID or number of a project"),
        ({"user_project": "p\r\nx"}, "user_project="),
        ({"user_project": "p", "anonymous": True}, "user_project='p': must be None if anonymous is True"),
        ({"universe_domain": "https://x.y"}, "universe_domain='https://x.y': must be a domain such as googleapis.com"),
        ({"kms_key_name": "k"}, "kms_key_name='k': must be projects/P/locations/L/keyRings/R/cryptoKeys/K, or None"),
        ({"parallel_upload": "never"}, "parallel_upload='never': must be auto, True or False"),
        ({"parallel_upload": 1}, "parallel_upload=1: must be auto, True or False"),
        ({"storage_class": 1}, "storage_class=1: must be a string, or None"),
        ({"force_sdk": None}, "force_sdk=None: must be True or False"),
    ],
)
def test_a_gcs_option_that_is_not_allowed_is_refused_with_the_allowed_values(setting, words):
    refused(GCS, setting, words)


@pytest.mark.parametrize(
    "setting",
    [
        {"user_project": "example.com:my-project"},
        {"user_project": "123456789"},
        {"universe_domain": "apis-berlin-build0.goog"},
        {"kms_key_name": KMS_KEY},
        {"parallel_upload": True},
        {"storage_class": "NEARLINE"},
    ],
)
def test_a_gcs_option_that_is_allowed_is_kept(setting):
    [(name, value)] = setting.items()
    assert getattr(GCS(**setting), name) == value


def test_the_options_of_gcs_and_their_defaults():
    assert dataclasses.asdict(GCS()) == {
        "endpoint_url": None,
        "user_project": None,
        "universe_domain": None,
        "anonymous": False,
        "credential_provider": None,
        "storage_class": None,
        "kms_key_name": None,
        "parallel_upload": "auto",
        "force_sdk": False,
    }
    with pytest.raises(TypeError, match="positional"):
        GCS("http://localhost:4443")


KINDS = [ANY, S3, GCS, torchobj.FileOptions, torchobj.CacheOptions, torchobj.PriceOptions]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_an_unknown_type_is_refused_with_the_name_of_its_field(kind):
    class Other:
        """Has a type that no field accepts."""

    for field in dataclasses.fields(kind):
        with pytest.raises(ConfigError, match=f"^{field.name}=.*: must be "):
            kind(**{field.name: Other()})


@pytest.mark.parametrize(
    ("kind", "setting", "words"),
    [
        (S3, {"region": 5}, "region=5: must be a string, or None"),
        (
            S3,
            {"endpoint_url": "http://user:PASS@host"},
            "endpoint_url: must have no user and password; store credentials where the AWS SDKs look for them",
        ),
        (
            S3,
            {"endpoint_url": "user:PASS@host"},
            "endpoint_url: must have no user and password; store credentials where the AWS SDKs look for them",
        ),
        (S3, {"endpoint_url": b"http://x"}, "endpoint_url=b'http://x': must be a string, or None"),
        (S3, {"anonymous": 1}, "anonymous=1: must be True or False"),
        (torchobj.FileOptions, {"sync": "no"}, "sync='no': must be True or False"),
        (torchobj.CacheOptions, {"folder": 3}, "folder=<class 'int'>: must be a path, or None"),
        (torchobj.CacheOptions, {"folder": ""}, "folder='': must be a path, or None"),
        (
            torchobj.CacheOptions,
            {"folder": "a\0b"},
            r"folder='a\x00b': must be a path of a local disk, such as '/nvme/torchobj'",
        ),
        (
            torchobj.CacheOptions,
            {"folder": "s3://b/c"},
            "folder='s3://b/c': must be a path of a local disk, such as '/nvme/torchobj'",
        ),
        (
            torchobj.CacheOptions,
            {"folder": "file:///b/c"},
            "folder='file:///b/c': must be a path of a local disk, such as '/nvme/torchobj'",
        ),
        (
            torchobj.CacheOptions,
            {"folder": Path("gs://b/c")},
            "folder='gs:/b/c': must be a path of a local disk, such as '/nvme/torchobj'",
        ),
        (torchobj.CacheOptions, {"max_bytes": 1 << 19}, "max_bytes=524288: must be 1 MiB..1125899906842624"),
        (torchobj.CacheOptions, {"ttl_s": 1}, "ttl_s=1: must be 60..31536000 s"),
        (torchobj.CacheOptions, {"admit": 1}, "admit=1: must be True or False"),
        (torchobj.PriceOptions, {"get_per_1000": -0.1}, "get_per_1000=-0.1: must be 0..1000 dollars"),
        (torchobj.PriceOptions, {"list_per_1000": math.nan}, "list_per_1000=nan: must be 0..1000 dollars"),
        (torchobj.PriceOptions, {"put_per_1000": math.inf}, "put_per_1000=inf: must be 0..1000 dollars"),
        (torchobj.PriceOptions, {"egress_per_gib": "0.09"}, "egress_per_gib='0.09': must be 0..1000 dollars"),
        (torchobj.PriceOptions, {"get_per_1000": True}, "get_per_1000=True: must be 0..1000 dollars"),
        (ANY, {"prices": {"get_per_1000": 1}}, "prices=<class 'dict'>: must be a PriceOptions"),
        (ANY, {"s3": "x"}, "s3=<class 'str'>: must be an S3Options"),
        (ANY, {"s3": {"region": "x"}}, "s3=<class 'dict'>: must be an S3Options"),
        (ANY, {"gcs": S3()}, "gcs=<class 'torchobj.config.options.S3Options'>: must be a GCSOptions"),
        (ANY, {"file": None}, "file=<class 'NoneType'>: must be a FileOptions"),
        (ANY, {"file": S3()}, "file=<class 'torchobj.config.options.S3Options'>: must be a FileOptions"),
        (ANY, {"hedge": None}, "hedge=None: must be True or False"),
        (ANY, {"ca_bundle": 3}, "ca_bundle=<class 'int'>: must be a path, or None"),
        (ANY, {"max_attempts": "3"}, "max_attempts='3': must be 1..1000"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_allowed_type(kind, setting, words):
    with pytest.raises(ConfigError) as caught:
        kind(**setting)
    assert str(caught.value) == words


def test_a_key_passed_instead_of_its_file_is_not_in_the_message():
    with pytest.raises(ConfigError, match="customer_key_file=<class 'bytes'>: must be a path") as caught:
        torchobj.S3Options(customer_key_file=b"thirty-two bytes of a secret key")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        torchobj.StoreConfig(customer_key_file="thirty-two bytes of a secret key")
    assert "secret" not in str(caught.value)


def test_the_content_of_a_key_file_is_not_in_the_repr():
    config = torchobj.StoreConfig(s3=torchobj.S3Options(customer_key_file="thirty-two bytes of a secret key"))
    assert "secret" not in repr(config)
    assert "secret" not in repr(config.s3)


#: The fields that moved from `StoreConfig` to `S3Options`.
MOVED = [
    "region",
    "endpoint_url",
    "profile",
    "anonymous",
    "addressing_style",
    "requester_pays",
    "encryption",
    "kms_key_id",
    "customer_key_file",
    "storage_class",
    "checksum",
    "key_rules",
    "force_sdk",
]


@pytest.mark.parametrize("name", MOVED)
def test_a_field_that_moved_is_refused_with_its_new_location(name):
    message = f"{name}: is in S3Options: StoreConfig(s3=S3Options({name}=...))"
    if name in {field.name for field in dataclasses.fields(torchobj.GCSOptions)}:
        both = f"StoreConfig(s3=S3Options({name}=...)) or StoreConfig(gcs=GCSOptions({name}=...))"
        message = f"{name}: belongs to a provider: {both}"
    for call in (torchobj.StoreConfig, functools.partial(dataclasses.replace, torchobj.StoreConfig())):
        with pytest.raises(ConfigError) as refused:
            call(**{name: None})
        assert str(refused.value) == message
    with pytest.raises(AttributeError) as missing:
        getattr(torchobj.StoreConfig(), name)
    assert str(missing.value) == message


@pytest.mark.parametrize("name", ["user_project", "universe_domain", "kms_key_name", "parallel_upload"])
def test_an_option_of_gcs_is_refused_with_its_location(name):
    message = f"{name}: is in GCSOptions: StoreConfig(gcs=GCSOptions({name}=...))"
    with pytest.raises(ConfigError) as refused:
        ANY(**{name: None})
    assert str(refused.value) == message
    with pytest.raises(AttributeError) as missing:
        getattr(ANY(), name)
    assert str(missing.value) == message


def test_one_message_names_all_fields_that_moved():
    with pytest.raises(ConfigError, match=r"^region, profile: are in .*\(s3=S3Options\(region=..., profile=...\)\)$"):
        torchobj.StoreConfig(region="x", max_attempts=1, profile="y")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_is_refused_with_its_name(kind):
    with pytest.raises(TypeError, match="'max_attemps'"):
        kind(max_attemps=3)
    with pytest.raises(AttributeError, match="'max_attemps'"):
        kind().max_attemps  # noqa: B018


@pytest.mark.parametrize(
    ("kind", "name", "similar"),
    [
        (torchobj.StoreConfig, "max_attemps", "max_attempts"),
        (torchobj.StoreConfig, "endpoint", "endpoint_url"),
        (torchobj.S3Options, "endpoint", "endpoint_url"),
        (torchobj.S3Options, "region_name", "region"),
        (torchobj.S3Options, "aws_access_key_id", "access_key_id"),
        (torchobj.S3Options, "aws_secret_access_key", "secret_access_key"),
        (torchobj.S3Options, "aws_session_token", "session_token"),
        (torchobj.GCSOptions, "project", "user_project"),
        (torchobj.FileOptions, "synch", "sync"),
    ],
)
def test_an_unknown_field_suggests_the_most_similar_one(kind, name, similar):
    with pytest.raises(TypeError, match=rf"'{name}'; did you mean {similar}\?$"):
        kind(**{name: "canary"})
    with pytest.raises(TypeError, match="'xyz': its fields are .*sync"):
        torchobj.FileOptions(xyz=1)


def test_the_signature_shows_the_fields():
    names = list(inspect.signature(torchobj.StoreConfig).parameters)
    assert names == [field.name for field in dataclasses.fields(torchobj.StoreConfig)]
    with pytest.raises(TypeError, match="positional"):
        torchobj.StoreConfig(torchobj.S3Options())


def test_a_configuration_is_frozen_and_pickles():
    s3, gcs = torchobj.S3Options(region="eu-west-1"), torchobj.GCSOptions(user_project="p", parallel_upload=False)
    config = torchobj.StoreConfig(s3=s3, gcs=gcs, file=torchobj.FileOptions(sync=False), max_in_flight=7)
    for frozen, name in (
        (config, "max_in_flight"),
        (config, "s3"),
        (s3, "region"),
        (gcs, "user_project"),
        (config.file, "sync"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, "x")
    for again in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert (again, hash(again)) == (config, hash(config))


def test_a_pickle_with_a_field_that_moved_is_refused_with_its_new_location():
    flat = torchobj.StoreConfig()
    vars(flat)["region"] = "eu-west-1"
    with pytest.raises(ConfigError, match="region: is in S3Options"):
        pickle.loads(pickle.dumps(flat))
    older = torchobj.StoreConfig(max_in_flight=7)
    del vars(older)["hedge"], vars(older)["gcs"]
    assert pickle.loads(pickle.dumps(older)) == torchobj.StoreConfig(max_in_flight=7)


def test_region_and_endpoint_replace_those_of_the_configuration():
    given = torchobj.StoreConfig(s3=torchobj.S3Options(region="a", endpoint_url="http://a", profile="p"), hedge=False)
    config = store_config(given, "b", None)
    assert (config.s3.region, config.s3.endpoint_url, config.s3.profile, config.hedge) == ("b", "http://a", "p", False)
    config = store_config(torchobj.StoreConfig(s3=torchobj.S3Options(profile="p")), None, "http://b")
    assert (config.s3.region, config.s3.endpoint_url, config.s3.profile) == (None, "http://b", "p")
    assert store_config(given) is given
    for other in ({"region": "a"}, torchobj.S3ClientConfig(), 0, ""):
        with pytest.raises(ConfigError, match=r"^config=.*: must be a StoreConfig, or None$"):
            store_config(other)


@pytest.mark.parametrize("url", ["gs://b", "gcs://b"])
def test_the_endpoint_of_a_url_of_gcs_is_an_option_of_gcs(url):
    given = ANY(s3=S3(endpoint_url="http://s3"), gcs=GCS(anonymous=True))
    for config in (
        store_config(given, endpoint_url="http://gcs", scheme="gs"),
        torchobj.Store(url, endpoint_url="http://gcs", config=given).config,
        torchobj.fsspec.GCSFileSystem(given, endpoint_url="http://gcs")._config,
    ):
        assert (config.gcs.endpoint_url, config.gcs.anonymous, config.s3.endpoint_url) == (
            "http://gcs",
            True,
            "http://s3",
        )
    assert torchobj.Store("s3://b", endpoint_url="http://s3").config.gcs == GCS()


@pytest.mark.parametrize("kind", [torchobj.ObjectMapDataset, torchobj.ObjectIterableDataset])
def test_a_dataset_of_gcs_shows_its_endpoint_and_has_no_region(kind):
    config = ANY(gcs=GCS(endpoint_url="http://gcs"))
    for dataset in (
        kind("gs://b/x", config=config),
        kind.from_prefix("gcs://b/x", config=config),
        kind.from_objects(["gs://b/x", "gcs://b/y"], config=config),
    ):
        assert (dataset.endpoint, dataset.region) == ("http://gcs", None)
    named = kind.from_objects(["gs://b/x", "gcs://b/y"])._listing.objects()
    assert (named.bases(), [named.url(index) for index in range(2)]) == (["gs://b"], ["gs://b/x", "gs://b/y"])


def test_a_region_is_refused_for_gcs_with_the_reason():
    reason = (
        "^region='eu': must be None for a URL of gs://, because requests to Google Cloud Storage do not depend on the "
        "location of the bucket$"
    )
    for call in (functools.partial(torchobj.Store, "gs://b"), torchobj.fsspec.GCSFileSystem):
        with pytest.raises(ConfigError, match=reason):
            call(region="eu")
