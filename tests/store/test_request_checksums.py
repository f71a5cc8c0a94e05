"""Checksums of requests: one setting for writes, parts and deletes, and deletes on servers without DeleteObjects."""

import dataclasses

import pytest

from torchobj import AdvancedOptions, Store, exceptions
from torchobj.checkpoint import CheckpointManager

LARGE = bytes(6 << 20)


def store_of(bucket, **options):
    s3 = dataclasses.replace(bucket.config.s3, **options)
    return Store(
        bucket.url,
        config=dataclasses.replace(
            bucket.config, s3=s3, part_bytes=5 << 20, advanced=AdvancedOptions(whole_below_bytes=1 << 20)
        ),
    )


def checksums_of(control, operation):
    """The names of the checksum headers of the requests of an operation."""
    sent = control.requests(operation)
    assert sent
    return {
        name
        for request in sent
        for name in request.headers
        if name == "content-md5" or name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum"))
    }


def write_and_delete(store):
    store.put("small", b"x")
    store.put("large", LARGE)
    store.delete(["small", "large"])


OPERATIONS = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")


@pytest.mark.parametrize("force_sdk", [False, True])
def test_without_checksums_no_request_has_one_except_the_md5_of_a_delete(bucket, control, force_sdk):
    store = store_of(bucket, checksum="none", force_sdk=force_sdk)
    write_and_delete(store)
    assert bucket.keys() == []
    for operation in OPERATIONS:
        assert checksums_of(control, operation) == set()
    if not force_sdk:
        assert checksums_of(control, "DeleteObjects") == {"content-md5"}


def test_the_setting_of_the_aws_sdks_is_that_of_checksum_auto(bucket, control, monkeypatch):
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    write_and_delete(store_of(bucket))
    for operation in OPERATIONS:
        assert checksums_of(control, operation) == set()
    assert checksums_of(control, "DeleteObjects") == {"content-md5"}
    control.clear_requests()
    write_and_delete(store_of(bucket, checksum="crc32c"))
    assert "x-amz-checksum-crc32c" in checksums_of(control, "PutObject")
    assert checksums_of(control, "DeleteObjects") == {"content-md5", "x-amz-checksum-crc32c"}


@pytest.mark.parametrize("checksum", ["auto", "crc64nvme", "crc32c", "none"])
@pytest.mark.parametrize("force_sdk", [False, True])
def test_objects_are_deleted_on_a_server_that_needs_content_md5(bucket, control, checksum, force_sdk):
    control.bucket(bucket.name, {"needs_content_md5": True})
    store = store_of(bucket, checksum=checksum, force_sdk=force_sdk)
    keys = ["a", "b&<>'\"", "ü/日本", "c d+%"]
    for key in keys:
        store.put(key, b"")
    store.delete(keys)
    assert bucket.keys() == []


@pytest.mark.parametrize("status", [400, 405, 501])
def test_a_server_that_refuses_delete_objects_is_asked_once(bucket, control, status):
    code = {400: "InvalidRequest", 405: "MethodNotAllowed", 501: "NotImplemented"}[status]
    control.faults({"operation": "DeleteObjects", "action": {"status": status, "code": code}})
    store = store_of(bucket)
    for _ in range(2):
        for number in range(40):
            store.put(f"k{number}", b"")
        store.delete([f"k{number}" for number in range(40)])
        assert bucket.keys() == []
    assert len(control.requests("DeleteObjects")) == 1


@pytest.mark.parametrize("code", [None, "BadDigest", "MalformedXML"])
def test_one_delete_of_several_that_is_refused_by_400_does_not_make_later_ones_single(bucket, control, code):
    refused = {"status": 400} if code is None else {"status": 400, "code": code}
    control.faults({"operation": "DeleteObjects", "times": 1, "action": refused})
    store = store_of(bucket)
    for _ in range(3):
        for key in "ab":
            store.put(key, b"")
        store.delete(["a", "b"])
        assert bucket.keys() == []
    assert len(control.requests("DeleteObjects")) == 3


def test_a_server_that_refuses_every_delete_is_asked_again(bucket, control):
    refused = {"status": 501, "code": "NotImplemented"}
    control.faults(*({"operation": each, "action": refused} for each in ("DeleteObjects", "DeleteObject")))
    store = store_of(bucket)
    store.put("a", b"")
    for _ in range(2):
        with pytest.raises(exceptions.UnsupportedError):
            store.delete(["a", "b"])
    assert len(control.requests("DeleteObjects")) == 2


def test_a_manager_deletes_old_steps_on_a_server_without_delete_objects(bucket, control):
    control.bucket(bucket.name, {"no_bulk_delete": True})
    with CheckpointManager(f"{bucket.url}/run", keep_last=1, config=bucket.config) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"step": step})
        assert manager.steps() == [3]


def test_a_refused_permission_and_expired_keys_are_not_taken_for_a_server_without_delete_objects(bucket, control):
    control.faults({"operation": "DeleteObjects", "action": {"status": 403, "code": "AccessDenied"}})
    store = store_of(bucket)
    with pytest.raises(PermissionError):
        store.delete(["a", "b"])
    assert control.requests("DeleteObject") == []
