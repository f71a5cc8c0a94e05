"""The file system for fsspec on a real S3, and what opens `s3://` through it."""

import dataclasses

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.servers.strict.control import FaultAction
from torchobj import exceptions
from torchobj.fsspec import ObjectFileSystem, register

NAMES = ["epoch=1-step=8.ckpt", "a b+c%20é#?&.txt", "deep/er/k", "deep/er k"]


@pytest.fixture
def files(place):
    return ObjectFileSystem(place.config)


def test_names_are_kept_as_they_are(any_place):
    files = ObjectFileSystem(any_place.config)
    for name in NAMES:
        files.pipe(f"{any_place.url}/run 1/{name}", name.encode())
    folder = f"{any_place.bucket}/run 1"
    assert files.find(f"{any_place.url}/run 1") == sorted(f"{folder}/{name}" for name in NAMES)
    assert files.ls(folder, detail=False) == sorted(f"{folder}/{name}" for name in ["deep", *NAMES[:2]])
    for name in NAMES:
        assert files.cat(f"{folder}/{name}") == any_place.body(f"run 1/{name}") == name.encode()
        assert files.modified(f"{folder}/{name}").tzinfo is not None
    files.mv(f"{folder}/deep", f"{folder}/moved", recursive=True)
    files.rm(f"{folder}/{NAMES[0]}")
    assert any_place.keys() == sorted(f"run 1/{name}" for name in [NAMES[1], "moved/er/k", "moved/er k"])
    files.rm(folder, recursive=True)
    assert any_place.keys() == []
    assert not files.exists(folder)


def test_large_files_are_written_in_parts_and_read_back(place, files):
    data = bytes(range(256)) * (80 << 10)
    with files.open(f"{place.url}/large", "wb") as file:
        file.write(data)
    with files.open(f"{place.url}/large", "ab") as file:
        file.write(b"end")
    with files.open(f"{place.url}/large") as file:
        assert file.read() == data + b"end"
    assert place.uploads() == []


@pytest.mark.parametrize("action", [{"status": 403, "code": "AccessDenied"}, {"status": 400, "code": "InvalidRequest"}])
def test_a_look_that_fails_is_no_absence(place, files, control, action: FaultAction):
    files.pipe(f"{place.url}/k", b"x")
    control.faults({"operation": "HeadObject", "action": action})
    for ask in (files.exists, files.isfile):
        with pytest.raises(exceptions.StoreError):
            ask(f"{place.url}/k")
    control.faults({"operation": "ListObjectsV2", "action": action})
    with pytest.raises(exceptions.StoreError):
        files.isdir(f"{place.url}/k")


def test_an_exclusive_file_is_decided_by_the_store(place, files):
    url = f"{place.url}/k"
    with pytest.raises(FileExistsError), files.open(url, "xb") as file:
        file.write(b"late")
        files.pipe(url, b"first", mode="create")
    assert files.cat(url) == b"first"
    with pytest.raises(FileExistsError):
        files.pipe(url, b"second", mode="create")


def test_a_bucket_that_is_missing_holds_nothing(place):
    files = ObjectFileSystem(dataclasses.replace(place.config, max_attempts=1))
    assert not files.exists("s3://no-such-bucket-here/k")
    with pytest.raises(FileNotFoundError):
        files.ls("s3://no-such-bucket-here")


@pytest.mark.filterwarnings("ignore:fsync not supported for this stream")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_torchs_own_distributed_checkpoint_takes_a_url_once_it_is_registered(place):
    register(config=place.config)
    state = {"weight": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=f"{place.url}/step 7", no_dist=True)
    assert place.keys() == ["step 7/.metadata", "step 7/__0_0.distcp"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=f"{place.url}/step 7", no_dist=True)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    with fsspec.open(f"{place.url}/step 7/.metadata") as file:
        assert file.read() == place.body("step 7/.metadata")


@pytest.mark.parametrize("recursive", [False, True])
def test_removing_from_a_bucket_that_does_not_exist_is_an_error(any_place, recursive):
    files = ObjectFileSystem(dataclasses.replace(any_place.config, max_attempts=1))
    for path in ("s3://no-such-bucket-here", "s3://no-such-bucket-here/k"):
        with pytest.raises(FileNotFoundError):
            files.rm(path, recursive=recursive)
    files.pipe(f"{any_place.bucket}/k", b"x")
    with pytest.raises(exceptions.UnsupportedError, match="whole bucket"):
        files.rm(any_place.bucket, recursive=recursive)
    assert any_place.keys() == ["k"]


def test_the_total_of_a_transfer_is_asked_for_with_its_first_bytes(place, files, control, tmp_path):
    files.pipe(f"{place.url}/k", b"x" * 100)
    control.forget_requests()
    with files.open(f"{place.url}/k") as file:
        assert file.size == 100
        assert file.read() == b"x" * 100
    assert len(control.requests()) <= 2
