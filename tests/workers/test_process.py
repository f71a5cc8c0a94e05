"""What each worker repeats is said once."""

import mmap

import pytest

import torchobj
from torchobj.warn_once import FORKED
from torchobj.workers import process


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("s3://bucket/train-{000..007}.tar", "finds the shards itself"),
        ("s3://bucket/train-*.tar", "finds the shards itself"),
        ("s3://bucket/train/", "lists the prefix itself"),
        ("s3://bucket", "lists the bucket itself"),
    ],
)
def test_a_worker_says_what_it_repeats(source, said, monkeypatch, caplog):
    monkeypatch.setattr(process, "is_first_to_repeat", lambda _: True)
    kind = torchobj.TarIterableDataset if source.endswith(".tar") else torchobj.ObjectMapDataset
    listing = kind(source)._listing
    monkeypatch.setattr(listing, "_load", lambda: torchobj.Manifest.from_urls([]))
    listing.objects()
    assert said in caplog.text


def test_each_kind_of_warning_is_logged_once(monkeypatch):
    monkeypatch.setattr(FORKED, "_flags", mmap.mmap(-1, 1 << 16))
    for kind in ("announcement", "index", "listing", "mesh", "world size"):
        assert not FORKED.has(kind)
        assert [FORKED.is_first(kind) for _ in range(2)] == [True, False]
