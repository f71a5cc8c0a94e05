"""The fsspec file system on real servers, and libraries that open URLs through it."""

import dataclasses

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.strict.control import FaultAction
from torchobj import exceptions
from torchobj.fsspec import register

pytestmark = pytest.mark.providers("s3", "gs")

NAMES = ["epoch=1-step=8.ckpt", "a b+c%20é#?&.txt", "deep/er/k", "deep/er k"]


@pytest.fixture
def files(bucket):
    return bucket.files


def test_names_are_kept_unchanged(any_bucket):
    files = any_bucket.files
    for name in NAMES:
        files.pipe(f"{any_bucket.url}/run 1/{name}", name.encode())
    folder = f"{any_bucket.name}/run 1"
    assert files.find(f"{any_bucket.url}/run 1") == sorted(f"{folder}/{name}" for name in NAMES)
    assert files.ls(folder, detail=False) == sorted(f"{folder}/{name}" for name in ["deep", *NAMES[:2]])
    for name in NAMES:
        assert files.cat(f"{folder}/{name}") == any_bucket.body(f"run 1/{name}") == name.encode()
        assert files.modified(f"{folder}/{name}").tzinfo is not None
    files.mv(f"{folder}/deep", f"{folder}/moved", recursive=True)
    files.rm(f"{folder}/{NAMES[0]}")
    assert any_bucket.keys() == sorted(f"run 1/{name}" for name in [NAMES[1], "moved/er/k", "moved/er k"])
    files.rm(folder, recursive=True)
    assert any_bucket.keys() == []
    assert not files.exists(folder)


def test_large_files_are_written_in_parts_and_read_back(bucket, files):
    data = bytes(range(256)) * (80 << 10)
    with files.open(f"{bucket.url}/large", "wb") as file:
        file.write(data)
    with files.open(f"{bucket.url}/large", "ab") as file:
        file.write(b"end")
    with files.open(f"{bucket.url}/large") as file:
        assert file.read() == data + b"end"
    assert bucket.uploads() == []


def test_an_append_does_not_replace_what_another_writer_wrote_meanwhile(bucket, files):
    for name, old in (("new", None), ("present", b"old")):
        if old is not None:
            bucket.write(name, old)
        file = files.open(f"{bucket.url}/{name}", "ab")
        file.write(b"end")
        bucket.write(name, b"of another writer")
        with pytest.raises(exceptions.PreconditionFailedError):
            file.close()
        assert bucket.body(name) == b"of another writer"
    file = files.open(f"{bucket.url}/present", "ab")
    bucket.remove("present")
    with pytest.raises(exceptions.StoreError):
        file.close()
    assert bucket.keys() == ["new"] and bucket.uploads() == []


@pytest.mark.parametrize("action", [{"status": 403, "code": "AccessDenied"}, {"status": 400, "code": "InvalidRequest"}])
def test_a_failed_lookup_is_not_reported_as_absence(bucket, files, control, action: FaultAction):
    files.pipe(f"{bucket.url}/k", b"x")
    control.faults({"operation": "HeadObject", "action": action})
    for ask in (files.exists, files.isfile):
        with pytest.raises(exceptions.StoreError):
            ask(f"{bucket.url}/k")
    control.faults({"operation": "ListObjectsV2", "action": action})
    with pytest.raises(exceptions.StoreError):
        files.isdir(f"{bucket.url}/k")


def test_the_store_decides_an_exclusive_create(bucket, files):
    url = f"{bucket.url}/k"
    with pytest.raises(FileExistsError), files.open(url, "xb") as file:
        file.write(b"late")
        files.pipe(url, b"first", mode="create")
    assert files.cat(url) == b"first"
    with pytest.raises(FileExistsError):
        files.pipe(url, b"second", mode="create")


def test_a_missing_bucket_is_not_found(bucket):
    files = type(bucket.files)(dataclasses.replace(bucket.config, max_attempts=1))
    assert not files.exists(f"{bucket.url}-missing/k")
    with pytest.raises(FileNotFoundError):
        files.ls(f"{bucket.url}-missing")


@pytest.mark.filterwarnings("ignore:fsync not supported for this stream")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_torchs_distributed_checkpoint_takes_urls_of_a_registered_scheme(bucket, fsspec_registry):
    register(config=bucket.config)
    state = {"weight": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(7)}
    dcp.save(state, checkpoint_id=f"{bucket.url}/step 7", no_dist=True)
    assert bucket.keys() == ["step 7/.metadata", "step 7/__0_0.distcp"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=f"{bucket.url}/step 7", no_dist=True)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    with fsspec.open(f"{bucket.url}/step 7/.metadata") as file:
        assert file.read() == bucket.body("step 7/.metadata")


@pytest.mark.parametrize("recursive", [False, True])
def test_removing_from_a_bucket_that_does_not_exist_is_an_error(any_bucket, recursive):
    if any_bucket.url.startswith("gs:") and any_bucket.server.token is None and not recursive:
        pytest.skip("fake-gcs-server returns the same error for a missing object")
    files = type(any_bucket.files)(dataclasses.replace(any_bucket.config, max_attempts=1))
    for path in (f"{any_bucket.url}-missing", f"{any_bucket.url}-missing/k"):
        with pytest.raises(FileNotFoundError):
            files.rm(path, recursive=recursive)
    files.pipe(f"{any_bucket.name}/k", b"x")
    with pytest.raises(exceptions.UnsupportedError, match="whole bucket"):
        files.rm(any_bucket.name, recursive=recursive)
    assert any_bucket.keys() == ["k"]


def test_the_total_of_a_transfer_comes_with_its_first_response(bucket, files, control, tmp_path):
    files.pipe(f"{bucket.url}/k", b"x" * 100)
    control.clear_requests()
    with files.open(f"{bucket.url}/k") as file:
        assert file.size == 100
        assert file.read() == b"x" * 100
    assert len(control.requests()) <= 2
