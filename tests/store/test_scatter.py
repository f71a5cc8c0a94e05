"""Scatter reads write ranges of objects into the caller's memory; `get_ends` reads the head and tail of an object."""

import random
import zlib

import numpy
import pytest

from tests.strict.control import FaultAction, FaultRule
from torchobj import _torchobj, exceptions

pytestmark = pytest.mark.providers("s3", "gs")

MIB = 1 << 20


@pytest.fixture
def store(bucket):
    return _torchobj.NativeStore(bucket.url[:2], bucket.name, bucket.config)


def put(bucket, key, size):
    body = random.Random(key).randbytes(size)
    bucket.write(key, body)
    return body


def destinations(ranges):
    return [(start, numpy.zeros(end - start, numpy.uint8)) for start, end in ranges]


# A large range split into parts, one with an odd length, small ones with and without gaps, an empty and a distant one.
RANGES = [
    (17 * MIB + 3, 30 * MIB + 10),
    (0, 100_001),
    (100_001, 100_002),
    (100_500, 101_000),
    (5 * MIB, 5 * MIB),
    (2 * MIB, 2 * MIB + 70_000),
    (16 * MIB, 17 * MIB + 3),
]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
def test_ranges_have_the_bytes_that_boto3_reads(bucket, store, pinned, checksum):
    put(bucket, "x", 32 * MIB)
    body, version = bucket.body("x"), bucket.version("x")
    wanted = destinations(RANGES)
    [result] = _torchobj.scatter([(store, "x", version if pinned else None, wanted)], checksum)
    sums = [zlib.crc32(body[start:end]) for start, end in RANGES] if checksum else []
    assert result == (version, len(body), sums)
    for (start, end), (_, buffer) in zip(RANGES, wanted, strict=True):
        assert buffer.tobytes() == body[start:end], (start, end)


def test_two_objects_are_read_in_one_call(bucket, store):
    bodies = {key: put(bucket, key, 3 * MIB) for key in ("one", "two")}
    jobs = [(store, key, None, destinations([(7, MIB), (2 * MIB, 3 * MIB)])) for key in bodies]
    results = _torchobj.scatter(jobs, True)
    for (_, key, _, wanted), (_, size, sums) in zip(jobs, results, strict=True):
        assert size == 3 * MIB
        for (start, buffer), crc32 in zip(wanted, sums, strict=True):
            assert buffer.tobytes() == bodies[key][start : start + len(buffer)]
            assert zlib.crc32(buffer) == crc32


@pytest.mark.parametrize(
    "action",
    [
        FaultAction(status=503, code="SlowDown"),
        FaultAction(cut_body=100_000),
        FaultAction(cut_body=0.9),
        FaultAction(reset="before_head"),
    ],
    ids=str,
)
def test_a_failure_in_mid_read_is_retried(bucket, store, control, action):
    body = put(bucket, "x", 9 * MIB)
    control.faults(*[FaultRule(operation="GetObject", skip=skip, times=1, action=action) for skip in (0, 1)])
    ranges = [(at, at + 30_000) for at in range(0, MIB, 30_000)] + [(2 * MIB, 9 * MIB)]
    wanted = destinations(ranges)
    [(_, _, sums)] = _torchobj.scatter([(store, "x", None, wanted)], True)
    assert all(buffer.tobytes() == body[start : start + len(buffer)] for start, buffer in wanted)
    assert sums == [zlib.crc32(body[start:end]) for start, end in ranges]
    assert sum(request.fault is not None for request in control.requests("GetObject")) == 2


def test_adjacent_small_ranges_are_one_request(bucket, store, control):
    body = put(bucket, "x", 2 * MIB)
    control.clear_requests()
    wanted = destinations([(at, at + 1000) for at in range(0, 1_000_000, 1000)])
    random.Random(1).shuffle(wanted)
    _torchobj.scatter([(store, "x", None, wanted)], False)
    assert all(buffer.tobytes() == body[start : start + 1000] for start, buffer in wanted)
    [request] = control.requests("GetObject")
    assert request.headers["range"] == "bytes=0-999999"


def test_distant_ranges_are_not_coalesced(bucket, store, control):
    put(bucket, "x", 2 * MIB)
    control.clear_requests()
    _torchobj.scatter([(store, "x", None, destinations([(0, 10), (MIB, MIB + 10)]))], False)
    assert len(control.requests("GetObject")) == 2


def test_a_range_beyond_the_end_is_a_range_error(bucket, store):
    put(bucket, "x", 1000)
    for start, end in [(990, 1001), (2000, 2010), (1001, 1001)]:
        with pytest.raises(exceptions.RangeError, match="1000|behind"):
            _torchobj.scatter([(store, "x", None, destinations([(0, 10), (start, end)]))], False)


def test_a_version_other_than_the_requested_one_is_an_object_changed_error(bucket, store):
    put(bucket, "x", 1000)
    version = bucket.version("x")
    put(bucket, "y", 1000)
    for wanted in ([(0, 10)], []):
        with pytest.raises(exceptions.ObjectChangedError):
            _torchobj.scatter([(store, "y", version, destinations(wanted))], False)


def test_a_read_without_ranges_returns_size_and_version(bucket, store):
    put(bucket, "x", 1000)
    version = bucket.version("x")
    assert _torchobj.scatter([(store, "x", None, destinations([(5, 5)]))], True) == [(version, 1000, [0])]
    assert _torchobj.scatter([], True) == []


def test_buffers_that_overlap_or_are_read_only_are_refused(bucket, store):
    memory = numpy.zeros(10, numpy.uint8)
    with pytest.raises(ValueError, match="share memory"):
        _torchobj.scatter([(store, "x", None, [(0, memory[:6]), (6, memory[5:])])], False)
    with pytest.raises(ValueError, match="read-only"):
        _torchobj.scatter([(store, "x", None, [(0, bytes(4))])], False)


@pytest.mark.parametrize("size", [0, 1, 150, 1000])
def test_head_and_tail_are_limited_to_the_object(any_bucket, size):
    if size == 0 and any_bucket.url.startswith("gs:") and any_bucket.server.token is None:
        pytest.skip("fake-gcs-server returns an invalid Content-Range for an empty object")
    store = _torchobj.NativeStore(any_bucket.url[:2], any_bucket.name, any_bucket.config)
    body = put(any_bucket, "x", size)
    version = any_bucket.version("x")
    head, tail, *rest = store.get_ends("x", 100, 70)
    assert (bytes(head), bytes(tail), rest) == (body[:100], body[-70:], [size, version])


def test_head_and_tail_of_a_missing_object_are_not_found(store):
    with pytest.raises(exceptions.ObjectNotFoundError):
        store.get_ends("x", 100, 100)
