"""The configuration file: which prefix applies to a URL, what replaces its fields, and what is refused in it."""

import dataclasses
import os
import pickle

import pytest

import torchobj
from torchobj import FileOptions, GCSOptions, PriceOptions, S3Options, Store, StoreConfig, load_config
from torchobj.config import config_file, resolve
from torchobj.datasets.wrappers import max_in_flight_of, prices_of
from torchobj.exceptions import ConfigError

CANARY = "canary8SECRET"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file and has `TORCHOBJ_CONFIG` name it."""
    monkeypatch.setattr(config_file, "_read", {})

    def written(text):
        file = tmp_path / "torchobj.toml"
        file.write_text(text)
        monkeypatch.setenv("TORCHOBJ_CONFIG", str(file))
        config_file._read.clear()
        return str(file)

    return written


PREFIXES = """
["s3://"]
max_attempts = 1
["s3://bucket"]
max_attempts = 2
["s3://bucket/a/"]
max_attempts = 3
["s3://bucket/a/b c/é"]
max_attempts = 4
["file:///data"]
max_attempts = 5
["gs://"]
max_attempts = 6
["gcs://bucket/a"]
max_attempts = 7
"""


@pytest.mark.parametrize(
    ("url", "attempts"),
    [
        ("s3://other", 1),
        ("s3://bucket2", 1),
        ("s3://bucket", 2),
        ("s3://bucket/", 2),
        ("s3://bucket/ab", 2),
        ("s3://bucket//a", 2),
        ("s3://bucket/a", 3),
        ("s3://bucket/a/", 3),
        ("s3://bucket/a/b", 3),
        ("s3://bucket/a/b c/é/x", 4),
        ("file:///data", 5),
        ("file:///data/x", 5),
        ("file:///data2", 10),
        ("memory://bucket/a", 10),
        ("gs://bucket", 6),
        ("gcs://bucket", 6),
        ("gs://bucket/a/x", 7),
        ("gcs://bucket/a/x", 7),
    ],
)
def test_the_longest_prefix_that_ends_at_a_slash_of_the_url_applies(write, url, attempts):
    write(PREFIXES)
    assert resolve(url, StoreConfig()).max_attempts == attempts


FIELDS = """
["s3://b"]
max_attempts = 3
hedge = false
s3 = { endpoint_url = "http://file", anonymous = true }
file.sync = false
"""


def test_what_a_call_is_given_replaces_field_by_field_also_by_a_default(write):
    write(FIELDS)
    s3 = S3Options(endpoint_url="http://call", region="r")
    config = Store("s3://b", config=StoreConfig(s3=s3, hedge=True)).config
    assert (config.max_attempts, config.hedge, config.file.sync) == (3, True, False)
    assert (config.s3.endpoint_url, config.s3.region, config.s3.anonymous) == ("http://call", "r", True)
    config = Store("s3://b", config=StoreConfig(s3=S3Options(anonymous=False), file=FileOptions(sync=True))).config
    assert (config.s3.endpoint_url, config.s3.anonymous, config.file.sync) == ("http://file", False, True)
    assert Store("s3://b", endpoint_url="http://call").config.s3.endpoint_url == "http://call"
    assert Store("s3://b", region="r").config.s3.endpoint_url == "http://file"
    assert (
        Store("s3://b", config=torchobj.S3ClientConfig(part_size=16 << 20).to_store_config()).config.max_attempts == 3
    )


def test_options_of_gcs_are_read_from_the_file_and_overridden_field_by_field(write):
    write('["gs://b"]\ngcs = { user_project = "p", parallel_upload = false }')
    for url in ("gs://b", "gcs://b"):
        assert resolve(url, StoreConfig()).gcs == GCSOptions(user_project="p", parallel_upload=False)
        given = GCSOptions(parallel_upload="auto", endpoint_url="http://call")
        assert resolve(url, StoreConfig(gcs=given)).gcs == GCSOptions(user_project="p", endpoint_url="http://call")
    assert Store("s3://b").config.gcs == GCSOptions()


def test_of_a_configuration_that_was_changed_by_replace_the_fields_without_their_defaults_count(write):
    write(FIELDS)
    config = Store("s3://b", config=dataclasses.replace(StoreConfig(max_attempts=10), part_bytes=16 << 20)).config
    assert (config.part_bytes, config.max_attempts, config.s3.endpoint_url) == (16 << 20, 3, "http://file")


def test_a_configuration_that_was_resolved_stays_as_it_is_in_every_process(write):
    write(FIELDS)
    store = Store("s3://b")
    pickled, config = pickle.dumps(store), store.config
    write('["s3://b"]\nmax_attempts = 9')
    for kept in (pickle.loads(pickled).config, resolve("s3://b", config)):
        assert (kept, kept.max_attempts) == (config, 3)
    assert Store("s3://b").config.max_attempts == 9


def test_without_a_file_a_configuration_is_what_was_given(monkeypatch):
    config = StoreConfig(max_attempts=2)
    for value in (None, ""):
        if value is not None:
            monkeypatch.setenv("TORCHOBJ_CONFIG", value)
        assert Store("s3://b", config=config).config is config


def test_load_config_checks_the_file_and_names_it_to_processes_that_are_started(write, tmp_path, monkeypatch):
    write(FIELDS)
    other = tmp_path / "other.toml"
    other.write_text('["s3://b"]\nmax_attempts = 7')
    monkeypatch.chdir(tmp_path)
    load_config("other.toml")
    assert os.environ["TORCHOBJ_CONFIG"] == str(other)
    assert Store("s3://b").config.max_attempts == 7
    other.write_text('["s3://b"]\nmax_attempts = 0')
    assert Store("s3://b").config.max_attempts == 7
    with pytest.raises(ConfigError, match=f"^{other}: 's3://b': max_attempts=0: must be 1..1000$"):
        load_config(other)
    assert Store("s3://b").config.max_attempts == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is not TOML: "),
        ("x = 1", "'x': must be a URL prefix such as s3://bucket"),
        ('["bucket/a"]', "'bucket/a': must be a URL prefix"),
        ('["ftp://b"]', "'ftp://b': must be a URL prefix"),
        ('["file://data"]', "'file://data': a file URL has three slashes"),
        ('["s3:///x"]', "'s3:///x': has no bucket, expected s3://bucket/folder"),
        ('["s3://b/x//"]', "'s3://b/x//': must not end in two slashes"),
        ('["bucket/a?X-Amz-Signature=1"]', "'bucket/a?...': must be a URL prefix"),
        ('["s3://b/a?X-Amz-Signature=1"]\nmax_attempts = 0', "'s3://b/a?...': max_attempts=0"),
        ('"s3://b" = 5', "'s3://b': must be a table of fields"),
        ('["s3://b"]\n["s3://b/"]', "'s3://b/': has the same prefix as another table"),
        ('["gs://b"]\n["gcs://b"]', "'gcs://b': has the same prefix as another table"),
        ('["gcs:///x"]', "'gcs:///x': has no bucket, expected gs://bucket/folder"),
        ('["gs://b".gcs]\nregion = "x"', "'gs://b': gcs: region: GCSOptions has no such field"),
        ('["gs://b".gcs]\nkms_key_name = "k"', "'gs://b': gcs: kms_key_name='k': must be projects/"),
        ('["gs://b"]\nuser_project = "p"', "'gs://b': user_project: it is in the table gcs"),
        ('["gs://b"]\nendpoint_url = "p"', "'gs://b': endpoint_url: it is in the table s3 or gcs"),
        (
            '["s3://b"]\nmax_attemps = 5',
            "'s3://b': max_attemps: StoreConfig has no such field; did you mean max_attempts?",
        ),
        ('["s3://b"]\nmax_attempts = "5"', "'s3://b': max_attempts='5': must be 1..1000"),
        ('["s3://b"]\nregion = "x"', "'s3://b': region: it is in the table s3"),
        ('["s3://b"]\ns3 = "x"', "'s3://b': s3: must be a table of the fields of S3Options"),
        ('["s3://b".s3]\nregoin = "x"', "'s3://b': s3: regoin: S3Options has no such field; did you mean region?"),
        ('["s3://b".s3]\nchecksum = "md5"', "'s3://b': s3: checksum='md5': must be auto, crc64nvme, crc32c or none"),
        ('["s3://b".file]\nregion = "x"', "'s3://b': file: region: FileOptions has no such field"),
        ('["s3://b".s3]\nregion = 2026-01-01', "'s3://b': s3: region="),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file_and_the_field(write, text, words):
    file = write(text)
    for call in (lambda: Store("s3://b"), lambda: load_config(file)):
        with pytest.raises(ConfigError) as refused:
            call()
        assert f"{file}: {words}" in str(refused.value)


@pytest.mark.parametrize("path", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, path):
    monkeypatch.setenv("TORCHOBJ_CONFIG", str(tmp_path / path))
    with pytest.raises(ConfigError, match=f"^TORCHOBJ_CONFIG={tmp_path}.*: cannot be read: "):
        Store("s3://b")
    with pytest.raises(ConfigError, match=f"^{tmp_path}.*: cannot be read: "):
        load_config(tmp_path / path)


def test_a_file_in_another_encoding_or_nested_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(config_file, "_read", {})
    for content in (b'["s3://\xff"]', b"x = " + b"[" * 100_000):
        (tmp_path / "odd.toml").write_bytes(content)
        with pytest.raises(ConfigError, match="is not TOML"):
            load_config(tmp_path / "odd.toml")


@pytest.mark.parametrize(
    "text",
    [
        f'aws_secret_access_key = "{CANARY}"',
        f'["s3://b"]\nsecret_access_key = "{CANARY}"',
        f'["s3://b".s3]\naccess_key_id = "{CANARY}"',
        f'["s3://b".s3]\ntoken = "{CANARY}"',
        f'["s3://b".s3]\ncredential_provider = "{CANARY}"',
        f'["s3://b".credentials]\nx = "{CANARY}"',
        f'["gs://b".gcs]\ntoken = "{CANARY}"',
    ],
)
def test_secrets_are_refused_with_the_name_of_the_field_and_without_the_value(write, text):
    file = write(text)
    with pytest.raises(ConfigError, match=f"{file}: .*: a configuration file must not contain credentials") as refused:
        Store("s3://b")
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        f'["s3://b".s3]\nendpoint_url = "http://u:{CANARY}@h"',
        f'["s3://u:{CANARY}@b"]',
        f'["s3://b"]\ns3 = "{CANARY}"',
        f'["s3://b"]\nunknown = "{CANARY}"',
        f'["s3://b"]\nmax_attempts = 1\nx = {CANARY}',
    ],
)
def test_a_value_that_may_be_a_secret_is_in_no_message(write, text):
    write(text)
    with pytest.raises(ConfigError) as refused:
        Store("s3://b")
    error = refused.value
    while error is not None:
        assert CANARY not in f"{error} {vars(error)}"
        error = error.__cause__ or error.__context__


def test_fields_of_the_file_and_of_a_call_that_exclude_each_other_are_refused_with_both_places(write):
    file = write('["s3://b".s3]\nprofile = "p"')
    config = StoreConfig(s3=S3Options(credential_provider=dict))
    with pytest.raises(ConfigError, match=f"'s3://b' of {file}: credential_provider: must be None if profile is set"):
        Store("s3://b", config=config)


def test_named_objects_of_one_bucket_are_refused_if_different_prefixes_apply_to_them(write):
    file = write(PREFIXES)
    dataset = torchobj.ObjectMapDataset.from_objects(["s3://bucket/a/x", "s3://bucket/a/y", "memory://x/y"])
    assert sorted(config.max_attempts for config in dataset._listing.configs) == [3, 10]
    with pytest.raises(
        ConfigError,
        match=f"^url='s3://bucket/a/x': the prefix s3://bucket/a of {file} applies to it, and the prefix s3://bucket to "
        "'s3://bucket/x' in the same bucket. .* create a dataset for each prefix",
    ):
        torchobj.S3MapDataset.from_objects(["s3://bucket/x", "s3://bucket/a/x"], region="r")


class Named(torchobj.ObjectDataset):
    """Objects of the bucket and of a part of it."""

    def __len__(self):
        return 1

    def objects_at(self, index):
        return [torchobj.ObjectRef("s3://bucket/x"), torchobj.ObjectRef("s3://bucket/a/x")]


def test_the_report_uses_the_number_of_requests_of_the_file(write):
    write(
        '["s3://bucket"]\nmax_in_flight = 20\n["s3://bucket/a"]\nmax_in_flight = 10\n["s3://other"]\nmax_in_flight = 1'
    )
    assert max_in_flight_of(Named()) == 10
    assert max_in_flight_of(Named(config=StoreConfig(max_in_flight=5))) == 5
    assert max_in_flight_of(torchobj.ObjectMapDataset("s3://bucket/")) == 20
    assert max_in_flight_of(torchobj.ObjectMapDataset.from_objects(["s3://bucket/a/x"])) == 10
    assert max_in_flight_of(torchobj.ObjectMapDataset("memory://x/")) is None


def test_prices_come_from_the_file_and_their_errors_name_it(write):
    write('["s3://bucket"]\nprices = { get_per_1000 = 0.0004, list_per_1000 = 0.005 }')
    assert resolve("s3://bucket/a", StoreConfig()).prices == PriceOptions(get_per_1000=0.0004, list_per_1000=0.005)
    assert prices_of(torchobj.ObjectMapDataset("s3://bucket/a/")).get_per_1000 == 0.0004
    for line, words in (
        ("get_per_1000 = -1", "get_per_1000=-1: must be 0..1000 dollars"),
        ("get_per_1000 = nan", "get_per_1000=nan: must be 0..1000 dollars"),
        ("get = 1", "prices: get: PriceOptions has no such field"),
    ):
        file = write(f'["s3://bucket".prices]\n{line}')
        with pytest.raises(ConfigError, match=words):
            torchobj.load_config(file)


def test_a_dataset_with_a_credential_provider_names_the_field_of_the_file_and_the_way_out(write):
    file = write('["s3://public".s3]\nanonymous = true')
    with pytest.raises(
        ConfigError,
        match=f"'s3://public' of {file}: credential_provider: must be None if anonymous is set; to ignore a field of "
        "the file, pass it with its default value",
    ):
        Named(config=StoreConfig(s3=S3Options(credential_provider=dict)))
    Named(config=StoreConfig(s3=S3Options(credential_provider=dict, anonymous=False)))


@pytest.mark.parametrize("name", ["region", "endpoint_url"])
@pytest.mark.parametrize("url", ["file:///tmp/x", "memory://x"])
def test_region_and_endpoint_of_a_url_without_them_are_refused(name, url):
    with pytest.raises(ConfigError, match=f"^{name}='http://x': must be None for a URL of {url.partition(':')[0]}://"):
        Store(url, **{name: "http://x"})
