"""Objects gathered from memory: the bytes and checksums are right on every server, and a failure leaves nothing."""

import dataclasses
import time
import zlib

import numpy as np
import pytest

from torchobj import _torchobj
from torchobj.exceptions import AccessDeniedError, IntegrityError

NO_ATTRIBUTES = (None, None, None, None, None, None, [])


def _store(place, **changed):
    return _torchobj.NativeStore("s3", place.bucket, dataclasses.replace(place.config, **changed))


def _record(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def _crc32(*records):
    return zlib.crc32(b"".join(record.tobytes() for record in records)).to_bytes(4, "little")


@pytest.mark.parametrize("size", [0, 1, 5000, 30 << 20])
def test_an_object_is_what_was_gathered(any_place, size):
    one, other = _record(size, 1), _record(4097, 2)
    gather = _torchobj.NativeGather(_store(any_place), "gathered", NO_ATTRIBUTES)
    gather.write([b"head", one, 0, b"literal" * 1000, other])
    gather.write([1, (0, 2), b"tail"])
    version, length, crc32 = gather.close()
    expected = [b"head", one.tobytes(), _crc32(one), b"literal" * 1000, other.tobytes(), _crc32(other)]
    expected = b"".join([*expected, _crc32(one, other), b"tail"])
    assert any_place.body("gathered") == expected
    assert length == len(expected)
    assert crc32 == zlib.crc32(expected)
    assert any_place.boto.head_object(Bucket=any_place.bucket, Key="gathered")["ETag"] == version
    assert any_place.uploads() == []


def test_a_part_that_fails_leaves_nothing(place, control):
    place.boto.put_object(Bucket=place.bucket, Key="kept", Body=b"before")
    control.faults({"operation": "UploadPart", "skip": 1, "action": {"status": 403, "code": "AccessDenied"}})
    gather = _torchobj.NativeGather(_store(place), "kept", NO_ATTRIBUTES)
    with pytest.raises(AccessDeniedError, match="403 AccessDenied"):
        _write_and_close(gather, _record(64 << 20, 3))
    with pytest.raises(ValueError, match="ended"):
        gather.write([b"more"])
    assert place.body("kept") == b"before"
    assert place.uploads() == []


def _write_and_close(gather, record):
    gather.write([record])
    gather.close()


def test_parts_that_fail_now_and_then_are_sent_again_from_the_same_memory(place, control):
    control.faults(
        {"operation": "UploadPart", "probability": 0.3, "seed": 7, "action": {"status": 503, "code": "SlowDown"}}
    )
    record = _record(64 << 20, 3)
    _write_and_close(_torchobj.NativeGather(_store(place), "gathered", NO_ATTRIBUTES), record)
    assert place.body("gathered") == record.tobytes()


@pytest.mark.parametrize("size", [5000, 20 << 20])
def test_the_crc_of_the_records_is_the_checksum_of_the_requests(place, control, size):
    control.forget_requests()
    _write_and_close(_torchobj.NativeGather(_store(place), "gathered", NO_ATTRIBUTES), _record(size, 4))
    sent = [request for request in control.requests() if request.operation in ("UploadPart", "PutObject")]
    assert sent
    assert all("x-amz-checksum-crc32" in request.headers for request in sent)


def test_uploads_keep_to_their_pace(place):
    began = time.monotonic()
    store = _store(place, upload_mbit_s=8 * 40)
    _write_and_close(_torchobj.NativeGather(store, "gathered", NO_ATTRIBUTES), _record(40 << 20, 4))
    # Five parts of 8 MiB, each of which takes 0.21 s, and the first begins at once.
    assert time.monotonic() - began > 0.8


def test_memory_that_changes_while_it_is_sent_is_refused_at_once(place, control):
    record = _record(40 << 20, 4)
    gather = _torchobj.NativeGather(_store(place, upload_mbit_s=8 * 40), "gathered", NO_ATTRIBUTES)
    gather.write([record])
    record[:] += 1
    control.forget_requests()
    with pytest.raises(IntegrityError, match="the memory that is sent was changed meanwhile"):
        gather.close()
    assert len([request for request in control.requests() if request.operation == "UploadPart"]) <= 5
    assert place.keys() == []
    assert place.uploads() == []
