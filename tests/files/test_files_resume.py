"""Downloads that were killed continue with the missing parts of the same version, and leave nothing behind."""

import dataclasses
import hashlib
import os
from pathlib import Path

import pytest

import torchobj
from tests.support.interrupting import interrupted
from tests.support.killing import HELD_S, Saver, kill_at
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions, files

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

PART_BYTES = 5 << 20
PARTS = 6


@pytest.fixture
def store(bucket):
    """A store that requests one part after the other."""
    return torchobj.Store(bucket.url, config=with_small_parts(bucket).config)


def with_small_parts(bucket):
    config = dataclasses.replace(bucket.config, part_bytes=PART_BYTES, max_in_flight=1, hedge=False)
    return bucket._replace(config=config)


def put_large(store, parts=PARTS):
    data = os.urandom(parts * PART_BYTES - 1000)
    store.put("large", data)
    return hashlib.sha256(data).hexdigest()


def hold(control, after):
    """Delays the response to the part after this many others."""
    control.clear_requests()
    control.faults({"operation": "GetObject", "skip": after, "times": 1, "action": {"delay_first_byte_s": HELD_S}})


def answered(control):
    return sum(request.status is not None for request in control.requests("GetObject"))


@pytest.mark.providers("s3", "gs")
def test_after_three_kills_the_bytes_are_right_and_no_part_was_read_twice(bucket, control, store, tmp_path):
    digest = put_large(store, 12)
    path = tmp_path / "large"
    saver = Saver(with_small_parts(bucket), str(Path(__file__).with_name("file_killed.py")))
    try:
        for _ in range(3):
            hold(control, 3)
            assert kill_at(control, saver.begin(url=bucket.url, path=str(path)))
            assert saver.end() == 9
            assert not path.exists()
            assert len(os.listdir(tmp_path)) == 1
    finally:
        saver.close()
    control.clear_faults()
    control.clear_requests()
    seen = []
    store.download_file("large", path, progress=seen.append)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    # At most the part whose response had arrived at the moment of a kill is read again.
    assert 3 <= len(control.requests("GetObject")) <= 6
    assert seen[-1] == files.Progress(1, 1, path.stat().st_size, path.stat().st_size, 0)
    assert os.listdir(tmp_path) == ["large"]


@pytest.fixture
def begun(control, store, tmp_path):
    """A download that was interrupted after four of its parts."""
    put_large(store)
    with pytest.raises(KeyboardInterrupt), interrupted(control, operation="GetObject", skip=4):
        store.download_file("large", tmp_path / "large")
    control.clear_requests()
    return tmp_path / "large"


def test_an_interrupted_download_continues(control, store, begun):
    store.download_file("large", begun)
    assert hashlib.sha256(begun.read_bytes()).digest() == hashlib.sha256(store.get("large")).digest()
    assert os.listdir(begun.parent) == ["large"]


@pytest.mark.providers("s3", "gs")
def test_a_changed_object_starts_again(control, store, begun):
    digest = put_large(store)
    store.download_file("large", begun)
    assert hashlib.sha256(begun.read_bytes()).hexdigest() == digest
    assert len(control.requests("GetObject")) == PARTS


def test_another_object_to_the_same_file_starts_again(control, store, begun):
    store.put("other", b"small")
    store.download_file("other", begun)
    assert begun.read_bytes() == b"small"
    assert os.listdir(begun.parent) == ["large"]


def test_a_damaged_part_is_read_again(control, store, begun):
    [left] = begun.parent.iterdir()
    with left.open("r+b") as file:
        file.write(b"damaged")
    store.download_file("large", begun)
    assert begun.read_bytes() == bytes(store.get("large"))


def test_a_temporary_file_of_a_running_download_is_not_used(control, store, begun):
    import fcntl

    [left] = begun.parent.iterdir()
    with left.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.download_file("large", begun)
        assert len(control.requests("GetObject")) == PARTS
    assert sorted(os.listdir(begun.parent)) == sorted([left.name, "large"])


def test_a_link_under_the_temporary_name_is_not_followed(store, begun):
    [left] = begun.parent.iterdir()
    left.unlink()
    outside = begun.parent.parent / f"{begun.parent.name}-outside"
    outside.write_bytes(b"outside")
    left.symlink_to(outside)
    store.download_file("large", begun)
    assert outside.read_bytes() == b"outside"
    outside.unlink()


def test_a_failed_network_keeps_the_parts_and_a_missing_object_does_not(control, bucket, store, tmp_path):
    put_large(store)
    config = dataclasses.replace(store.config, max_attempts=1)
    once = torchobj.Store(bucket.url, config=config)
    control.faults({"operation": "GetObject", "skip": 3, "times": 1, "action": {"status": 500}})
    with pytest.raises(exceptions.StoreError):
        once.download_file("large", tmp_path / "large")
    assert len(os.listdir(tmp_path)) == 1
    control.faults({"operation": "GetObject", "times": 1, "action": {"status": 403}})
    with pytest.raises(exceptions.AccessDeniedError):
        once.download_file("large", tmp_path / "large")
    assert os.listdir(tmp_path) == []
