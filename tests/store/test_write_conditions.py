"""Conditional writes: an existing object is replaced unless that is forbidden or its version differs."""

import pytest
import torch

import torchobj
from torchobj import exceptions
from torchobj.s3torchconnector.names import S3Checkpoint

pytestmark = pytest.mark.providers("s3", "gs")

STATES = [{"x": torch.full((size,), float(size))} for size in (3, 3_000_000)]


def save(bucket, value, **condition):
    return torchobj.save(value, f"{bucket.url}/k.pt", config=bucket.config, **condition)


def write(bucket, data, **condition):
    with torchobj.open(f"{bucket.url}/k", "wb", config=bucket.config, **condition) as file:
        file.write(data)
    return file.version


@pytest.mark.parametrize("state", STATES, ids=["small", "large"])
def test_a_file_is_saved_if_its_condition_holds(any_bucket, state):
    first = save(any_bucket, state, overwrite=False)
    with pytest.raises(exceptions.PreconditionFailedError):
        save(any_bucket, {"x": 2}, overwrite=False)
    second = save(any_bucket, {"x": 2}, if_version=first.version)
    with pytest.raises(exceptions.PreconditionFailedError):
        save(any_bucket, state, if_version=first.version)
    assert torchobj.load(f"{any_bucket.url}/k.pt", config=any_bucket.config) == {"x": 2}
    assert save(any_bucket, {"x": 3}).version != second.version


def check_written(bucket, size):
    first = write(bucket, bytes(size), overwrite=False)
    with pytest.raises(exceptions.PreconditionFailedError):
        write(bucket, b"two", overwrite=False)
    write(bucket, b"two", if_version=first)
    with pytest.raises(exceptions.PreconditionFailedError):
        write(bucket, bytes(size), if_version=first)
    assert bucket.body("k") == b"two"
    assert bucket.uploads() == []


def test_a_file_is_written_if_its_condition_holds(any_bucket):
    check_written(any_bucket, 3)


def test_a_multipart_file_is_written_if_its_condition_holds(bucket):
    # moto does not check the version when a multipart upload is completed.
    check_written(bucket, 12_000_000)


@pytest.mark.providers("s3")
def test_the_class_of_s3torchconnector_accepts_conditions(bucket):
    checkpoint = S3Checkpoint(config=bucket.config)
    with checkpoint.writer(f"{bucket.url}/k", overwrite=False) as writer:
        writer.write(b"one")
    with (
        pytest.raises(exceptions.PreconditionFailedError),
        checkpoint.writer(f"{bucket.url}/k", if_version='"other"') as writer,
    ):
        writer.write(b"two")
    assert bucket.body("k") == b"one"


def test_if_version_with_overwrite_false_is_refused():
    with pytest.raises(exceptions.ConfigError, match="if_version='1'"):
        torchobj.save({}, "memory://conditions/k", if_version="1", overwrite=False)
    with pytest.raises(exceptions.ConfigError, match="if_version='1'"):
        torchobj.ObjectWriter("memory://conditions/k", if_version="1", overwrite=False)


@pytest.mark.parametrize("condition", [{"overwrite": False}, {"if_version": "1"}])
def test_a_write_condition_is_refused_for_reading(condition):
    with pytest.raises(exceptions.ConfigError, match="exclude each other"):
        torchobj.open("memory://conditions/k", "rb", **condition)
