"""A manifest is compact, can be pickled, and returns exactly what was listed."""

import pickle

import pytest

import torchobj
from torchobj.exceptions import ConfigError


def test_urls_are_kept_with_their_buckets():
    urls = ["s3://a/k", "s3://b/deep/key with ü", "file:///tmp/x", "s3://a//lead"]
    manifest = torchobj.Manifest.from_urls(urls)
    assert (len(manifest), [manifest.url(index) for index in range(4)]) == (4, urls)
    assert manifest.bases() == ["s3://a", "s3://b", "file://"]
    assert manifest.entry(1) == ("s3://b", "deep/key with ü", None, None)
    with pytest.raises(IndexError, match="index 4 of 4"):
        manifest.url(4)
    with pytest.raises(ConfigError, match="no-url"):
        torchobj.Manifest.from_urls(["no-url"])


def test_it_is_small_and_is_pickled_in_its_packed_form():
    urls = [f"s3://bucket/train/{number:08}.jpg" for number in range(100_000)]
    manifest = torchobj.Manifest.from_urls(urls)
    keys = sum(len(url) - len("s3://bucket/") for url in urls)
    assert (manifest.memory_bytes() - keys) / len(urls) <= 64
    data = pickle.dumps(manifest)
    assert (len(data) - keys) / len(urls) <= 8
    copy = pickle.loads(data)
    assert copy == manifest
    assert copy.digest() == manifest.digest()
    assert copy.url(77_777) == urls[77_777]
    assert torchobj.Manifest.from_urls(urls[1:]).digest() != manifest.digest()


def test_invalid_bytes_are_refused():
    for data in (b"", b"garbage", b"s3://a\n\n\xff\xff"):
        with pytest.raises(ValueError, match="are not a manifest"):
            torchobj.Manifest(data)
