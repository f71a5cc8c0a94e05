"""What differs on the gateway of Ceph 16: conditions that are ignored or never hold, and uploads in parts without an ETag."""

import logging

import pytest
import torch

import torchobj
from torchobj import exceptions

pytestmark = pytest.mark.providers("s3")

LARGE = bytes(20 << 20)
NO_ETAG = "<CompleteMultipartUploadResult><ETag></ETag></CompleteMultipartUploadResult>"


@pytest.fixture
def store(bucket) -> torchobj.Store:
    return torchobj.Store(bucket.url, config=bucket.config)


def test_the_version_of_an_upload_without_an_etag_is_that_of_the_object(store, control):
    control.faults({"operation": "CompleteMultipartUpload", "action": {"replace_body": NO_ETAG}})
    assert store.put("large", LARGE) == store.head("large").version


def test_an_upload_in_parts_replaces_no_object_if_the_server_ignores_the_condition(store, bucket, control):
    store.put("large", b"first")
    control.bucket(bucket.name, {"ignores_conditions": True})
    with pytest.raises(exceptions.PreconditionFailedError, match="the object exists"):
        store.put("large", LARGE, overwrite=False)
    assert bucket.body("large") == b"first"
    assert store.put("other", LARGE, overwrite=False) == store.head("other").version


def test_a_condition_that_never_holds_is_named(store, bucket, control):
    version = store.put("k", b"first")
    control.bucket(bucket.name, {"refuses_if_match": True})
    with pytest.raises(exceptions.UnsupportedError, match=r"refuses If-Match .*conditional_writes=False"):
        store.put("k", b"second", if_version=version)
    with pytest.raises(exceptions.PreconditionFailedError):
        store.put("k", b"second", if_version='"0"')


def test_a_checkpoint_manager_deletes_and_replaces_steps(bucket, control, caplog):
    control.bucket(bucket.name, {"ignores_conditions": True, "refuses_if_match": True})
    with torchobj.CheckpointManager(f"{bucket.url}/run", keep_last=2, config=bucket.config) as checkpoints:
        with caplog.at_level(logging.WARNING):
            for step in (1, 2, 3):
                checkpoints.save(step, {"x": torch.full((3,), float(step))})
            checkpoints.save(3, {"x": torch.zeros(3)}, overwrite=True)
        assert checkpoints.steps() == [2, 3]
        assert torch.equal(checkpoints.restore()["x"], torch.zeros(3))
    assert "saved again" not in caplog.text
