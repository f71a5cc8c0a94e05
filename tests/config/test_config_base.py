"""A configuration knows which of its fields are set, also as a copy; only the configuration file depends on it."""

import copy
import dataclasses
import inspect
import pickle

import pytest

import torchobj
from torchobj import AdvancedOptions, CacheOptions, FileOptions, GCSOptions, PriceOptions, S3Options, StoreConfig
from torchobj.config import config_file, resolve

KINDS = [StoreConfig, S3Options, GCSOptions, FileOptions, CacheOptions, PriceOptions, AdvancedOptions]


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """Sets other values than the defaults for the buckets `s3://b` and `gs://b`."""
    path = tmp_path / "torchobj.toml"
    path.write_text("""
["s3://b"]
max_attempts = 3
hedge = false
s3 = { region = "of-the-file", anonymous = true }
file.sync = false
advanced.keep_alive_s = 2.0
["gs://b"]
gcs = { user_project = "of-the-file" }
""")
    monkeypatch.setattr(config_file, "_read", {})
    monkeypatch.setenv("TORCHOBJ_CONFIG", str(path))


def of_file(config):
    """Which of these fields the file determines, because they are not set."""
    found = resolve("s3://b", config)
    return {
        "max_attempts": found.max_attempts == 3,
        "hedge": not found.hedge,
        "region": found.s3.region == "of-the-file",
        "anonymous": found.s3.anonymous,
        "sync": not found.file.sync,
        "keep_alive_s": found.advanced.keep_alive_s == 2,
    }


#: A configuration with set fields, some to their defaults, and the fields that the file determines.
SET = StoreConfig(hedge=True, max_attempts=7, s3=S3Options(anonymous=False), file=FileOptions(sync=True))
OF_FILE = {
    "hedge": False,
    "max_attempts": False,
    "anonymous": False,
    "sync": False,
    "region": True,
    "keep_alive_s": True,
}


def test_a_field_that_is_not_set_reads_as_its_default():
    config = StoreConfig()
    assert (config.max_attempts, config.hedge, config.s3, config.advanced.keep_alive_s) == (10, True, S3Options(), 8.0)
    assert all(of_file(config).values())
    assert of_file(SET) == OF_FILE


@pytest.mark.parametrize(
    ("unset", "given"),
    [
        (StoreConfig(), StoreConfig(max_attempts=10, s3=S3Options())),
        (S3Options(), S3Options(region=None, anonymous=False, credential_provider=None)),
        (GCSOptions(), GCSOptions(parallel_upload="auto")),
        (FileOptions(), FileOptions(sync=True)),
        (AdvancedOptions(), AdvancedOptions(keep_alive_s=8.0)),
    ],
)
def test_a_field_that_is_set_to_its_default_has_no_other_repr_comparison_or_hash(unset, given):
    assert (repr(unset), hash(unset)) == (repr(given), hash(given))
    assert unset == given
    assert {unset: 1}[given] == 1
    assert dataclasses.asdict(unset) == dataclasses.asdict(given)


@pytest.mark.parametrize("kind", KINDS)
def test_signature_and_fields_show_the_defaults(kind):
    shown = {
        name: parameter.default
        for name, parameter in inspect.signature(kind).parameters.items()
        if not isinstance(getattr(kind(), name), tuple(KINDS))
    }
    assert shown == {name: getattr(kind(), name) for name in shown}
    assert {field.name for field in dataclasses.fields(kind)} == set(inspect.signature(kind).parameters)


COPIES = {
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "old pickle": lambda config: pickle.loads(pickle.dumps(config, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replaced": lambda config: config.replaced(),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_the_same_set_fields(copied):
    again = copied(SET)
    assert (again, hash(again), repr(again)) == (SET, hash(SET), repr(SET))
    assert of_file(again) == OF_FILE
    assert all(of_file(copied(StoreConfig())).values())
    for options in (S3Options(anonymous=False), FileOptions(sync=True), GCSOptions(user_project="p")):
        assert copied(options) == options
        assert copied(options)._set == options._set


def test_replace_leaves_fields_as_they_are():
    config = dataclasses.replace(SET, part_bytes=16 << 20)
    # It passes all fields: one that was set to its default counts as not set.
    assert of_file(config) == OF_FILE | {"hedge": True}
    assert (config.part_bytes, resolve("s3://b", config).part_bytes) == (16 << 20, 16 << 20)
    assert all(of_file(dataclasses.replace(StoreConfig(), part_bytes=16 << 20)).values())
    s3 = dataclasses.replace(S3Options(profile="p"), endpoint_url="http://e")
    found = resolve("s3://b", StoreConfig(s3=s3, hedge=True)).s3
    assert (found.profile, found.endpoint_url, found.region) == ("p", "http://e", "of-the-file")


def test_a_replaced_field_is_set_also_to_its_default():
    config = SET.replaced(s3=SET.s3.replaced(region=None), max_attempts=10)
    assert of_file(config) == OF_FILE | {"region": False}
    assert (config.max_attempts, config.hedge, config.s3.region) == (10, True, None)
    with pytest.raises(torchobj.exceptions.ConfigError, match="max_attempts=0"):
        SET.replaced(max_attempts=0)
    with pytest.raises(TypeError, match="did you mean max_attempts"):
        SET.replaced(max_attemps=1)


def test_of_a_resolved_configuration_all_fields_are_set():
    found = resolve("s3://b", SET)
    assert found.is_resolved and not SET.is_resolved
    for again in (found, *(copied(found) for copied in COPIES.values())):
        assert resolve("gs://b", again) is again
        assert again == found
    other = resolve("s3://other", StoreConfig())
    assert (other, other.is_resolved, resolve("s3://b", other) is other) == (StoreConfig(), True, True)


@pytest.mark.parametrize("base", [torchobj.StoreConfig, torchobj.S3Options, torchobj.AdvancedOptions])
def test_a_configuration_has_no_subclasses(base):
    with pytest.raises(TypeError, match=f"Mine: {base.__name__} has no subclasses"):
        type("Mine", (base,), {})
