"""Objects gathered from memory: bytes and checksums are correct on every server, and a failure leaves nothing."""

import dataclasses
import time
import zlib

import numpy as np
import pytest

from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import _torchobj
from torchobj.exceptions import AccessDeniedError, IntegrityError

pytestmark = pytest.mark.providers("s3", "gs")

NO_ATTRIBUTES = {"metadata": {}}


def _store(bucket, **changed):
    return _torchobj.NativeStore(bucket.url[:2], bucket.name, dataclasses.replace(bucket.config, **changed))


def _record(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def _crc32(*records):
    return zlib.crc32(b"".join(record.tobytes() for record in records)).to_bytes(4, "little")


@pytest.mark.parametrize("size", [0, 1, 5000, 30 << 20])
def test_an_object_has_the_gathered_bytes(any_bucket, size):
    one, other = _record(size, 1), _record(4097, 2)
    gather = _torchobj.NativeGather(_store(any_bucket), "gathered", NO_ATTRIBUTES)
    gather.write([b"head", one, 0, b"literal" * 1000, other])
    gather.write([1, (0, 2), b"tail"])
    version, length, crc32 = gather.close()
    expected = [b"head", one.tobytes(), _crc32(one), b"literal" * 1000, other.tobytes(), _crc32(other)]
    expected = b"".join([*expected, _crc32(one, other), b"tail"])
    assert any_bucket.body("gathered") == expected
    assert length == len(expected)
    assert crc32 == zlib.crc32(expected)
    assert any_bucket.version("gathered") == version
    assert any_bucket.uploads() == []


def test_a_part_that_fails_leaves_nothing(bucket, control):
    bucket.write("kept", b"before")
    control.faults({"operation": "UploadPart", "skip": 1, "action": {"status": 403, "code": "AccessDenied"}})
    gather = _torchobj.NativeGather(_store(bucket), "kept", NO_ATTRIBUTES)
    with pytest.raises(AccessDeniedError, match="403 [Aa]ccessDenied"):
        _write_and_close(gather, _record(64 << 20, 3))
    with pytest.raises(ValueError, match="ended"):
        gather.write([b"more"])
    assert bucket.body("kept") == b"before"
    assert bucket.uploads() == []


def _write_and_close(gather, record):
    gather.write([record])
    gather.close()


@pytest.mark.providers("s3", GCS_IN_MATRIX)
def test_parts_that_fail_temporarily_are_retried_from_the_same_memory(bucket, control):
    control.faults(
        {"operation": "UploadPart", "probability": 0.3, "seed": 7, "action": {"status": 503, "code": "SlowDown"}}
    )
    record = _record(64 << 20, 3)
    _write_and_close(_torchobj.NativeGather(_store(bucket), "gathered", NO_ATTRIBUTES), record)
    assert bucket.body("gathered") == record.tobytes()


@pytest.mark.parametrize("size", [5000, 20 << 20])
@pytest.mark.providers("s3")
def test_the_crc_of_the_records_is_the_checksum_of_the_requests(bucket, control, size):
    control.clear_requests()
    _write_and_close(_torchobj.NativeGather(_store(bucket), "gathered", NO_ATTRIBUTES), _record(size, 4))
    sent = [request for request in control.requests() if request.operation in ("UploadPart", "PutObject")]
    assert sent
    assert all("x-amz-checksum-crc32" in request.headers for request in sent)


def test_uploads_respect_the_rate_limit(bucket):
    began = time.monotonic()
    store = _store(bucket, upload_mbit_s=8 * 40)
    _write_and_close(_torchobj.NativeGather(store, "gathered", NO_ATTRIBUTES), _record(40 << 20, 4))
    # Five parts of 8 MiB, each of which takes 0.21 s; the first starts at once.
    assert time.monotonic() - began > 0.8


def test_memory_that_changes_while_it_is_sent_is_an_error_without_a_retry(bucket, control):
    record = _record(40 << 20, 4)
    gather = _torchobj.NativeGather(_store(bucket, upload_mbit_s=8 * 40), "gathered", NO_ATTRIBUTES)
    gather.write([record])
    record[:] += 1
    control.clear_requests()
    with pytest.raises(IntegrityError, match="the memory was changed while it was sent"):
        gather.close()
    assert len([request for request in control.requests() if request.operation == "UploadPart"]) <= 5
    assert bucket.keys() == []
    assert bucket.uploads() == []
