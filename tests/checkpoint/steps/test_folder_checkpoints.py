"""Folders that are saved and restored by step: all files of a save or none, whatever the folder has and whoever wrote the
commit.
"""

import os
import threading

import pytest
import torch

from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, FolderCheckpoints
from torchobj.checkpoint.steps import folder_content

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

FILES = {
    "model.safetensors": b"m" * 3000,
    "tokenizer/vocab.json": b"v" * 500,
    "rng_state_0.pth": b"",
    "a [1]*?.bin": b"*",
}


def written(folder, files=FILES):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def content(folder):
    return {os.fspath(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "checkpoint-1")


@pytest.fixture
def checkpoints(bucket):
    return FolderCheckpoints(f"{bucket.url}/run", config=bucket.config)


def test_a_folder_comes_back_with_all_its_files(checkpoints, folder, tmp_path):
    checkpoints.save(1, folder, {"loss": 0.5})
    checkpoints.save_async(2, written(tmp_path / "checkpoint-2", {"model.safetensors": b"2"})).result()
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.metrics(1)) == ([1, 2], 2, {"loss": 0.5})
    assert checkpoints.restore(1, tmp_path / "new" / "folder") == 1
    assert content(tmp_path / "new" / "folder") == FILES
    assert checkpoints.restore(folder=tmp_path / "latest") == 2
    assert content(tmp_path / "latest") == {"model.safetensors": b"2"}
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "latest", "new"]


def test_the_framework_may_delete_and_replace_files_once_save_async_returns(checkpoints, folder, tmp_path, monkeypatch):
    reached, going, real = threading.Event(), threading.Event(), folder_content.upload

    def upload(*given, **named):
        reached.set()
        assert going.wait(30)
        return real(*given, **named)

    monkeypatch.setattr(folder_content, "upload", upload)
    handle = checkpoints.save_async(1, folder)
    assert reached.wait(30)
    for path in list(folder.rglob("*.json")):
        path.unlink()
    (tmp_path / "new.bin").write_bytes(b"of the next step")
    (tmp_path / "new.bin").replace(folder / "model.safetensors")
    going.set()
    handle.result()
    checkpoints.restore(1, tmp_path / "restored")
    assert content(tmp_path / "restored") == FILES


def test_each_class_names_the_other_for_steps_of_the_other_kind(checkpoints, bucket, folder, tmp_path):
    manager = CheckpointManager(f"{bucket.url}/run", 2, config=bucket.config)
    checkpoints.save(1, folder)
    manager.save(2, {"x": torch.ones(2)})
    with pytest.raises(
        exceptions.CheckpointError, match="step 1: the files of a folder; restore it with FolderCheckpoi"
    ):
        manager.restore(1)
    with pytest.raises(
        exceptions.CheckpointError, match=r"step 2: not the files of a folder; restore it with Checkpoint"
    ):
        checkpoints.restore(folder=tmp_path / "restored")
    manager.save(3, {"x": torch.ones(2)})
    assert checkpoints.steps() == [2, 3]
    assert not [key for key in bucket.keys() if key.startswith("run/steps/000000000001")]
