"""The storage backend of torch_checkpointing: its own storage tests, checkpoints by its public API, and faults.

The tests of torch_checkpointing 0.1.1 for a storage are in its `tests/test_local_filesystem.py`. Those below `TestStorage`
have their names; paths are relative to a folder that the configuration holds, and files are looked at by the storage, as
not all stores have files of a disk. Left out are:

- `test_write_fails_if_parent_dir_not_created`: stores have no folders, so a write needs no `mkdir`
  (`test_a_folder_exists_with_its_first_file`).
- The parts of `test_local_filesystem`, `test_rename_directory_replaces_empty_destination` and
  `test_rename_file_rejects_directory_destination` that look at an empty folder, which cannot exist, for the same reason.
- `test_rename_*_across_filesystems_*`: they make `os.rename` fail, so that a rename copies. Here each rename copies.
- `test_direct_io_*`: they are of O_DIRECT, which is of local disks.
"""

import array
import io
import json
import multiprocessing
import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

torch_checkpointing = pytest.importorskip("torch_checkpointing", reason="not installed; it needs torch 2.11")

from safetensors.torch import load as load_safetensors  # noqa: E402
from torch_checkpointing import CheckpointManager, ItemSpec  # noqa: E402
from torch_checkpointing.checkpoint_layout import (  # noqa: E402
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
)
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig  # noqa: E402
from torch_checkpointing.default_resharder import DefaultResharder  # noqa: E402
from torch_checkpointing.staging import CheckpointStagerConfig  # noqa: E402
from torch_checkpointing.storage.base_storage import ReadArgs  # noqa: E402
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: E402
from torch_checkpointing.storage.torch_serialization import load_torch_serialized_from_storage  # noqa: E402

from tests.support import killing  # noqa: E402
from tests.support.long_tables import often  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from torchobj import Store, exceptions  # noqa: E402
from torchobj.torch_checkpointing import ObjectStorage, ObjectStorageConfig  # noqa: E402

STORES = ["memory", "file", "s3", "gs"]


@pytest.fixture
def config(request, tmp_path):
    """The configuration of a storage in an empty folder."""
    kind = request.param
    if kind == "memory":
        return ObjectStorageConfig(f"memory://{tmp_path.name}-{random.getrandbits(64)}/a/run")
    if kind == "file":
        return ObjectStorageConfig(f"file://{tmp_path}/run")
    bucket = request.getfixturevalue("bucket" if kind == "s3" else "gcs_bucket")
    return ObjectStorageConfig(f"{bucket.url}/a/run", bucket.config)


@pytest.fixture
def storage(config):
    return config.create_storage()


everywhere = pytest.mark.parametrize("config", STORES, indirect=True)
in_memory = pytest.mark.parametrize("config", ["memory"], indirect=True)
in_s3 = pytest.mark.parametrize("config", ["s3"], indirect=True)


@everywhere
class TestStorage:
    """The tests of torch_checkpointing."""

    def test_local_filesystem(self, storage):
        parts = [
            b"Hello bytes! ",
            bytearray(b"Hello bytearray! "),
            np.array([1, 2, 3, 4, 5], dtype=np.int32),
            torch.tensor([10, 20, 30, 40, 50], dtype=torch.int32).numpy(),
            array.array("i", [100, 200, 300, 400, 500]),
        ]
        expected = b"".join(bytes(part) for part in parts)
        one, two = Path("dir_level1"), Path("dir_level1/dir_level2")
        storage.mkdir(one, recursive=True)
        storage.mkdir(two, recursive=True)
        storage.write(one / "write_output.bin", expected)
        with storage.stream_write(two / "stream_write_output.bin") as stream:
            for part in parts:
                stream.write(part)
        for path in (one / "write_output.bin", two / "stream_write_output.bin"):
            assert storage.exists(path)
            assert storage.read(path) == expected
            assert storage.getsize(path) == len(expected)
        assert storage.ls(Path()) == ["dir_level1"]
        assert storage.ls(one) == ["dir_level2", "write_output.bin"]
        assert storage.ls(two) == ["stream_write_output.bin"]
        storage.rename(two / "stream_write_output.bin", two / "renamed_stream_write.bin")
        assert not storage.exists(two / "stream_write_output.bin")
        assert storage.exists(two / "renamed_stream_write.bin")
        assert storage.ls(two) == ["renamed_stream_write.bin"]
        storage.rmdir(two)
        storage.delete(one / "write_output.bin")
        assert not storage.exists(one / "write_output.bin")
        assert not storage.exists(one)
        assert not storage.exists(two)

    def test_rename_directory_onto_absent_destination(self, storage):
        storage.write(Path("src/payload.bin"), b"payload")
        storage.write(Path("src/sub/payload.bin"), b"payload 2")
        storage.rename(Path("src"), Path("dst"), is_directory=True)
        assert not storage.exists(Path("src"))
        assert storage.ls(Path()) == ["dst"]
        assert storage.ls(Path("dst")) == ["payload.bin", "sub"]
        assert storage.read(Path("dst/sub/payload.bin")) == b"payload 2"

    def test_rename_directory_replaces_empty_destination(self, storage):
        storage.write(Path("src/payload.bin"), b"payload")
        storage.mkdir(Path("dst"))
        storage.rename(Path("src"), Path("dst"), is_directory=True)
        assert not storage.exists(Path("src"))
        assert storage.ls(Path("dst")) == ["payload.bin"]

    def test_rename_directory_rejects_populated_destination(self, storage):
        storage.write(Path("src/payload.bin"), b"payload")
        storage.write(Path("dst/existing.bin"), b"existing")
        with pytest.raises(OSError, match="exists"):
            storage.rename(Path("src"), Path("dst"), is_directory=True)
        assert storage.ls(Path("src")) == ["payload.bin"]
        assert storage.ls(Path("dst")) == ["existing.bin"]

    def test_rename_directory_rejects_file_destination(self, storage):
        storage.write(Path("src/payload.bin"), b"payload")
        storage.write(Path("dst"), b"not a directory")
        with pytest.raises(OSError, match="exists"):
            storage.rename(Path("src"), Path("dst"), is_directory=True)
        assert storage.read(Path("dst")) == b"not a directory"

    def test_rename_file_rejects_directory_destination(self, storage):
        storage.write(Path("src.bin"), b"new")
        storage.write(Path("dst/existing.bin"), b"existing")
        with pytest.raises(OSError, match="exists"):
            storage.rename(Path("src.bin"), Path("dst"))
        assert storage.ls(Path("dst")) == ["existing.bin"]
        assert storage.read(Path("src.bin")) == b"new"

    def test_rename_file_replaces_existing_file(self, storage):
        storage.write(Path("src.bin"), b"new")
        storage.write(Path("dst.bin"), b"old")
        storage.rename(Path("src.bin"), Path("dst.bin"))
        assert not storage.exists(Path("src.bin"))
        assert storage.read(Path("dst.bin")) == b"new"


@everywhere
def test_a_folder_exists_with_its_first_file(storage):
    assert storage.isdir(Path())
    assert storage.ls(Path()) == []
    assert storage.glob("step-*") == []
    assert not storage.exists(Path("step-1"))
    with pytest.raises(FileNotFoundError, match="step-1"):
        storage.ls(Path("step-1"))
    storage.write(Path("step-1/a.bin"), b"a")
    storage.write(Path("step-10/b/c.bin"), b"b")
    assert storage.isdir(Path("step-10"))
    assert not storage.isdir(Path("step-1/a.bin"))
    assert storage.glob("step-*") == ["step-1", "step-10"]
    assert storage.glob("step-10/*") == ["step-10/b"]
    assert storage.glob("no folder/*") == []


@everywhere
def test_a_missing_file_raises(storage):
    for call in (storage.read, storage.getsize, storage.rmdir, lambda path: storage.rename(path, Path("other"))):
        with pytest.raises(FileNotFoundError):
            call(Path("step-1/missing"))
    with pytest.raises(FileNotFoundError):
        storage.stream_read(Path("missing"), ReadArgs(pre_read_full_file=False)).read()


@everywhere
def test_a_file_is_read_at_any_position_and_as_a_whole(storage):
    data = random.Random(7).randbytes(3 << 20)
    storage.write(Path("f"), memoryview(data))
    with storage.stream_read(Path("f"), ReadArgs(pre_read_full_file=False)) as stream:
        assert stream.seek(13) == 13
        piece = bytearray(1000)
        assert stream.readinto(piece) == 1000
        assert bytes(piece) == data[13:1013]
        assert stream.read() == data[1013:]
    with storage.stream_read(Path("f")) as stream:
        assert stream.read(5) == data[:5]
        assert stream.seek(-5, io.SEEK_END) == len(data) - 5
        assert stream.read() == data[-5:]


class InPieces(ObjectStorage):
    """A storage whose files are read by several streams."""

    mmap_fill_workers = 4
    mmap_fill_chunk_bytes = 1 << 18


@everywhere
@pytest.mark.parametrize("kind", [ObjectStorage, InPieces])
def test_torchs_file_is_loaded_from_one_stream_and_from_several(config, kind):
    storage, value = kind(config), {"a": torch.arange(1 << 18), "b": [torch.ones(3, dtype=torch.bfloat16), 5]}
    with storage.get_write_stream(Path("f.pt"), value) as stream:
        torch.save(value, stream)
    loaded = load_torch_serialized_from_storage(Path("f.pt"), storage)
    assert torch.equal(loaded["a"], value["a"])
    assert torch.equal(loaded["b"][0], value["b"][0])
    assert loaded["b"][1] == 5


@in_memory
@pytest.mark.parametrize(
    "path", ["/step-1", "..", "../other", "step-1/../../other", "s3:/bucket/step-1", "a\\b", "a\0b", "\udc80"]
)
def test_a_path_out_of_the_folder_is_refused_by_every_operation(config, path):
    storage, path = config.create_storage(), Path(path)
    Store(config.url.removesuffix("/run")).put("other/kept", b"kept")
    for call in (
        storage.stream_read,
        storage.stream_write,
        lambda path: storage.get_write_stream(path, 5),
        lambda path: storage.write(path, b""),
        storage.delete,
        storage.mkdir,
        storage.rmdir,
        lambda path: storage.rename(path, Path("new")),
        lambda path: storage.rename(Path("new"), path),
        storage.ls,
        storage.exists,
        storage.isdir,
        storage.getsize,
        storage.remap_path,
        lambda path: storage.glob(f"{path}/*"),
    ):
        with pytest.raises(exceptions.ConfigError, match="must be relative to memory://"):
            call(path)
    assert bytes(Store(config.url.removesuffix("/run")).get("other/kept")) == b"kept"


@in_memory
def test_the_folder_itself_is_neither_removed_nor_written(storage):
    storage.write(Path("step-1/f"), b"")
    for call in (storage.rmdir, storage.delete, storage.read, lambda path: storage.write(path, b"")):
        with pytest.raises(exceptions.ConfigError, match="is memory://.*the folder of the storage"):
            call(Path())
    with pytest.raises(exceptions.ConfigError, match="the folder of the storage"):
        storage.rename(Path("."), Path("new"), is_directory=True)
    assert storage.ls(Path()) == ["step-1"]
    assert storage.remap_path(Path()) + "/step-1" == storage.remap_path(Path("step-1"))


def test_a_url_of_no_store_is_refused_at_once():
    with pytest.raises(exceptions.ConfigError, match="not a URL"):
        ObjectStorageConfig("/nvme/run")


def test_no_empty_folder_of_a_disk_is_left(tmp_path):
    storage = ObjectStorageConfig(f"file://{tmp_path}/run").create_storage()
    storage.write(Path("tmp_step-1/raw/f"), b"")
    storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-1"]
    storage.rmdir(Path("step-1"))
    assert list((tmp_path / "run").iterdir()) == []


def test_nothing_behind_a_link_is_deleted(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_bytes(b"kept")
    storage = ObjectStorageConfig(f"file://{tmp_path}/run").create_storage()
    storage.write(Path("step-1/f"), b"")
    (tmp_path / "run" / "step-1" / "link").symlink_to(tmp_path / "other")
    storage.rmdir(Path("step-1"))
    assert (tmp_path / "other" / "kept").read_bytes() == b"kept"


def test_a_folder_behind_a_link_is_committed(tmp_path):
    for name in ("other", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "other")
    storage = ObjectStorageConfig(f"file://{tmp_path}/run").create_storage()
    storage.write(Path("link/tmp_step-1/f"), b"1")
    storage.rename(Path("link/tmp_step-1"), Path("link/step-1"), is_directory=True)
    assert storage.read(Path("link/step-1/f")) == b"1"
    assert storage.isdir(Path("link/step-1"))


# Checkpoints by the public API.


def layouts(items):
    """The layouts of items by their formats."""
    return {
        "table": ItemSpec(layout=LayoutInfo("table.json", JsonSerialization()), required=False),
        "raw": ItemSpec(layout=LayoutInfo("raw/{rank}.bin", RawSerialization()), required=False),
        "tensors": ItemSpec(
            layout=LayoutInfo("tensors_{rank}.safetensors", SafetensorsSerialization()), required=False
        ),
    } | items


def saved_state():
    generator = torch.Generator().manual_seed(7)
    shared = torch.randn(300, 1000, generator=generator)
    return {
        "model": {"weight": shared, "tied": shared, "view": shared.t(), "half": torch.ones(5, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "step": 7,
        "table": {"epoch": 3},
        "raw": b"raw bytes",
        "tensors": {"ema": torch.arange(10.0)},
    }


def zeros(state):
    """A state of the same structure without the values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros(value) for key, value in state.items()}
    return [zeros(value) for value in state] if isinstance(state, list) else type(state)()


def assert_equal(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


def manager_of(config, save=None, **items):
    return CheckpointManager(
        CheckpointManager.Config(items=layouts(items), storage_config=config, save=save or SyncCheckpointSaverConfig())
    )


def in_a_process():
    """Saves in another process, from shared memory."""
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    return AsyncCheckpointSaverConfig(staging_config=staging)


def content(name, data):
    """The bytes of a file; the records of torch's archive, without a hash of their CRC-32."""
    if not name.endswith(".pt"):
        return data
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.testzip() is None
    return {entry: archive.read(entry) for entry in archive.namelist() if not entry.endswith("serialization_id")}


@everywhere
def test_a_saved_checkpoint_equals_the_state_and_the_files_of_a_local_one(config, tmp_path):
    state = saved_state()
    for each, name in (
        (config, "step-7"),
        (LocalFileSystemStorageConfig(use_direct_io=False), str(tmp_path / "local")),
    ):
        manager = manager_of(each, model=ItemSpec(resharder=DefaultResharder()))
        manager.save(name, state)
        loaded = manager.load(name, into=zeros(state), strict=True)
        assert_equal(loaded, state)
        manager.close()
    found = [path for path in (tmp_path / "local").rglob("*") if path.is_file()]
    files = {path.relative_to(tmp_path / "local").as_posix(): path.read_bytes() for path in found}
    store = Store(f"{config.url}/step-7", config=config.config)
    assert len(files) == 7
    assert sorted(info.key for info in store.list()) == sorted(files)
    for name, data in files.items():
        mine = bytes(store.get(name))
        assert len(mine) == len(data)
        assert content(name, mine) == content(name, data), name
    # Nothing else is left.
    assert {info.key.split("/")[0] for info in Store(config.url, config=config.config).list()} == {"step-7"}


@pytest.mark.parametrize("config", often(1, ["s3", "gs", "file"]), indirect=True)
def test_a_save_in_a_process_equals_the_state(config):
    state = saved_state()
    manager = manager_of(config, in_a_process())
    pending = manager.save("step-7", state)
    pending.result(timeout=120)
    assert_equal(manager.load("step-7", into=zeros(state), strict=True), state)
    # The same step once more: a rename replaces no checkpoint.
    with pytest.raises(FileExistsError, match="step-7 exists"):
        manager.save("step-7", state).result(timeout=120)
    manager._write_future = None
    manager.close()


def saved_by_rank(rank, config):
    dist.init_process_group("gloo")
    manager, own = manager_of(config), {"model": {"weight": torch.full((3000,), float(rank))}, "step": 7}
    manager.save("step-7", own)
    # The first rank renames the folder; the others do not wait for it.
    dist.barrier()
    loaded = manager.load("step-7", into=zeros(own), strict=True)
    manager.close()
    return loaded


@in_s3
def test_two_ranks_save_and_load_one_checkpoint(config, bucket):
    for rank, loaded in enumerate(run_ranks(saved_by_rank, config)):
        assert_equal(loaded, {"model": {"weight": torch.full((3000,), float(rank))}, "step": 7})
    assert bucket.keys() == [f"a/run/step-7/{name}_{rank}.pt" for name in ("model", "step") for rank in range(2)]


def resharded(rank, config):
    dist.init_process_group("gloo")
    mesh, whole = init_device_mesh("cpu", (1,)), torch.arange(1 << 20).reshape(1024, 1024)
    manager = manager_of(config, model=ItemSpec(resharder=DefaultResharder()))
    manager.save("step-7", {"model": {"weight": distribute_tensor(whole, mesh, [Shard(0)])}})
    into = {"weight": distribute_tensor(torch.zeros_like(whole), mesh, [Replicate()])}
    loaded = manager.load("step-7", into={"model": into}, strict=True)
    manager.close()
    return torch.equal(loaded["model"]["weight"].full_tensor(), whole)


@in_s3
def test_a_checkpoint_is_loaded_with_another_sharding(config, control):
    assert run_ranks(resharded, config, size=1) == [True]
    # Slices of a file are read by ranges.
    reads = [each for each in control.requests() if each.operation == "GetObject" and each.key.endswith("model_0.pt")]
    assert all("range" in each.headers for each in reads)


@in_s3
def test_boto3_sees_the_files(config, bucket):
    manager = manager_of(config)
    manager.save("step-7", saved_state())
    manager.close()
    names = ["model_0.pt", "optimizer_0.pt", "raw/0.bin", "step_0.pt", "table.json", "tensors_0.safetensors"]
    assert bucket.keys() == [f"a/run/step-7/{name}" for name in names]
    assert torch.load(io.BytesIO(bucket.body("a/run/step-7/step_0.pt"))) == 7
    assert_equal(torch.load(io.BytesIO(bucket.body("a/run/step-7/model_0.pt"))), saved_state()["model"])
    assert json.loads(bucket.body("a/run/step-7/table.json")) == {"epoch": 3}
    assert_equal(load_safetensors(bucket.body("a/run/step-7/tensors_0.safetensors")), saved_state()["tensors"])


@in_memory
def test_a_file_that_is_not_closed_is_not_written(storage):
    value = {"a": torch.ones(5000)}
    with pytest.raises(KeyError), storage.get_write_stream(Path("f.pt"), value) as stream:
        torch.save(value, stream)
        raise KeyError
    torch.save(value, storage.get_write_stream(Path("f.pt"), value))
    assert not storage.exists(Path("f.pt"))
    stream = storage.get_write_stream(Path("f.pt"), value)
    torch.save(value, stream)
    stream.close()
    stream.close()
    assert_equal(torch.load(io.BytesIO(storage.read(Path("f.pt")))), value)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        storage.get_write_stream(Path("g.pt"), lambda: None)


@in_memory
def test_a_file_that_cannot_be_planned_is_streamed(storage, monkeypatch):
    from torchobj import torch_checkpointing as backend

    def fails(*_, **__):
        raise backend.PlanError("another layout")

    monkeypatch.setattr(backend, "plan_of", fails)
    with storage.get_write_stream(Path("f.pt"), value := {"a": torch.ones(5)}) as stream:
        torch.save(value, stream)
    assert_equal(torch.load(io.BytesIO(storage.read(Path("f.pt")))), value)


# Faults.

REFUSED = {"status": 403, "code": "AccessDenied"}


@in_s3
@pytest.mark.parametrize(
    ("operation", "key"), [("PutObject", "model_0.pt"), ("PutObject", "table.json"), ("CopyObject", "model_0.pt")]
)
def test_a_save_that_fails_raises_and_leaves_no_checkpoint(config, bucket, control, operation, key):
    folder = "step-7" if operation == "CopyObject" else "tmp_step-7"
    control.faults({"operation": operation, "key": f"a/run/{folder}/{key}", "action": REFUSED})
    manager, state = manager_of(config), saved_state()
    with pytest.raises(exceptions.AccessDeniedError):
        manager.save("step-7", state)
    storage = config.create_storage()
    assert not storage.exists(Path("step-7"))
    assert "step-7" not in storage.ls(Path())
    with pytest.raises(FileNotFoundError):
        manager.load("step-7", into=zeros(state))
    assert bucket.uploads() == []
    control.clear_faults()
    manager.save("step-7", state)
    assert_equal(manager.load("step-7", into=zeros(state), strict=True), state)
    assert storage.ls(Path()) == ["step-7"]
    manager.close()


@in_s3
@pytest.mark.parametrize("operation", ["PutObject", "CopyObject", "DeleteObject"])
def test_a_rename_that_ends_at_any_request_leaves_no_new_folder(config, control, storage, operation):
    """As after a kill: the mark, the copies, or the end of the mark are missing."""
    files = {f"f{number}": b"%d" % number for number in range(3)}
    for name, data in files.items():
        storage.write(Path("tmp_step-1") / name, data)
    # What a killed rename has left: a file that no longer belongs to the checkpoint, and another one.
    for name in ("step-1/stale", "step-1/f0", "step-1.uncommitted"):
        storage.write(Path(name), b"")
    control.faults({"operation": operation, "action": REFUSED})
    with pytest.raises(exceptions.AccessDeniedError):
        storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    assert not storage.exists(Path("step-1"))
    assert storage.ls(Path()) == ["tmp_step-1"]
    assert storage.ls(Path("tmp_step-1")) == sorted(files)
    control.clear_faults()
    storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    assert storage.ls(Path()) == ["step-1"]
    assert {name: storage.read(Path("step-1") / name) for name in storage.ls(Path("step-1"))} == files


@in_s3
@pytest.mark.parametrize(
    ("operation", "skipped"),
    [("PutObject", 0), ("CopyObject", 0), ("CopyObject", 1), ("DeleteObject", 0), ("DeleteObjects", 0)],
)
def test_a_rename_that_is_killed_leaves_no_half_folder(config, control, storage, operation, skipped):
    files = {f"f{number}": b"%d" % number for number in range(3)}
    for name, data in files.items():
        storage.write(Path("tmp_step-1") / name, data)
    control.faults({"operation": operation, "skip": skipped, "action": {"delay_first_byte_s": killing.HELD_S}})
    arguments = Path("tmp_step-1"), Path("step-1"), True
    process = multiprocessing.get_context("fork").Process(target=storage.rename, args=arguments)
    process.start()
    assert killing.kill_at(control, process.pid)
    process.join()
    control.clear_faults()
    if not storage.exists(Path("step-1")):
        storage.rename(*arguments)
    assert {name: storage.read(Path("step-1") / name) for name in storage.ls(Path("step-1"))} == files


@in_s3
def test_old_files_that_cannot_be_deleted_are_logged_and_the_new_folder_is_complete(config, control, storage, caplog):
    for number in range(3):
        storage.write(Path(f"tmp_step-1/{number}"), b"")
    control.faults({"operation": "DeleteObjects", "action": REFUSED})
    storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    assert "tmp_step-1: old files were not deleted: " in caplog.text
    assert storage.ls(Path("step-1")) == ["0", "1", "2"]


@in_s3
def test_a_copy_with_other_bytes_is_an_error_and_nothing_is_deleted(config, control, storage, bucket, monkeypatch):
    copy = Store.copy

    def wrong(store, source, key):
        version = copy(store, source, key)
        if key.endswith("1"):
            bucket.write(key, b"other")
        return version

    for number in range(3):
        storage.write(Path(f"tmp_step-1/{number}"), b"bytes")
    monkeypatch.setattr(Store, "copy", wrong)
    with pytest.raises(exceptions.IntegrityError, match=r"step-1/1.*; nothing was deleted"):
        storage.rename(Path("tmp_step-1"), Path("step-1"), is_directory=True)
    assert not storage.exists(Path("step-1"))
    assert storage.ls(Path("tmp_step-1")) == ["0", "1", "2"]


@in_s3
def test_a_removal_that_ends_within_leaves_no_half_checkpoint(config, control, storage, bucket):
    for number in range(3):
        storage.write(Path(f"step-1/{number}"), b"")
    control.faults({"operation": "DeleteObjects", "action": REFUSED}, {"operation": "DeleteObject", "action": REFUSED})
    with pytest.raises(exceptions.AccessDeniedError):
        storage.rmdir(Path("step-1"))
    assert not storage.exists(Path("step-1"))
    with pytest.raises(FileExistsError, match="rmdir deletes what was left"):
        storage.mkdir(Path("step-1"))
    control.clear_faults()
    storage.rmdir(Path("step-1"))
    assert bucket.keys() == []
    storage.mkdir(Path("step-1"))


@pytest.mark.parametrize("config", ["s3"], indirect=True)
def test_a_missing_bucket_is_no_missing_checkpoint(config):
    storage = ObjectStorageConfig("s3://no-such-bucket/run", config.config).create_storage()
    for call in (storage.exists, storage.isdir, storage.ls, lambda path: storage.glob(f"{path}/*")):
        with pytest.raises(exceptions.BucketNotFoundError):
            call(Path("step-1"))
