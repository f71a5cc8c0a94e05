"""A process that is killed at a random request of an upload to gs://: the object is the old one or the new one, and the
parts of the upload are found and deleted."""

import dataclasses
import random
import signal
import time
from pathlib import Path

import pytest

import torchobj
from tests.support.buckets import PARTS
from tests.support.killing import Saver, kill_now, state_of
from torchobj import ObjectMapDataset, Store

PART_BYTES = 5 << 20
SIZE = 36 * PART_BYTES
FOREIGN = f"{PARTS}foreign/x"


def sweep(store, bucket):
    """Aborts all uploads. The server may store parts that it received before the process was killed meanwhile."""
    deadline_s = time.monotonic() + 30
    while bucket.uploads() != [FOREIGN]:
        assert time.monotonic() < deadline_s, bucket.uploads()
        for upload in store.unfinished_uploads():
            assert upload.key == "large"
            store.abort_upload(upload)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.matrix)])
def test_an_upload_killed_at_a_random_request_leaves_the_old_object_or_the_new_one(gcs_bucket, gcs_control, kills):
    config = dataclasses.replace(
        gcs_bucket.config, part_bytes=PART_BYTES, advanced=torchobj.AdvancedOptions(whole_below_bytes=PART_BYTES)
    )
    bucket = gcs_bucket._replace(config=config)
    store = Store(bucket.url, config=config)
    for key in ("normal", FOREIGN):
        bucket.write(key, b"kept")
    store.put("large", b"old")
    saver = Saver(bucket, Path(__file__).with_name("gcs_upload_killed.py"))
    moments = random.Random(3)
    try:
        gcs_control.clear_requests()
        saver.begin(url=bucket.url, fill="-")
        assert saver.end() is None
        requests = len(gcs_control.requests())
        version, fill, killed, found = store.head("large").version, b"-", 0, 0
        for number in range(kills):
            new = bytes([ord("a") + number])
            gcs_control.clear_requests()
            pid = saver.begin(url=bucket.url, fill=new.decode())
            moment = moments.randrange(requests)
            while len(gcs_control.requests()) < moment and state_of(pid) != "Z":
                time.sleep(0.002)
            kill_now(pid)
            killed += saver.end() == signal.SIGKILL
            assert [info.key for info in store.list()] == bucket.keys() == ["large", "normal"]
            assert len(ObjectMapDataset(f"{bucket.url}/", config=config)) == 2
            found += len(bucket.uploads()) - 1
            sweep(store, bucket)
            assert store.unfinished_uploads() == []
            # Without its parts, a commit that the server received before the kill fails.
            info = store.head("large")
            if info.version != version:
                version, fill = info.version, new
            assert info.size == SIZE
            ends = [(start, start + 3) for start in range(0, SIZE, PART_BYTES)] + [(SIZE - 3, None)]
            assert {bytes(data) for data in store.get_ranges("large", ends)} == {fill * 3}
        assert store.get("large") == fill * SIZE
        assert killed > kills // 4
        assert found > 0
    finally:
        saver.close()
    assert (bucket.body("normal"), bucket.body(FOREIGN)) == (b"kept", b"kept")
    assert torchobj.get_many([f"{bucket.url}/normal"], config=config) == [b"kept"]
