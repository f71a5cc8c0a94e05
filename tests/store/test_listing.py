"""Listings of many pages, selections of them, and their Arrow form; stores of a prefix; metadata of many objects."""

import base64
import copy
import dataclasses
import hashlib
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pytest

import torchobj
from torchobj import exceptions

pytestmark = pytest.mark.providers("s3", "gs")


def filled(bucket, keys, **options):
    store = torchobj.Store(bucket.url, config=bucket.config)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: store.put(key, key.encode(), **options), keys))
    return store


@pytest.fixture
def small_pages(control):
    """Pages of 20 keys, so that a listing of a few hundred is divided."""
    before = control.limits()
    control.limits(max_keys=20)
    yield control
    control.limits(**before)


def test_keys_of_many_forms_are_listed_once_and_in_order(bucket, small_pages):
    draw = random.Random(7)
    keys = {f"numbers/{number:06}.jpg" for number in range(250)}
    keys |= {f"hashes/{draw.getrandbits(64):016x}" for _ in range(250)}
    keys |= {f"deep/{name}/frames/{number:04}" for name in ("α", "a b", "z%20", "~") for number in range(40)}
    keys |= {f"odd/{first}{second}" for first in "!+&<>'\"日🎉" for second in "aZ0/ ."}
    store = filled(bucket, keys)
    for prefix in ("", "numbers/", "hashes/", "deep/", "odd/", "deep/α"):
        expected = sorted((key for key in keys if key.startswith(prefix)), key=str.encode)
        assert [info.key for info in store.list(prefix)] == expected
        assert sorted((info.key for info in store.list(prefix, ordered=False)), key=str.encode) == expected
        manifest = torchobj.ObjectMapDataset(f"{bucket.url}/{prefix}", config=bucket.config).manifest
        assert [manifest.url(index) for index in range(len(manifest))] == [f"{store.url}/{key}" for key in expected]


def test_a_listed_object_is_an_ordinary_object_info(bucket):
    store = filled(bucket, ["a", "b"])
    info, other = store.list()
    assert (info.content_type, info.metadata, info.cache_control) == (None, {}, None)
    equal = torchobj.ObjectInfo("a", 1, info.version, info.last_modified, info.storage_class)
    assert info == equal == pickle.loads(pickle.dumps(info)) == copy.copy(info) != other
    assert (repr(info), hash(info)) == (repr(equal), hash(equal))
    assert info._replace(key="b").key == "b"
    assert info._asdict() == equal._asdict()
    with pytest.raises(AttributeError):
        info.size = 2
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = info.missing


def test_the_first_page_is_one_request(bucket, small_pages):
    store = filled(bucket, [f"{number:04}" for number in range(200)])
    small_pages.clear_requests()
    assert next(iter(store.list())).key == "0000"
    assert len(small_pages.requests()) == 1


def test_a_glob_selects_within_and_across_components(bucket, control):
    store = filled(bucket, ["2024/a.jpg", "2024/b.png", "2024/x/c.jpg", "2025/a.jpg", "2024/"])
    assert [info.key for info in store.list(glob="2024/*.jpg")] == ["2024/a.jpg"]
    assert [info.key for info in store.list("2024/", glob="**/*.jpg")] == ["2024/a.jpg", "2024/x/c.jpg"]
    assert [info.key for info in store.list(glob="202[45]/a.{jpg,png}")] == ["2024/a.jpg", "2025/a.jpg"]
    assert list(store.list(glob="nothing/*")) == []
    control.clear_requests()
    assert len(list(store.list(glob="2025/*"))) == 1
    [request] = control.requests()
    assert "2025" in str(request)
    with pytest.raises(exceptions.ConfigError, match="delimiter"):
        store.list(glob="*", delimiter="/")
    with pytest.raises(exceptions.ConfigError, match="not a valid pattern"):
        list(store.list(glob="a[b"))


def test_an_arrow_table_equals_the_listing(bucket, small_pages):
    store = filled(bucket, [f"k/{number:03}" for number in range(150)])
    infos = list(store.list("k/"))
    reader = store.list("k/").to_arrow()
    assert [(field.name, str(field.type)) for field in reader.schema] == [
        ("key", "string"),
        ("size", "uint64"),
        ("version", "string"),
        ("last_modified", "timestamp[ms, tz=UTC]"),
        ("storage_class", "dictionary<values=string, indices=int32, ordered=0>"),
    ]
    rows = reader.read_all().to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (info.key, info.size, info.version, info.last_modified, info.storage_class) for info in infos
    ]
    assert pyarrow.table(store.list("k/", ordered=False)).num_rows == 150
    assert pyarrow.table(store.list("nothing/")).num_rows == 0


def test_a_failed_listing_raises_from_arrow_with_its_message(bucket):
    missing = torchobj.Store(f"{bucket.url}-missing", config=bucket.config)
    with pytest.raises(OSError, match=r"list .*: 404 (NoSuchBucket|notFound)"):
        missing.list().to_arrow().read_all()


def test_keys_of_a_store_of_a_prefix_are_relative(bucket, small_pages):
    root = filled(bucket, [f"a/b/{number:02}" for number in range(60)] + ["a/b/", "a/bc", "a"])
    store = torchobj.Store(f"{bucket.url}/a/b/", config=bucket.config)
    assert store.url == f"{bucket.url}/a/b"
    assert torchobj.Store(f"{bucket.url}/a/b", config=bucket.config).url == store.url
    assert [info.key for info in store.list()] == [f"{number:02}" for number in range(60)]
    assert [info.key for info in store.list("5", start_after="57")] == ["58", "59"]
    assert store.get("07") == b"a/b/07"
    version = store.put("new/key", b"1", overwrite=False)
    assert root.head("a/b/new/key").version == store.head("new/key").version == version
    assert store.get_many(["07", torchobj.ObjectRef(f"{bucket.url}/a/b/08")]) == [b"a/b/07", b"a/b/08"]
    with pytest.raises(exceptions.ConfigError, match="must be an object of"):
        store.get_many([torchobj.ObjectRef(f"{bucket.url}/a/bc")])
    store.copy("new/key", "copy")
    assert [list(page.prefixes) for page in store.list(delimiter="/").pages()][-1] == ["new/"]
    store.delete(["new/key", "copy"])
    assert not root.exists("a/b/new/key")
    with pytest.raises(exceptions.ObjectNotFoundError, match="/a/b/missing"):
        store.get("missing")
    with pytest.raises(exceptions.InvalidKeyError, match="empty"):
        store.get("")


def test_uploads_of_a_store_of_a_prefix_are_relative(bucket):
    store = torchobj.Store(f"{bucket.url}/a/b/", config=bucket.config)
    store.put("large", bytes(40 << 20))
    assert store.head("large").size == 40 << 20
    assert store.unfinished_uploads() == []
    assert bucket.keys() == ["a/b/large"]


def test_a_pickled_store_of_a_prefix_reads_the_same_keys(bucket):
    store = torchobj.Store(f"{bucket.url}/a/b/", config=bucket.config)
    store.put("k", b"1")
    assert pickle.loads(pickle.dumps(store)).get("k") == b"1"


def test_heads_of_many_objects_are_in_the_order_of_the_keys(bucket, control):
    store = filled(bucket, [f"{number}" for number in range(50)], metadata={"label": "x"}, content_type="text/plain")
    keys = [f"{number * 7 % 50}" for number in range(50)]
    heads = store.head_many(keys)
    assert [head.key for head in heads] == keys
    assert [head.size for head in heads] == [len(key) for key in keys]
    assert all(head == store.head(head.key) and head.metadata == {"label": "x"} for head in heads[:3])
    with pytest.raises(exceptions.ObjectNotFoundError, match="/missing"):
        store.head_many(["1", "missing"])
    found = store.head_many(["1", "missing", "2"], return_errors=True)
    assert (found[0].key, type(found[1]), found[2].key) == ("1", exceptions.ObjectNotFoundError, "2")
    assert store.head_many([]) == []
    assert all(head.checksum is None for head in heads)
    with pytest.raises(exceptions.ConfigError, match="must be a list"):
        store.head_many("12")


def test_heads_have_the_checksums_that_the_store_has(bucket):
    for key in ("a", "b"):
        bucket.write(key, key.encode())
    heads = torchobj.Store(bucket.url, config=bucket.config).head_many(["b", "a"], checksum=True)
    if bucket.url.startswith("gs:"):
        stored = {blob.name: f"crc32c:{base64.b64decode(blob.crc32c).hex()}" for blob in bucket.official.list_blobs()}
    else:
        responses = {
            key: bucket.boto.head_object(Bucket=bucket.name, Key=key, ChecksumMode="ENABLED") for key in ("a", "b")
        }
        stored = {
            key: f"{name.removeprefix('Checksum').lower()}:{base64.b64decode(value).hex()}"
            for key, response in responses.items()
            for name, value in response.items()
            if name.startswith("Checksum") and name != "ChecksumType"
        }
    assert [head.checksum for head in heads] == [stored["b"], stored["a"]]


@pytest.mark.providers("s3")
def test_an_object_without_a_checksum_of_all_bytes_has_the_md5_of_its_etag_or_none(bucket):
    name = {"Bucket": bucket.name, "Key": "parts"}
    name["UploadId"] = bucket.boto.create_multipart_upload(**name, ChecksumAlgorithm="SHA256")["UploadId"]
    part = bucket.boto.upload_part(**name, PartNumber=1, Body=b"1", ChecksumAlgorithm="SHA256")
    parts = [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumSHA256": part["ChecksumSHA256"]}]
    bucket.boto.complete_multipart_upload(**name, MultipartUpload={"Parts": parts})
    bucket.boto.put_object(Bucket=bucket.name, Key="sha1", Body=b"1", ChecksumAlgorithm="SHA1")
    heads = torchobj.Store(bucket.url, config=bucket.config).head_many(["parts", "sha1"], checksum=True)
    assert [head.checksum for head in heads] == [None, f"md5:{hashlib.md5(b'1').hexdigest()}"]


def test_a_scan_returns_the_metadata_of_all_objects(bucket, small_pages):
    store = filled(bucket, [f"a/{number:03}" for number in range(100)])
    filled(bucket, [f"b/{number:03}.jpg" for number in range(30)], metadata={"label": "cat"})
    expected = {info.key: info for info in map(store.head, [info.key for info in store.list()])}
    scanned = list(store.scan())
    assert {info.key: info for info in scanned} == expected
    assert len(scanned) == 130
    for has_metadata in ("label", "Label", True):
        assert sorted(info.key for info in store.scan(has_metadata=has_metadata)) == sorted(
            key for key in expected if key.startswith("b/")
        )
    assert list(store.scan(has_metadata="other")) == []
    assert sorted(info.key for info in store.scan("b/", glob="02?.jpg")) == [f"b/02{digit}.jpg" for digit in range(10)]


def test_a_scan_in_arrow_has_the_metadata_as_a_map(bucket):
    store = filled(bucket, ["a"], metadata={"label": "cat", "split": "train"}, content_type="image/png")
    filled(bucket, ["b"])
    table = store.scan().to_arrow().read_all().sort_by("key")
    assert table["metadata"].to_pylist() == [[("label", "cat"), ("split", "train")], []]
    assert table["content_type"].to_pylist()[0] == "image/png"
    assert table["size"].to_pylist() == [1, 1]


def test_a_scan_reuses_its_connections(bucket, small_pages):
    config = dataclasses.replace(bucket.config, max_in_flight=8)
    filled(bucket, [f"{number:03}" for number in range(200)])
    before = small_pages.connections().total_accepted
    assert len(list(torchobj.Store(bucket.url, config=config).scan())) == 200
    assert small_pages.connections().total_accepted - before <= 8


def test_an_object_deleted_during_a_scan_is_omitted(bucket, small_pages):
    store = filled(bucket, [f"{number:03}" for number in range(100)])
    small_pages.faults({"operation": "HeadObject", "key": "050", "times": 1, "action": {"status": 404}})
    assert len(list(store.scan())) == 99


def test_exists_is_false_only_if_the_object_does_not_exist(bucket):
    store = filled(bucket, ["folder/key"])
    assert store.exists("folder/key")
    assert not store.exists("folder")
    assert not store.exists("folder/")
    missing = torchobj.Store(f"{bucket.url}-missing", config=bucket.config)
    with pytest.raises(exceptions.StoreError):
        next(iter(missing.list()))
