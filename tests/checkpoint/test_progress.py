"""`progress=` of saves, loads and listings: what it receives, its bar, and an exception that it raises."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.files import Progress

pytestmark = [
    pytest.mark.providers("s3", GCS_IN_MATRIX),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

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


def test_the_bytes_of_a_state_shard_are_reported(bucket, config, state):
    url, saving, loading = f"{bucket.url}/step", Seen(), Seen()
    # Values that are pickled, a copy, and memory that is sent as it is.
    state |= {"step": 7, "transposed": torch.ones(300, 200).T}
    dcp.save(state, storage_writer=StorageWriter(url, progress=saving, config=config))
    into = {name: torch.zeros_like(value) if torch.is_tensor(value) else 0 for name, value in state.items()}
    dcp.load(into, storage_reader=StorageReader(url, progress=loading, config=config))
    assert into["step"] == 7 and torch.equal(into["weight"], state["weight"])
    assert torch.equal(into["transposed"], state["transposed"])
    size = saving[-1].bytes_done
    assert saving.is_complete(size) and len(saving) > 3 and loading.is_complete(loading[-1].bytes_done)
    assert min(size, loading[-1].bytes_done) > sum(value.nbytes for value in state.values() if torch.is_tensor(value))
    assert saving.threads | loading.threads == {threading.get_ident()}
    # The files are those of a save without it.
    dcp.save(state, storage_writer=StorageWriter(f"{bucket.url}/without", config=config))
    files = [key for key in sorted(bucket.keys()) if key.endswith(".distcp")]
    contents = [torchobj.get(f"{bucket.url}/{key}", config=config) for key in files]
    assert len(contents) >= 2 and contents[: len(contents) // 2] == contents[len(contents) // 2 :]


def test_the_bytes_of_a_running_load_of_a_state_shard_are_reported(bucket, config, control, state):
    url, seen = f"{bucket.url}/step", Seen()
    dcp.save(state, storage_writer=StorageWriter(url, config=config))
    control.faults({"operation": "GetObject", "times": 1, "skip": 3, "action": {"delay_first_byte_s": 0.5}})
    dcp.load(state, storage_reader=StorageReader(url, progress=seen, config=config))
    assert any(0 < progress.bytes_done < progress.bytes_total for progress in seen)


def test_an_exception_of_progress_ends_the_save_of_a_state_shard(bucket, config, state):
    with pytest.raises(dcp.api.CheckpointException, match="StopError"):
        dcp.save(state, storage_writer=StorageWriter(f"{bucket.url}/step", progress=stop_later, config=config))
    assert (bucket.keys(), bucket.uploads()) == ([], [])


def test_a_manager_of_state_shards_reports_saves_and_restores(bucket, config, state):
    saving, later, restoring = Seen(), Seen(), Seen()
    with torchobj.CheckpointManager(f"{bucket.url}/run", sharded=True, config=config) as manager:
        manager.save(1, state, progress=saving)
        manager.save_async(2, state, progress=later).result()
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        manager.restore(into=into, progress=restoring)
        with pytest.raises(StopError):
            manager.save(3, state, progress=stop_later)
        assert manager.steps() == [1, 2]
    assert torch.equal(into["weight"], state["weight"])
    size = saving[-1].bytes_done
    assert size > state["weight"].nbytes and saving.is_complete(size) and later.is_complete(size)
    # Values are read before tensors, in two loads.
    assert restoring[-1] == Progress(1, 1, *[restoring[-1].bytes_done] * 2, 0)
    assert sum(progress.files_done for progress in restoring) == 1


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
    for storage in (StorageWriter, StorageReader):
        with refused:
            storage(bucket.url, progress=progress)
    assert bucket.keys() == []
