"""`progress=` of saves, loads and listings: what it receives, its bar, and an exception that it raises."""

import threading

import pytest
import torch

import torchobj
from tests.support.managers import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.files import Progress

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

MIB = 1 << 20


class StopError(Exception):
    pass


class Seen(list):
    """What a `progress` callable received, and in which threads."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def __call__(self, progress):
        self.append(progress)
        self.threads.add(threading.get_ident())

    def is_complete(self, size):
        """Whether the bytes never went back, never exceeded the total, and ended with it."""
        done = [progress.bytes_done for progress in self]
        within = all(progress.bytes_done <= progress.bytes_total for progress in self)
        return within and done == sorted(done) and self[-1] == Progress(1, 1, size, size, 0)


def stop(progress):
    raise StopError


def stop_later(progress):
    """Raises when something has arrived, and not all."""
    if 0 < progress.bytes_done < progress.bytes_total:
        raise StopError


@pytest.fixture
def state():
    return {"weight": torch.arange(5 * MIB, dtype=torch.int32), "bias": torch.ones(100), "empty": torch.ones(0)}


def test_save_and_load_report_all_bytes_in_the_calling_thread(bucket, config, state):
    url, saving, loading, filling = f"{bucket.url}/s.pt", Seen(), Seen(), Seen()
    saved = torchobj.save(state, url, config=config, progress=saving)
    torchobj.save(state, f"{bucket.url}/without.pt", config=config)
    assert torchobj.get(url, config=config) == torchobj.get(f"{bucket.url}/without.pt", config=config)
    assert saving.is_complete(saved.size) and len(saving) > 3
    loaded = torchobj.load(url, config=config, progress=loading)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torchobj.load(url, into=zeros, config=config, progress=filling)
    for found in (loaded, zeros):
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    tensors = sum(tensor.nbytes for tensor in state.values())
    assert loading.is_complete(tensors) and filling.is_complete(tensors)
    assert saving.threads | loading.threads | filling.threads == {threading.get_ident()}


def test_the_bytes_of_a_running_load_are_reported(bucket, config, control, state):
    torchobj.save(state, f"{bucket.url}/s.pt", config=config)
    control.faults({"operation": "GetObject", "times": 1, "skip": 3, "action": {"delay_first_byte_s": 0.5}})
    seen = Seen()
    torchobj.load(f"{bucket.url}/s.pt", config=config, progress=seen)
    assert any(0 < progress.bytes_done < progress.bytes_total for progress in seen)


def test_an_exception_of_progress_ends_a_save_and_leaves_nothing(bucket, config, state):
    for when in (stop, stop_later):
        with pytest.raises(StopError):
            torchobj.save(state, f"{bucket.url}/s.pt", config=config, progress=when)
    assert (bucket.keys(), bucket.uploads()) == ([], [])
    torchobj.save(state, f"{bucket.url}/s.pt", config=config)
    assert bucket.keys() == ["s.pt"]


def test_an_exception_of_progress_ends_a_load(bucket, config, control, state):
    url = f"{bucket.url}/s.pt"
    torchobj.save(state, url, config=config)
    control.faults({"operation": "GetObject", "action": {"delay_first_byte_s": 0.3}})
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for settings in ({}, {"into": into}):
        with pytest.raises(StopError):
            torchobj.load(url, config=config, progress=stop, **settings)
    assert torch.equal(torchobj.load(url, config=config, into=into)["weight"], state["weight"])


def test_a_manager_reports_saves_and_restores(manager, state):
    saving, later, restoring, whole = Seen(), Seen(), Seen(), Seen()
    manager.save(1, state, progress=saving)
    manager.save_async(2, state, progress=later).result()
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()} | {"bias": None}
    assert torch.equal(manager.restore(into=into, progress=restoring)["bias"], state["bias"])
    manager.restore(progress=whole)
    tensors = sum(tensor.nbytes for tensor in state.values())
    assert saving.is_complete(saving[-1].bytes_done) and later.is_complete(saving[-1].bytes_done)
    assert whole.is_complete(tensors) and restoring[-1] == Progress(1, 1, tensors, tensors, 0)


def test_an_exception_of_progress_ends_a_save_of_a_manager(manager, bucket, state):
    for save in (manager.save, lambda *args, **more: manager.save_async(*args, **more).result()):
        with pytest.raises(StopError):
            save(1, state, progress=stop_later)
    assert (manager.steps(), bucket.keys(), bucket.uploads()) == ([], [], [])
    manager.save(1, state)
    with pytest.raises(StopError):
        manager.restore(progress=stop)
    assert torch.equal(manager.restore()["weight"], state["weight"])


def test_a_listing_into_a_manifest_reports_its_objects(bucket):
    for number in range(5):
        bucket.write(f"train/{number}", bytes(number))
    url, seen = f"{bucket.url}/train/", Seen()
    found = torchobj.Manifest.from_prefix(url, config=bucket.config, progress=seen)
    assert found == torchobj.Manifest.from_prefix(url, config=bucket.config)
    assert seen[-1] == Progress(5, 5, 10, 10, 0)
    with pytest.raises(StopError):
        torchobj.Manifest.from_prefix(url, config=bucket.config, progress=stop)


def test_true_shows_a_bar_and_false_nothing(bucket, config, state, capfd):
    torchobj.save(state, f"{bucket.url}/s.pt", config=config, progress=False)
    assert capfd.readouterr().err == ""
    torchobj.load(f"{bucket.url}/s.pt", config=config, progress=True)
    assert "21.0 of 21.0 MB, 1 of 1 files" in capfd.readouterr().err


@pytest.mark.parametrize("progress", [1, "bar"])
def test_what_is_no_progress_is_refused_before_anything_is_sent(bucket, manager, progress):
    refused = pytest.raises(exceptions.ConfigError, match="must be True, or a callable")
    with refused:
        torchobj.save({}, f"{bucket.url}/s.pt", config=bucket.config, progress=progress)
    with refused:
        torchobj.load(f"{bucket.url}/s.pt", config=bucket.config, progress=progress)
    with refused:
        manager.save(1, {}, progress=progress)
    assert bucket.keys() == []
