"""Files of safetensors in a store: how many requests they take, and one version of each."""

import pytest
import torch

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.checkpoint.safetensors import file as files
from torchobj.checkpoint.safetensors.file import SafetensorsFile, TensorRead, read
from torchobj.store.file_objects import store_of
from torchobj.store.transfers import ByteProgress

safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

GETS = ("GetObject", "objects.get")


def opened(bucket, key="m.safetensors"):
    parsed, store = store_of(f"{bucket.url}/{key}", bucket.config)
    return SafetensorsFile(store, parsed.key, str(parsed))


def content(file, name):
    """The bytes of a tensor, read from the store."""
    stored = file.tensors[name]
    target = torch.zeros(stored.end - stored.start, dtype=torch.uint8)
    read([TensorRead(file, stored.start, target)], ByteProgress(None))
    return bytes(target.numpy())


def test_one_request_reads_the_header_of_a_large_file(bucket, control):
    tensors = {"a": torch.arange(1 << 20), "b": torch.ones(3)}
    bucket.write("m.safetensors", safetensors.save(tensors, {"format": "pt"}))
    control.clear_requests()
    file = opened(bucket)
    assert len(control.requests()) == 1
    assert file.metadata == {"format": "pt"}
    assert list(file.tensors) == ["a", "b"]
    control.clear_requests()
    assert content(file, "b") == bytes(tensors["b"].numpy())
    assert content(file, "a") == bytes(tensors["a"].numpy())
    assert sum(request.bytes_sent for request in control.requests()) < 9 << 20


def test_a_header_that_is_longer_than_the_first_range_is_read_by_a_second_request(bucket, control, monkeypatch):
    monkeypatch.setattr(files, "_FIRST_BYTES", 1000)
    tensors = {f"layer.{number}.weight": torch.full((10,), number) for number in range(100)}
    bucket.write("m.safetensors", safetensors.save(tensors))
    control.clear_requests()
    file = opened(bucket)
    assert len(control.requests()) == 2
    assert content(file, "layer.7.weight") == bytes(tensors["layer.7.weight"].numpy())


def test_a_small_file_is_read_whole_with_its_header(bucket, control):
    tensors = {"a": torch.arange(100), "empty": torch.ones(0)}
    bucket.write("m.safetensors", safetensors.save(tensors))
    file = opened(bucket)
    control.clear_requests()
    assert content(file, "a") == bytes(tensors["a"].numpy())
    assert content(file, "empty") == b""
    assert not control.requests()


@pytest.mark.parametrize("body", [b"", b"\0" * 7, b"PK\x03\x04" + bytes(100)])
def test_an_object_that_is_no_file_of_safetensors_is_refused_with_its_url(bucket, body):
    bucket.write("m.safetensors", body)
    with pytest.raises(
        exceptions.CheckpointError, match=f"^{bucket.url}/m.safetensors: it is not a file of safetensors"
    ):
        opened(bucket)


def test_a_damaged_header_is_refused_with_the_url(bucket):
    data = safetensors.save({"a": torch.ones(2)})
    bucket.write("m.safetensors", data.replace(b"[0,8]", b"[0,9]"))
    with pytest.raises(exceptions.CheckpointError, match=f"^{bucket.url}/m.safetensors: its header is damaged: 'a'"):
        opened(bucket)


@pytest.mark.parametrize("count", [10, 1 << 20])
def test_a_file_that_is_replaced_after_its_header_was_read_is_an_error(bucket, count, monkeypatch):
    monkeypatch.setattr(files, "_FIRST_BYTES", 100)
    bucket.write("m.safetensors", safetensors.save({"a": torch.zeros(count)}))
    file = opened(bucket)
    bucket.write("m.safetensors", safetensors.save({"a": torch.ones(count)}))
    with pytest.raises(exceptions.ObjectChangedError, match=r"m\.safetensors"):
        content(file, "a")


def test_a_missing_file_is_an_error(bucket):
    with pytest.raises(exceptions.ObjectNotFoundError):
        opened(bucket)


@pytest.mark.parametrize("action", [{"cut_body": 0.5, "reset": True}, {"cut_body": 100}, {"status": 503}])
def test_faults_of_the_header_and_of_the_body_are_survived(bucket, control, config, action):
    tensors = {"a": torch.arange(3 << 20), "b": torch.ones(5)}
    torchobj.save(tensors, f"{bucket.url}/m.safetensors", config=config)
    # The header's request, and two of the tensors'.
    control.faults(
        {"operation": "GetObject", "times": 1, "action": action},
        {"operation": "GetObject", "skip": 1, "times": 2, "action": action},
    )
    loaded = torchobj.load(f"{bucket.url}/m.safetensors", config=config)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert sum(rule["fired"] for rule in control.fault_report()) == 3
