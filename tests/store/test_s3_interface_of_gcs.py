"""GCS through its S3 interface, which ignores conditions of writes and may refuse DeleteObjects."""

import dataclasses
import logging

import pytest
import torch

import torchobj
from torchobj import S3Options, Store, StoreConfig, exceptions
from torchobj.checkpoint import CheckpointManager


@pytest.fixture
def lenient(bucket, control):
    """A bucket whose server ignores If-Match and If-None-Match, and refuses DeleteObjects."""
    control.bucket(bucket.name, {"ignores_conditions": True, "no_bulk_delete": True})
    s3 = dataclasses.replace(bucket.config.s3, conditional_writes=False)
    return bucket._replace(config=dataclasses.replace(bucket.config, s3=s3))


@pytest.mark.parametrize(
    ("endpoint", "conditional"),
    [
        ("https://storage.googleapis.com", False),
        ("https://me-west1.storage.googleapis.com", False),
        ("https://storage.googleapis.com.example.org", True),
    ],
)
def test_the_endpoint_determines_whether_writes_are_conditional(endpoint, conditional):
    config = StoreConfig(
        s3=S3Options(endpoint_url=endpoint, anonymous=True),
        max_attempts=1,
        advanced=torchobj.AdvancedOptions(connect_timeout_s=0.1),
    )
    with pytest.raises(exceptions.StoreError) as raised:
        Store("s3://bucket/", config=config).put("k", b"", overwrite=False)
    assert isinstance(raised.value, exceptions.UnsupportedError) != conditional


def test_conditions_are_refused_instead_of_ignored(lenient):
    store = Store(lenient.url, config=lenient.config)
    version = store.put("k", b"one")
    for condition in ({"overwrite": False}, {"if_version": version}):
        with pytest.raises(exceptions.UnsupportedError):
            store.put("k", b"two", **condition)
    with pytest.raises(exceptions.UnsupportedError):
        store.delete("k", if_version=version)
    assert lenient.body("k") == b"one"


def test_several_objects_are_deleted_one_by_one(lenient):
    store = Store(lenient.url, config=lenient.config)
    for key in "abc":
        store.put(key, b"")
    store.delete(["a", "b"])
    assert lenient.keys() == ["c"]


def test_a_checkpoint_manager_compares_versions_itself(lenient, caplog):
    first, second = (CheckpointManager(f"{lenient.url}/run", config=lenient.config) for _ in range(2))
    with caplog.at_level(logging.WARNING):
        first.save(1, {"x": torch.ones(3)})
    assert "does not support conditional writes" in caplog.text
    with pytest.raises(exceptions.CheckpointError):
        second.save(1, {"x": torch.zeros(3)})
    assert torch.equal(second.restore()["x"], torch.ones(3))
    first.close()
    second.close()


def test_a_file_is_uploaded_in_parts_and_read(lenient):
    body = bytes(range(256)) * 80_000
    with torchobj.open(f"{lenient.url}/k", "wb", config=lenient.config) as file:
        file.write(body)
    assert lenient.body("k") == body
