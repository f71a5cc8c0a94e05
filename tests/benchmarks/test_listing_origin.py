"""The buckets of keys of the benchmarks' origin are listed as S3 lists them."""

import pytest

import torchobj
from benchmarks.lab import origin
from benchmarks.lab.keys import flat, nested

NESTED, FLAT = nested(6000), flat(2500)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    with origin.running(0, [each.write(folder) for each in (NESTED, FLAT)]) as found:
        yield found


@pytest.fixture
def store(running, monkeypatch):
    def opened(bucket):
        location = running.listed(bucket)
        for name, value in (("AWS_ACCESS_KEY_ID", "bench"), ("AWS_SECRET_ACCESS_KEY", "bench")):
            monkeypatch.setenv(name, value)
        return location.store()

    return opened


def test_every_key_is_listed_once_and_in_order(store):
    for keys in (NESTED, FLAT):
        assert [info.key for info in store(keys.name).list()] == list(keys.keys)


def test_a_prefix_and_a_start_select_keys(store):
    prefix, start = "train/n0144", NESTED.keys[1500]
    listed = [info.key for info in store("nested").list(prefix, start_after=start)]
    assert listed == [key for key in NESTED.keys if key.startswith(prefix) and key > start]
    assert [info.key for info in store("flat").list(start_after=FLAT.keys[2400])] == list(FLAT.keys[2401:])
    assert list(store("flat").list("none")) == []


def test_a_delimiter_groups_keys_over_pages(store):
    [page] = store("nested").list("", "/").pages()
    assert (page.objects, page.prefixes) == ([], ["train/", "val/"])
    pages = list(store("nested").list("train/", "/").pages())
    prefixes = [prefix for page in pages for prefix in page.prefixes]
    assert prefixes == sorted({key[: key.rindex("/") + 1] for key in NESTED.keys if key.startswith("train/")})


def test_boto3_lists_the_same_and_heads_have_the_size_of_the_listing(running, store):
    client = running.listed("nested").boto3()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="nested", PaginationConfig={"PageSize": 700})
    items = [item for page in pages for item in page["Contents"]]
    assert [item["Key"] for item in items] == list(NESTED.keys)
    head = store("nested").head(items[5]["Key"])
    assert (head.size, head.version) == (items[5]["Size"], items[5]["ETag"])
    assert head.metadata["owner"] == "bench"
    with pytest.raises(torchobj.exceptions.ObjectNotFoundError):
        store("nested").head("train/none")


def test_computed_keys_are_in_order_and_can_be_started_after():
    with origin.running(0, ["numbered:3500", "random:3500"]) as found:
        for bucket in ("numbered", "random"):
            location = found.listed(bucket)
            location.enter()
            infos = list(location.store().list())
            keys = [info.key for info in infos]
            assert len(set(keys)) == 3500
            assert keys == sorted(keys)
            assert {len(key) for key in keys} == {24}
            assert {info.version is None for info in infos} == {bucket == "numbered"}
            assert [info.key for info in location.store().list(start_after=keys[1700])] == keys[1701:]
