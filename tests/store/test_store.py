"""The store on real servers, with boto3 as the reference."""

import dataclasses
import io
import os
import pickle
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import torch

import torchobj
from tests.support.settings import s3_config
from torchobj import exceptions
from torchobj.store import list_buckets
from torchobj.store.object_info import time_of

pytestmark = pytest.mark.providers("s3", "gs")

UNUSUAL_KEYS = ["a b", "a+b", "100%", "a?b#c", "ä/ö 日本", "🎉", "'\"<>&", "%41", "deep/er/key", "x" * 200]
RAW = ["a//b", "/lead", "trail/", "..", ".", "a/../b", "./a", "k" * 1024]


def test_the_buckets_of_an_account_are_those_of_boto3_and_of_the_client_of_google(any_bucket):
    if any_bucket.url.startswith("gs:"):
        listed = any_bucket.official.client.list_buckets(project="test")
        expected = {bucket.name: bucket.time_created for bucket in listed}
    else:
        expected = {bucket["Name"]: bucket["CreationDate"] for bucket in any_bucket.boto.list_buckets()["Buckets"]}
    in_ms = {name: time.replace(microsecond=time.microsecond // 1000 * 1000) for name, time in expected.items()}
    scheme = any_bucket.url.partition("://")[0]
    assert any_bucket.name in in_ms
    assert dict(list_buckets(scheme, config=any_bucket.config, project="test")) == in_ms


@pytest.mark.parametrize("key", UNUSUAL_KEYS)
def test_boto3_reads_what_we_put_and_the_reverse(any_bucket, key):
    store = torchobj.Store(any_bucket.url, config=any_bucket.config)
    store.put(key, b"ours")
    assert any_bucket.body(key) == b"ours"
    any_bucket.write(key, b"theirs")
    assert store.get(key) == b"theirs"
    assert [info.key for info in store.list()] == [key]
    store.delete(key)
    assert any_bucket.keys() == []


@pytest.mark.parametrize("key", RAW)
def test_keys_that_are_not_paths_are_kept_unchanged(bucket, key):
    store = torchobj.Store(bucket.url, config=bucket.config)
    if key in (".", "..") and bucket.url.startswith("gs:"):
        with pytest.raises(exceptions.InvalidKeyError):
            store.put(key, b"x")
        return
    store.put(key, key.encode())
    assert store.get(key) == key.encode()
    assert bucket.keys() == [key]
    assert torchobj.get_many([f"{bucket.url}/{key}"], config=bucket.config) == [key.encode()]


@pytest.mark.parametrize("key", [*RAW[:-1], "k" * 1025])
def test_a_server_on_a_file_system_refuses_them_with_a_typed_error(versitygw_server, key):
    config = s3_config(endpoint_url=versitygw_server.endpoint, profile="versitygw", key_rules="path")
    store = torchobj.Store("s3://any", config=config)
    with pytest.raises(exceptions.InvalidKeyError) as caught:
        store.put(key, b"x")
    assert "s3://any/" in str(caught.value)


def test_headers_and_metadata_are_stored_as_given(any_bucket):
    store = torchobj.Store(any_bucket.url, config=any_bucket.config)
    metadata = {"epoch": "3", "note": "two words"}
    for key, data in (("small", b"x"), ("large", bytes(17 << 20))):
        version = store.put(
            key,
            data,
            content_type="image/png",
            cache_control="max-age=60",
            content_language="de",
            content_disposition="inline",
            metadata=metadata,
        )
        assert any_bucket.headers(key) == ("image/png", "max-age=60", "de")
        ours = store.head(key)
        assert (ours.size, ours.version, ours.content_type) == (len(data), version, "image/png")
        assert dict(ours.metadata) == metadata
        assert any_bucket.version(key) == version
        assert ours.last_modified is not None
        assert abs(ours.last_modified - datetime.now(UTC)) < timedelta(minutes=5)


@pytest.mark.parametrize("any_bucket", ["moto", "versitygw", "fake-gcs-server"], indirect=True)
def test_a_server_of_another_program_stores_what_is_put_and_saved(any_bucket):
    """From end to end; every other test with these servers is in the long tables."""
    test_boto3_reads_what_we_put_and_the_reverse(any_bucket, UNUSUAL_KEYS[4])
    test_headers_and_metadata_are_stored_as_given(any_bucket)
    url, state = f"{any_bucket.url}/step 1.pt", {"x": torch.arange(3_000_000)}
    torchobj.save(state, url, config=any_bucket.config, overwrite=False)
    with pytest.raises(exceptions.PreconditionFailedError):
        torchobj.save(state, url, config=any_bucket.config, overwrite=False)
    assert torch.equal(torchobj.load(url, config=any_bucket.config)["x"], state["x"])
    assert torch.equal(torch.load(io.BytesIO(any_bucket.body("step 1.pt")))["x"], state["x"])
    assert any_bucket.uploads() == []


@pytest.mark.parametrize(
    "size", [0, 1, 100_000, (8 << 20) - 1, 8 << 20, (16 << 20) + 1, pytest.param(40 << 20, marks=pytest.mark.matrix)]
)
def test_objects_of_any_size_are_read_completely(bucket, size):
    body = bytes(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy())
    bucket.write("k", body)
    store = torchobj.Store(bucket.url, config=bucket.config)
    assert store.get("k") == body
    into = bytearray(size)
    assert store.get_many(["k"], into=[into]) == [size]
    assert into == body
    store.put("back", body)
    assert bucket.body("back") == body


def test_ranges_follow_the_rules_of_slices(bucket):
    body = bytes(range(256)) * 40
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("k", body)
    assert store.get_range("k", 5, 10) == body[5:10]
    assert store.get_range("k", 10_000) == body[10_000:]
    assert store.get_range("k", -7) == body[-7:]
    assert store.get_range("k", 10_000, 99_999) == body[10_000:]
    assert store.get_range("k", 7, 7) == b""
    assert store.get_ranges("k", [(0, 3), (-3, None), (100, 200)]) == [body[:3], body[-3:], body[100:200]]
    with pytest.raises(exceptions.RangeError, match="416"):
        store.get_range("k", len(body), len(body) + 1)
    for start, end in ((5, 4), (-5, 4)):
        with pytest.raises(exceptions.ConfigError, match=f"range {start}..{end}"):
            store.get_range("k", start, end)


@pytest.mark.parametrize("far", [2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**70])
def test_a_range_may_start_at_any_distance_beyond_the_end(any_bucket, far, tmp_path):
    for store in (torchobj.Store(any_bucket.url, config=any_bucket.config), torchobj.Store(f"file://{tmp_path}")):
        store.put("k", b"0123456789")
        assert store.get_range("k", 3, far) == b"3456789"
        assert store.get_range("k", -far) == b"0123456789"
        assert store.get_ranges("k", [(8, far), (-far, None)]) == [b"89", b"0123456789"]
        for start, end in ((far, None), (far, far + 1)):
            with pytest.raises(exceptions.RangeError):
                store.get_range("k", start, end)
            with pytest.raises(exceptions.RangeError):
                store.get_ranges("k", [(0, 1), (start, end)])


def test_an_empty_range_is_empty_without_a_request(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    control.clear_requests()
    assert store.get_range("missing", 0, 0) == b""
    assert store.get_ranges("missing", [(7, 7), (2**70, 2**70)]) == [b"", b""]
    assert control.requests() == []
    for wrong in (1.5, "1", None):
        with pytest.raises(TypeError):
            store.get_range("missing", wrong)


def test_no_request_is_sent_for_the_size(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("small", bytes(1000))
    store.put("large", bytes(20 << 20))
    control.clear_requests()
    store.get_many(["small", "large"])
    assert {request.operation for request in control.requests()} == {"GetObject"}
    assert len(control.requests()) == 1 + 4
    ranges = sorted(request.headers["range"] for request in control.requests())
    assert ranges[0] == "bytes=0-8388607"


def test_get_many_returns_objects_in_order_or_raises_the_first_error(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    keys = [f"k{number}" for number in range(100)]
    for key in keys:
        store.put(key, key.encode())
    shuffled = [keys[number * 37 % 100] for number in range(100)]
    assert [bytes(data) for data in store.get_many(shuffled)] == [key.encode() for key in shuffled]
    assert store.get_many([]) == []
    with pytest.raises(exceptions.ObjectNotFoundError, match=r"/missing: 404 (NoSuchKey|notFound)"):
        store.get_many([*keys, "missing"])
    found = store.get_many(["k1", "missing", "k2"], return_errors=True)
    assert found[0] == b"k1"
    assert isinstance(found[1], exceptions.ObjectNotFoundError)
    assert found[2] == b"k2"


def test_a_single_str_is_not_accepted_as_a_list_of_keys(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("c", b"c")
    store.put("2", b"2")
    control.clear_requests()
    with pytest.raises(exceptions.ConfigError, match=r"keys='c2': must be a list, such as \['c2'\]"):
        store.get_many("c2")
    with pytest.raises(exceptions.ConfigError, match=r"urls='.*://.*': must be a list"):
        torchobj.get_many(f"{bucket.url}/c", config=bucket.config)
    assert control.requests() == []
    assert store.get_many(key for key in "c2") == [b"c", b"2"]


def test_one_call_reads_urls_of_several_buckets_and_schemes(bucket, strict_server, tmp_path):
    bucket.write("k", b"s3")
    (tmp_path / "some file").write_bytes(b"file")
    torchobj.Store("memory://urls").put("k", b"memory")
    urls = [f"{bucket.url}/k", f"file://{tmp_path}/some file", "memory://urls/k", f"{bucket.url}/k"]
    assert torchobj.get_many(urls, config=bucket.config) == [b"s3", b"file", b"memory", b"s3"]


def test_a_listing_has_pages_and_common_prefixes(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    keys = [f"many/{number:04}" for number in range(1203)] + ["other/x/1", "other/x/2", "other/y"]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: store.put(key, b"."), keys))
    assert [info.key for info in store.list("many/")] == keys[:1203]
    sizes = [len(page.objects) for page in store.list("many/").pages()]
    assert (sizes[0], sum(sizes)) == (1000, 1203)
    [page] = store.list("other/", "/").pages()
    assert ([info.key for info in page.objects], page.prefixes) == (["other/y"], ["other/x/"])
    assert [info.key for info in store.list("many/", start_after="many/1200")] == ["many/1201", "many/1202"]
    assert list(store.list("nothing/")) == []
    info = next(iter(store.list("many/")))
    assert (info.size, info.storage_class) == (1, "STANDARD")


def test_a_time_that_no_datetime_represents_is_none():
    for milliseconds in (10**16, -(10**17), (1 << 63) - 1):
        assert time_of(milliseconds) is None
    # ext4 does not store such a time; tmpfs does.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        store = torchobj.Store(f"file://{folder}")
        store.put("a", b"")
        store.put("far", b"")
        os.utime(f"{folder}/far", (1e13, 1e13))
        near, far = store.list()
        assert (near.key, near.last_modified is None, far.key) == ("a", False, "far")
        if os.stat(f"{folder}/far").st_mtime == 1e13:
            assert far.last_modified is store.head("far").last_modified is None


def test_conditional_writes_are_enforced(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    version = store.put("k", b"one", overwrite=False)
    with pytest.raises(FileExistsError, match="412 (PreconditionFailed|conditionNotMet)"):
        store.put("k", b"two", overwrite=False)
    store.put("k", b"two", if_version=version)
    with pytest.raises(exceptions.PreconditionFailedError):
        store.put("k", b"three", if_version=version)
    assert store.get("k") == b"two"


def test_the_server_copies_objects(bucket, control):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("a b/ü", b"x", metadata={"m": "1"})
    control.clear_requests()
    store.copy("a b/ü", "copy")
    store.copy(f"{bucket.url}/a b/ü", "again")
    assert "GetObject" not in {request.operation for request in control.requests()}
    assert (store.get("copy"), dict(store.head("again").metadata)) == (b"x", {"m": "1"})


def test_a_key_that_looks_like_a_url_is_copied_as_a_key(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    for key in ("crawl/http://x", "http://x/y", "crawl/s3://bucket/k"):
        store.put(key, key.encode())
        store.copy(key, "copy")
        assert store.get("copy") == key.encode()


@pytest.mark.providers("s3")
def test_an_object_that_changes_during_a_read_is_an_error_and_never_a_mix(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    old = store.put("k", b"old")
    store.put("k", b"new")
    with pytest.raises(exceptions.ObjectChangedError, match="412"):
        store.get("k", version=old)


@pytest.mark.providers("s3")
def test_encryption_and_storage_class_apply_to_every_write(strict_server, bucket, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    for settings, header, value in (
        ({"encryption": "AES256"}, "ServerSideEncryption", "AES256"),
        ({"encryption": "aws:kms", "kms_key_id": "my-key"}, "SSEKMSKeyId", "my-key"),
        ({"storage_class": "STANDARD_IA"}, "StorageClass", "STANDARD_IA"),
        ({"customer_key_file": key}, "SSECustomerAlgorithm", "AES256"),
    ):
        config = s3_config(endpoint_url=strict_server.endpoint, profile="strict", **settings)
        store = torchobj.Store(bucket.url, config=config)
        extra = (
            {"SSECustomerKey": bytes(range(32)), "SSECustomerAlgorithm": "AES256"}
            if "customer_key_file" in settings
            else {}
        )
        for name, data in (("small", b"small"), ("large", bytes(17 << 20))):
            store.put(name, data)
            assert bucket.boto.head_object(Bucket=bucket.name, Key=name, **extra)[header] == value
            assert store.get(name) == data
    plain = torchobj.Store(bucket.url, config=bucket.config)
    with pytest.raises(exceptions.StoreError, match="400"):
        plain.get("small")


def test_every_operation_works_through_the_sdk(bucket):
    s3, gcs = (dataclasses.replace(each, force_sdk=True) for each in (bucket.config.s3, bucket.config.gcs))
    config = dataclasses.replace(bucket.config, s3=s3, gcs=gcs)
    store = torchobj.Store(bucket.url, config=config)
    body = bytes(torch.randint(0, 256, (20 << 20,), dtype=torch.uint8).numpy())
    store.put("k", body, metadata={"a": "b"})
    assert store.get("k") == body
    assert (dict(store.head("k").metadata), [info.size for info in store.list()]) == ({"a": "b"}, [len(body)])


def test_a_store_can_be_used_from_many_threads(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    barrier = threading.Barrier(16)

    def work(number):
        barrier.wait(10)
        for step in range(10):
            key = f"{number}/{step}"
            store.put(key, key.encode())
            assert store.get_many([key, key]) == [key.encode()] * 2
        return number

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(work, range(16))) == list(range(16))


def test_a_store_is_pickled_as_its_arguments(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("k", b"x")
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.url, copy.config, copy.get("k")) == (store.url, store.config, b"x")
    assert repr(copy) == f"Store('{bucket.url}')"


def test_the_first_failure_aborts_the_other_reads(bucket, control):
    config = dataclasses.replace(bucket.config, first_byte_timeout_s=20.0, max_attempts=3)
    store = torchobj.Store(bucket.url, config=config)
    store.put("slow", b"x")
    control.faults({"operation": "GetObject", "key": "slow", "action": {"delay_first_byte_s": 60}})
    began = time.monotonic()
    with pytest.raises(FileNotFoundError, match="missing"):
        store.get_many(["slow", "missing"])
    assert time.monotonic() - began < 10


def test_overlapping_destination_buffers_are_refused(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("a", b"0123456789")
    store.put("b", b"abcdefghij")
    memory = bytearray(20)
    halves = [memoryview(memory)[:10], memoryview(memory)[10:]]
    store.get_many(["a", "b"], into=halves)
    assert memory == b"0123456789abcdefghij"
    for shared in ([memory, memory], [memoryview(memory)[:11], halves[1]]):
        with pytest.raises(ValueError, match="share memory"):
            store.get_many(["a", "b"], into=shared)
    store.get_many(["a", "b"], into=halves)


def test_a_buffer_has_bytes_and_slices(bucket):
    store = torchobj.Store(bucket.url, config=bucket.config)
    store.put("a", b"0123456789")
    buffer = store.get("a")
    assert (buffer[0], buffer[-1], bytes(buffer[2:4]), list(buffer)) == (48, 57, b"23", list(b"0123456789"))
    with pytest.raises(IndexError):
        buffer[10]
