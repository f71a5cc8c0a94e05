"""URLs are parsed without normalisation, or refused with the expected form."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchobj
from torchobj.exceptions import ConfigError
from torchobj.s3torchconnector.names import S3Checkpoint
from torchobj.urls import parse_url


@given(st.text(max_size=40))
def test_a_key_is_kept_unchanged(key):
    url = f"s3://bucket/{key}"
    assert parse_url(url) == ("s3", "bucket", key)
    assert str(parse_url(url)) == url


@given(st.text(max_size=40))
def test_gcs_is_another_name_of_gs(key):
    assert parse_url(f"gcs://bucket/{key}") == parse_url(f"gs://bucket/{key}") == ("gs", "bucket", key)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/key", "not a URL"),
        ("/data/train", "or file:///folder/name for a local one"),
        ("az://bucket/key", "scheme 'az', expected s3:// or gs:// or file:// or memory://"),
        ("s3:///key", "no bucket, expected s3://bucket/key"),
        ("s3://", "no bucket"),
        ("gcs:///key", "no bucket, expected gs://bucket/key"),
        ("s3://buc\nket/key", "no control characters"),
        ("memory://name\x7f/key", "no control characters"),
        ("s3://\0/key", "no control characters"),
        ("file://host/key", "three slashes"),
        ("pipe:aws s3 cp s3://b/t-{000..007}.tar -", "a command, as in webdataset, which torchobj does not run; pass"),
        ("pipe:aws s3 cp s3://b/t-{000..007}.tar -", "the URL of the object: s3://b/t-{000..007}.tar"),
        ("pipe:gsutil cat 'gs://b/t.tar'|cat", "the URL of the object: gs://b/t.tar"),
        ("pipe:cat /data/t.tar", "the URL of the object: s3://bucket/train-{000..127}.tar"),
        (b"s3://b/k", "must be a str"),
        (None, "must be a str"),
        (Path("s3://b/k"), "converting a URL to a path removes slashes"),
    ],
)
def test_an_invalid_object_url_is_refused_with_the_expected_form(url, words):
    for use in (parse_url, torchobj.open, torchobj.Store, lambda url: torchobj.get_many([url])):
        with pytest.raises(ConfigError) as caught:
            use(url)
        assert words in str(caught.value)


@pytest.mark.parametrize("kind", [torchobj.TarIterableDataset, torchobj.TarMapDataset, torchobj.ObjectMapDataset])
@pytest.mark.parametrize("command", ["curl -s -L http://server/t.tar || true", "aws s3 cp s3://b/t.tar -"])
def test_a_command_of_webdataset_is_refused_by_datasets(kind, command):
    with pytest.raises(ConfigError, match="a command, as in webdataset, which torchobj does not run"):
        kind(f"pipe:{command}")


@pytest.mark.parametrize("kind", [torchobj.TarIterableDataset, torchobj.TarMapDataset, torchobj.ObjectMapDataset])
@pytest.mark.parametrize(
    "command",
    ["curl -H 'Authorization: Bearer hidden' http://server/t.tar", "AWS_SECRET_ACCESS_KEY=hidden aws s3 cp s3://b/t -"],
)
def test_a_command_of_webdataset_is_not_shown(kind, command):
    with pytest.raises(ConfigError) as caught:
        kind(f"pipe:{command}")
    assert "hidden" not in str(caught.value)


def test_an_object_needs_a_url_with_a_key():
    with pytest.raises(ConfigError, match="names no object"):
        torchobj.open("s3://bucket/", "wb")
    with pytest.raises(ConfigError, match="expected s3://"):
        torchobj.S3MapDataset("file:///data/")


@pytest.mark.parametrize(
    "url", ["s3://bucket/folder/", "memory://targets/folder/", "memory://targets//", "file:///tmp/x/"]
)
def test_a_url_that_ends_with_a_slash_cannot_be_written(url):
    for write in (lambda: torchobj.save({}, url), lambda: torchobj.open(url, "wb"), lambda: S3Checkpoint().writer(url)):
        with pytest.raises(ConfigError, match="slash|names no object|scheme"):
            write()
    assert list(torchobj.Store("memory://targets").list()) == []


def test_a_store_can_put_a_key_that_ends_with_a_slash():
    store = torchobj.Store("memory://markers")
    store.put("folder/", b"")
    assert [info.key for info in store.list()] == ["folder/"]
    assert torchobj.open("memory://markers/folder/").read() == b""


POINT = "arn:aws:s3:eu-west-1:123456789012:accesspoint"
OUTPOST = "arn:aws:s3-outposts:us-west-2:123456789012:outpost"


@pytest.mark.parametrize(
    ("rest", "bucket", "key"),
    [
        (f"{POINT}/mine/a/b:c", f"{POINT}:mine", "a/b:c"),
        (f"{POINT}:mine/a/b:c", f"{POINT}:mine", "a/b:c"),
        (f"{POINT}/mine", f"{POINT}:mine", ""),
        ("arn:aws:s3::123456789012:accesspoint/m.mrap/k", "arn:aws:s3::123456789012:accesspoint:m.mrap", "k"),
        (f"{OUTPOST}/op-1/accesspoint/p/k/l", f"{OUTPOST}:op-1:accesspoint:p", "k/l"),
        (f"{OUTPOST}:op-1:accesspoint:p/k", f"{OUTPOST}:op-1:accesspoint:p", "k"),
        ("bucket/accesspoint/name", "bucket", "accesspoint/name"),
    ],
)
def test_the_arn_of_an_access_point_may_have_slashes(rest, bucket, key):
    assert parse_url(f"s3://{rest}") == ("s3", bucket, key)
    assert torchobj.Store(f"s3://{rest}").url.startswith(f"s3://{bucket}/{key}".rstrip("/"))
