"""`torchobj.stream_tensors`: every tensor once, bounded memory in flight, and an end at any time."""

import threading
import time
import weakref

import pytest
import torch

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint.safetensors import stream

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

STATE = {f"layer.{number}": torch.full((1000 + number,), number) for number in range(20)} | {"empty": torch.ones(0)}


@pytest.fixture
def url(request):
    url = f"memory://{request.node.name.partition('[')[0][:60].replace('_', '-')}/m.safetensors"
    torchobj.save(STATE, url)
    return url


def test_every_tensor_is_yielded_once_with_its_own_memory(url):
    found = list(torchobj.stream_tensors(url))
    assert sorted(name for name, _ in found) == sorted(STATE)
    for name, tensor in found:
        assert torch.equal(tensor, STATE[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.zero_()
    assert all(torch.equal(tensor, STATE[name]) for name, tensor in torchobj.stream_tensors(url, device="cpu"))


def test_files_folders_and_keys_are_combined(url):
    folder = url.replace("m.safetensors", "f/")
    torchobj.save({"a": torch.ones(3), "b": torch.ones(4)}, folder, format="safetensors", max_shard_bytes=16)
    assert dict(torchobj.stream_tensors([folder, url])).keys() == {*STATE, "a", "b"}
    found = dict(torchobj.stream_tensors([folder, url], keys=["b", "layer.3"]))
    assert found.keys() == {"b", "layer.3"}
    with pytest.raises(exceptions.ConfigError, match=r"f/, .*m\.safetensors: keys: there is no entry 'layer.99'"):
        next(torchobj.stream_tensors([folder, url], keys=["layer.99", "a"]))
    assert not list(torchobj.stream_tensors([]))


def test_a_tensor_of_two_files_is_an_error(url):
    with pytest.raises(exceptions.CheckpointError, match=r"m\.safetensors: .*: is also in memory://"):
        next(torchobj.stream_tensors([url, url]))
    with pytest.raises(exceptions.ConfigError, match="tensors on meta have no values"):
        next(torchobj.stream_tensors(url, device="meta"))


@pytest.fixture
def started(monkeypatch):
    """The names of the groups whose reads have started, and the limits of a small machine."""
    started = []
    read = stream._read

    def counted(group, *given):
        started.extend(stored.name for _, stored in group)
        return read(group, *given)

    monkeypatch.setattr(stream, "_read", counted)
    monkeypatch.setattr(stream, "_GROUP_BYTES", 9000)
    monkeypatch.setattr(stream, "_IN_FLIGHT_BYTES", 30_000)
    return started


def test_reading_pauses_while_the_caller_does_not_ask(url, started):
    tensors = torchobj.stream_tensors(url)
    assert not started
    seen = 0
    for _, tensor in tensors:
        seen += tensor.nbytes
        sizes = sum(STATE[name].nbytes for name in started)
        assert sizes <= seen + 30_000
    assert sorted(started) == sorted(STATE)


def test_a_tensor_larger_than_the_limit_is_read_alone(url, started, monkeypatch):
    monkeypatch.setattr(stream, "_IN_FLIGHT_BYTES", 10)
    seen = 0
    for seen, _ in enumerate(torchobj.stream_tensors(url), 1):
        assert len(started) <= seen + 1
    assert seen == len(STATE)


def test_dropped_tensors_are_freed_one_by_one(url):
    references = []
    for _, tensor in torchobj.stream_tensors(url):
        assert sum(reference() is not None for reference in references) <= 1
        references.append(weakref.ref(tensor))
        del tensor
    assert len(references) == len(STATE)


def test_closing_the_iterator_ends_the_reads(bucket, config, control, monkeypatch):
    monkeypatch.setattr(stream, "_GROUP_BYTES", 4 << 20)
    tensors = {f"layer.{number}": torch.ones(1 << 20) for number in range(6)}
    torchobj.save(tensors, f"{bucket.url}/m.safetensors", config=config)
    # The header, and a tensor.
    control.faults({"operation": "GetObject", "skip": 2, "action": {"stall_body_at": 100, "stall_s": 60}})
    iterator = torchobj.stream_tensors(f"{bucket.url}/m.safetensors", config=config)
    next(iterator)
    started = time.monotonic()
    iterator.close()
    assert time.monotonic() - started < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchobj-stream")]


def test_faults_are_survived_and_a_replaced_file_is_an_error(bucket, config, control, monkeypatch):
    monkeypatch.setattr(stream, "_GROUP_BYTES", 4 << 20)
    monkeypatch.setattr(stream, "_IN_FLIGHT_BYTES", 8 << 20)
    url = f"{bucket.url}/m.safetensors"
    tensors = {f"layer.{number}": torch.full((1 << 20,), number) for number in range(6)}
    torchobj.save(tensors, url, config=config)
    control.faults({"operation": "GetObject", "skip": 1, "times": 3, "action": {"cut_body": 0.5, "reset": True}})
    found = dict(torchobj.stream_tensors(url, config=config))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    control.clear_faults()
    iterator = torchobj.stream_tensors(url, config=config)
    next(iterator)
    torchobj.save({"layer.0": torch.ones(1)}, url, config=config)
    with pytest.raises(exceptions.ObjectChangedError):
        list(iterator)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_arrive_on_a_gpu(url):
    for name, tensor in torchobj.stream_tensors(url, device="cuda"):
        assert tensor.is_cuda and torch.equal(tensor.cpu(), STATE[name])


def streamed(rank, url, config):
    torch.distributed.init_process_group("gloo")
    found = dict(torchobj.stream_tensors(url, config=config, share="host"))
    iterator = torchobj.stream_tensors(url, config=config, share="host")
    next(iterator)
    iterator.close()
    return {name: tensor.sum().item() for name, tensor in found.items()}


@pytest.mark.providers("s3")
def test_ranks_read_every_byte_once_for_all_of_them(bucket, config, control, monkeypatch):
    monkeypatch.setattr(stream, "_GROUP_BYTES", 4 << 20)
    monkeypatch.setattr(stream, "_IN_FLIGHT_BYTES", 8 << 20)
    tensors = {f"layer.{number}": torch.full((1 << 20,), float(number)) for number in range(6)}
    url = f"{bucket.url}/m.safetensors"
    torchobj.save(tensors, url, config=config)
    control.clear_requests()
    sums = {name: tensor.sum().item() for name, tensor in tensors.items()}
    assert run_ranks(streamed, url, config) == [sums, sums]
    sent = sum(request.bytes_sent for request in control.requests("GetObject"))
    # The start of the file is read by each rank, twice; the second pass ends after its first groups.
    assert sent <= 24 * 1.02 * (1 << 20) + 4 * (512 << 10) + (16 << 20)
