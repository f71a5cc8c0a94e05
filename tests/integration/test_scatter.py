"""Segments of objects land in the memory they belong to, and the two ends of an object come together."""

import random
import zlib

import numpy
import pytest

from tests.servers.strict.control import FaultAction, FaultRule
from torchobj import _torchobj, exceptions

MIB = 1 << 20


@pytest.fixture
def store(place):
    return _torchobj.NativeStore("s3", place.bucket, place.config)


def put(place, key, size):
    body = random.Random(key).randbytes(size)
    place.boto.put_object(Bucket=place.bucket, Key=key, Body=body)
    return body


def segments(ranges):
    return [(start, numpy.zeros(end - start, numpy.uint8)) for start, end in ranges]


# A large one cut by the parts, one with an odd length, small ones with and without gaps, an empty one, a far one.
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
def test_segments_have_the_bytes_that_boto_reads(place, store, pinned, checksum):
    put(place, "x", 32 * MIB)
    body, version = place.body("x"), place.boto.head_object(Bucket=place.bucket, Key="x")["ETag"]
    wanted = segments(RANGES)
    [result] = _torchobj.scatter([(store, "x", version if pinned else None, wanted)], checksum)
    sums = [zlib.crc32(body[start:end]) for start, end in RANGES] if checksum else []
    assert result == (version, len(body), sums)
    for (start, end), (_, buffer) in zip(RANGES, wanted, strict=True):
        assert buffer.tobytes() == body[start:end], (start, end)


def test_two_objects_are_read_in_one_call(place, store):
    bodies = {key: put(place, key, 3 * MIB) for key in ("one", "two")}
    jobs = [(store, key, None, segments([(7, MIB), (2 * MIB, 3 * MIB)])) for key in bodies]
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
def test_a_failure_in_between_is_mended(place, store, control, action):
    body = put(place, "x", 9 * MIB)
    control.faults(*[FaultRule(operation="GetObject", skip=skip, times=1, action=action) for skip in (0, 1)])
    ranges = [(at, at + 30_000) for at in range(0, MIB, 30_000)] + [(2 * MIB, 9 * MIB)]
    wanted = segments(ranges)
    [(_, _, sums)] = _torchobj.scatter([(store, "x", None, wanted)], True)
    assert all(buffer.tobytes() == body[start : start + len(buffer)] for start, buffer in wanted)
    assert sums == [zlib.crc32(body[start:end]) for start, end in ranges]
    assert sum(request.fault is not None for request in control.requests("GetObject")) == 2


def test_adjacent_small_segments_are_one_request(place, store, control):
    body = put(place, "x", 2 * MIB)
    control.forget_requests()
    wanted = segments([(at, at + 1000) for at in range(0, 1_000_000, 1000)])
    random.Random(1).shuffle(wanted)
    _torchobj.scatter([(store, "x", None, wanted)], False)
    assert all(buffer.tobytes() == body[start : start + 1000] for start, buffer in wanted)
    [request] = control.requests("GetObject")
    assert request.headers["range"] == "bytes=0-999999"


def test_segments_far_apart_are_not_joined(place, store, control):
    put(place, "x", 2 * MIB)
    control.forget_requests()
    _torchobj.scatter([(store, "x", None, segments([(0, 10), (MIB, MIB + 10)]))], False)
    assert len(control.requests("GetObject")) == 2


def test_a_segment_behind_the_end_is_a_range_error(place, store):
    put(place, "x", 1000)
    for start, end in [(990, 1001), (2000, 2010), (1001, 1001)]:
        with pytest.raises(exceptions.RangeError, match="1000|behind"):
            _torchobj.scatter([(store, "x", None, segments([(0, 10), (start, end)]))], False)


def test_another_version_than_the_one_asked_for_is_a_change(place, store):
    put(place, "x", 1000)
    version = place.boto.head_object(Bucket=place.bucket, Key="x")["ETag"]
    put(place, "y", 1000)
    for wanted in ([(0, 10)], []):
        with pytest.raises(exceptions.ObjectChangedError):
            _torchobj.scatter([(store, "y", version, segments(wanted))], False)


def test_a_job_without_bytes_tells_size_and_version(place, store):
    put(place, "x", 1000)
    version = place.boto.head_object(Bucket=place.bucket, Key="x")["ETag"]
    assert _torchobj.scatter([(store, "x", None, segments([(5, 5)]))], True) == [(version, 1000, [0])]
    assert _torchobj.scatter([], True) == []


def test_buffers_that_overlap_or_are_read_only_are_refused(place, store):
    memory = numpy.zeros(10, numpy.uint8)
    with pytest.raises(ValueError, match="share memory"):
        _torchobj.scatter([(store, "x", None, [(0, memory[:6]), (6, memory[5:])])], False)
    with pytest.raises(ValueError, match="read-only"):
        _torchobj.scatter([(store, "x", None, [(0, bytes(4))])], False)


@pytest.mark.parametrize("size", [0, 1, 150, 1000])
def test_the_ends_are_what_the_object_has_of_them(any_place, size):
    store = _torchobj.NativeStore("s3", any_place.bucket, any_place.config)
    body = put(any_place, "x", size)
    version = any_place.boto.head_object(Bucket=any_place.bucket, Key="x")["ETag"]
    head, tail, *rest = store.get_ends("x", 100, 70)
    assert (bytes(head), bytes(tail), rest) == (body[:100], body[-70:], [size, version])


def test_the_ends_of_an_object_that_does_not_exist_are_not_found(store):
    with pytest.raises(exceptions.ObjectNotFoundError):
        store.get_ends("x", 100, 100)
