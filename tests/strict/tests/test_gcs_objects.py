"""Tests the GCS mode's objects, conditions and listings through google-cloud-storage."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
from typing import Any

import google_crc32c
import pytest

from tests.servers import launch
from tests.servers.gcs_client import refusal
from tests.strict.control import Control
from tests.strict.tests.answers import gcs_exchange

pytestmark = [pytest.mark.timeout(60), pytest.mark.matrix]

UNUSUAL_NAMES = [
    "plain.txt",
    "a//b",
    "/lead",
    "trail/",
    "a/../b",
    "a/./b",
    "...",
    "with space and  two",
    "plus+plus",
    "100%25 %zz",
    "what?a=b&c",
    "hash#tag",
    "ünïcode/😀/é",
    "<xml>&\"quotes'",
    "semi;colon:at@=,$!*()~",
    "n" * 1024,
    "é" * 512,
]


@pytest.mark.parametrize("name", UNUSUAL_NAMES, ids=lambda name: repr(name[:20]))
def test_an_unusual_name_is_put_read_copied_listed_and_deleted_unchanged(gcs: Any, name: str) -> None:
    bucket = gcs.bucket("bucket")
    blob = bucket.blob(name)
    blob.metadata = {"a": "b"}
    blob.upload_from_string(b"content", content_type="text/plain")
    assert bucket.blob(name).download_as_bytes() == b"content"
    copy = bucket.blob("copy")
    assert copy.rewrite(blob) == (None, 7, 7)
    assert (copy.metadata, copy.content_type) == ({"a": "b"}, "text/plain")
    assert [found.name for found in gcs.list_blobs("bucket", prefix=name)] == [name]
    blob.delete()
    assert refusal(bucket.blob(name).reload) == (404, "notFound")


def test_a_resource_has_checksums_times_and_attributes(gcs: Any, gcs_server: launch.Server) -> None:
    content = os.urandom(1000)
    blob = gcs.bucket("bucket").blob("name")
    blob.metadata = {"Case": "ünï"}
    blob.content_language, blob.cache_control = "de", "no-store"
    blob.content_disposition, blob.storage_class = "attachment", "COLDLINE"
    blob.upload_from_string(content, content_type="text/x")
    found = gcs.bucket("bucket").get_blob("name")
    crc32c = base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
    md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
    assert (found.crc32c, found.md5_hash, found.size) == (crc32c, md5, 1000)
    assert (found.content_type, found.content_language, found.cache_control) == ("text/x", "de", "no-store")
    assert (found.storage_class, found.metadata) == ("COLDLINE", {"Case": "ünï"})
    assert (found.metageneration, found.component_count) == (1, None)
    assert found.time_created.timestamp() == pytest.approx(found.generation / 1e6, abs=0.002)
    answer = gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket/o/name?alt=media")
    expected = {
        "x-goog-generation": str(found.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": f"crc32c={crc32c},md5={md5}",
        "x-goog-storage-class": "COLDLINE",
        "x-goog-stored-content-encoding": "identity",
        "x-goog-stored-content-length": "1000",
        "etag": found.etag,
        "content-type": "text/x",
        "content-disposition": "attachment",
        "content-length": "1000",
    }
    assert {name: answer.headers.get(name) for name in expected} == expected
    assert answer.body == content


def test_ranges_are_those_of_rfc_9110(gcs: Any, gcs_server: launch.Server) -> None:
    gcs.bucket("bucket").blob("name").upload_from_string(b"0123456789")
    gcs.bucket("bucket").blob("empty").upload_from_string(b"")
    for header, status, content_range, body in [
        ("bytes=2-4", 206, "bytes 2-4/10", b"234"),
        ("bytes=7-", 206, "bytes 7-9/10", b"789"),
        ("bytes=-3", 206, "bytes 7-9/10", b"789"),
        ("bytes=8-99", 206, "bytes 8-9/10", b"89"),
        ("bytes=10-", 416, "bytes */10", None),
    ]:
        target = "/storage/v1/b/bucket/o/name?alt=media"
        answer = gcs_exchange(gcs_server, "GET", target, headers={"Range": header})
        assert (answer.status, answer.headers["content-range"]) == (status, content_range)
        assert body is None or answer.body == body
    answer = gcs_exchange(gcs_server, "GET", "/storage/v1/b/bucket/o/empty?alt=media", headers={"Range": "bytes=0-"})
    assert answer.status == 416


def test_an_object_with_content_encoding_gzip_is_decompressed_unless_gzip_is_accepted(
    gcs: Any, gcs_server: launch.Server
) -> None:
    stored = gzip.compress(b"content" * 100)
    blob = gcs.bucket("bucket").blob("name")
    blob.content_encoding = "gzip"
    blob.upload_from_string(stored)
    target = "/storage/v1/b/bucket/o/name?alt=media"
    for headers in ({}, {"Accept-Encoding": "identity"}, {"Accept-Encoding": "gzip;q=0", "Range": "bytes=0-3"}):
        answer = gcs_exchange(gcs_server, "GET", target, headers=headers)
        assert (answer.status, answer.body) == (200, b"content" * 100)
        assert answer.headers["warning"] == "214 UploadServer gunzipped"
        assert answer.headers["x-goog-stored-content-encoding"] == "gzip"
        assert not {"content-length", "content-encoding"} & set(answer.headers)
    for accepted in ("gzip", "br, gzip;q=0.5"):
        answer = gcs_exchange(gcs_server, "GET", target, headers={"Accept-Encoding": accepted, "Range": "bytes=0-3"})
        assert (answer.status, answer.body, answer.headers["content-encoding"]) == (206, stored[:4], "gzip")


def test_conditions_are_about_the_live_generation(gcs: Any) -> None:
    bucket = gcs.bucket("bucket")
    blob = bucket.blob("name")
    failed = (412, "conditionNotMet")
    assert refusal(blob.upload_from_string, b"", if_generation_match=1) == failed
    blob.upload_from_string(b"first", if_generation_match=0)
    first = blob.generation
    assert refusal(blob.upload_from_string, b"", if_generation_match=0) == failed
    blob.upload_from_string(b"second", if_generation_match=first)
    assert blob.generation > first
    for call in (bucket.blob("name").reload, bucket.blob("name").delete):
        assert refusal(call, if_generation_match=first) == failed
        assert refusal(call, if_metageneration_match=2) == failed
    with pytest.raises(Exception, match="412"):
        bucket.blob("name").download_as_bytes(if_generation_match=first)
    assert bucket.blob("name").download_as_bytes(if_generation_match=blob.generation) == b"second"
    assert refusal(bucket.blob("name", generation=first).reload) == (404, "notFound")
    bucket.blob("name").delete(if_generation_match=blob.generation)
    assert refusal(blob.delete) == (404, "notFound")


def test_a_read_whose_generation_is_excluded_is_not_modified(gcs: Any, gcs_server: launch.Server) -> None:
    blob = gcs.bucket("bucket").blob("name")
    blob.upload_from_string(b"content")
    target = f"/storage/v1/b/bucket/o/name?ifGenerationNotMatch={blob.generation}"
    assert gcs_exchange(gcs_server, "GET", target).status == 304


def test_patched_metadata_has_a_new_metageneration(gcs: Any) -> None:
    blob = gcs.bucket("bucket").blob("name")
    blob.metadata = {"kept": "1", "removed": "2"}
    blob.upload_from_string(b"content")
    blob.metadata = {"removed": None, "added": "3"}
    blob.content_type = "text/new"
    blob.patch(if_metageneration_match=1)
    assert (blob.metadata, blob.content_type, blob.metageneration) == ({"kept": "1", "added": "3"}, "text/new", 2)
    assert refusal(blob.patch, if_metageneration_match=1) == (412, "conditionNotMet")


@pytest.mark.parametrize("delimiter", [None, "/", "//", "-"])
@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "z"])
@pytest.mark.parametrize("page_size", [1, 2, 1000])
def test_pages_of_any_size_add_up_to_the_same_listing(gcs: Any, prefix: str, delimiter: Any, page_size: int) -> None:
    names = ["a", "a/", "a//x", "a/b", "a/b-1", "a/b/c", "a/b/d", "a0", "b/é", "b/😀", "b/\uffee", "c d", "c+d"]
    for name in names:
        gcs.bucket("bucket").blob(name).upload_from_string(b"")
    expected_names: set[str] = set()
    expected_prefixes: set[str] = set()
    for name in (name for name in names if name.startswith(prefix)):
        head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
        (expected_prefixes if found else expected_names).add(prefix + head + found if found else name)
    listing = gcs.list_blobs("bucket", prefix=prefix, delimiter=delimiter, page_size=page_size)
    found_names: list[str] = []
    prefixes: list[str] = []
    for page in listing.pages:
        on_page = [blob.name for blob in page]
        assert len(on_page) + len(page.prefixes) <= page_size
        found_names += on_page
        prefixes += page.prefixes
    assert found_names == sorted(expected_names)
    assert prefixes == sorted(expected_prefixes)


def test_offsets_limit_a_listing_and_fields_what_it_shows(gcs: Any, gcs_control: Control) -> None:
    for name in ("a", "b", "c/1", "c/2", "d"):
        gcs.bucket("bucket").blob(name).upload_from_string(b"x")
    gcs_control.limits(max_keys=2)
    listing = gcs.list_blobs("bucket", start_offset="b", end_offset="d", fields="items(name,size),nextPageToken")
    assert [(blob.name, blob.size, blob.generation) for blob in listing] == [
        ("b", 1, None),
        ("c/1", 1, None),
        ("c/2", 1, None),
    ]
    assert len(gcs_control.requests("ListObjects")) == 2
    trailing = gcs.list_blobs("bucket", prefix="c", delimiter="/", include_trailing_delimiter=True)
    gcs.bucket("bucket").blob("c/").upload_from_string(b"")
    assert [blob.name for blob in trailing] == ["c/"]
    assert trailing.prefixes == {"c/"}


def test_versions_and_soft_deleted_objects_are_kept_and_listed(gcs: Any, gcs_control: Control) -> None:
    gcs_control.bucket("bucket", {"versioning": True, "soft_delete": True})
    bucket = gcs.bucket("bucket")
    generations = []
    for content in (b"first", b"second"):
        blob = bucket.blob("name")
        blob.upload_from_string(content)
        generations.append(blob.generation)
    assert bucket.blob("name", generation=generations[0]).download_as_bytes() == b"first"
    assert [blob.generation for blob in gcs.list_blobs("bucket", versions=True)] == generations
    bucket.blob("name").delete()
    assert list(gcs.list_blobs("bucket")) == []
    assert bucket.blob("name", generation=generations[1]).download_as_bytes() == b"second"
    bucket.blob("name", generation=generations[0]).delete()
    assert refusal(bucket.blob("name", generation=generations[0]).reload) == (404, "notFound")
    deleted = list(gcs.list_blobs("bucket", soft_deleted=True))
    assert [(blob.generation, blob.soft_delete_time is None) for blob in deleted] == [(generations[0], False)]


def test_buckets_are_created_and_show_their_settings(gcs: Any, gcs_control: Control) -> None:
    gcs.create_bucket("created")
    assert refusal(gcs.create_bucket, "created") == (409, "conflict")
    assert refusal(gcs.get_bucket, "missing") == (404, "notFound")
    gcs_control.bucket(
        "created",
        {
            "storage_class": "NEARLINE",
            "retention_s": 60,
            "default_event_based_hold": True,
            "denied": ["storage.objects.delete"],
            "versioning": True,
        },
    )
    assert [bucket.name for bucket in gcs.list_buckets(page_size=1)] == ["bucket", "created"]
    assert [bucket.name for bucket in gcs.list_buckets(prefix="cr")] == ["created"]
    bucket = gcs.get_bucket("created")
    assert (bucket.storage_class, bucket.retention_period, bucket.versioning_enabled) == ("NEARLINE", 60, True)
    assert bucket.default_event_based_hold
    permissions = ["storage.objects.create", "storage.objects.delete"]
    assert bucket.test_iam_permissions(permissions) == permissions[:1]


def test_a_resumable_upload_of_google_cloud_storage_succeeds(gcs: Any, gcs_control: Control) -> None:
    content = os.urandom(1_000_000)
    blob = gcs.bucket("bucket").blob("name", chunk_size=256 * 1024)
    blob.upload_from_file(io.BytesIO(content))
    with gcs.bucket("bucket").blob("streamed").open("wb", chunk_size=256 * 1024) as file:
        file.write(content)
    for name in ("name", "streamed"):
        assert gcs.bucket("bucket").blob(name).download_as_bytes() == content
    assert [request.status for request in gcs_control.requests("ResumableChunk")] == [308, 308, 308, 200] * 2
