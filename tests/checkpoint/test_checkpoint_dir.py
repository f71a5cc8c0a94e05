"""Checkpoints on `file://` with symbolic links below them: no file outside of their folder is deleted."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchobj.checkpoint import CheckpointManager, StorageReader, StorageWriter, sweep
from torchobj.checkpoint.dcp.object_names import FileNames
from torchobj.lightning import ObjectCheckpointIO

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

NONCE = "0123456789abcdef" * 2
ATTEMPT = f"steps/{1:012}-{NONCE}"


@pytest.fixture
def victim(tmp_path):
    """A folder of another program, with files named like checkpoint files."""
    folder = tmp_path / "victim"
    (folder / "l").mkdir(parents=True)
    for name in ("f", "l/f", "state.pt"):
        (folder / name).write_text("precious")
    return folder


def state(value):
    return {"x": torch.full((4,), float(value))}


def commit_of_step_1(run, *keys):
    """A commit object written by anyone with access to the folder."""
    objects = [{"key": key, "size": 8} for key in keys]
    fields = {"version": 1, "step": 1, "nonce": NONCE, "kind": "state", "time": "2026-01-01T00:00:00+00:00"}
    (run / "commits").mkdir(parents=True, exist_ok=True)
    (run / f"commits/{1:012}.json").write_text(json.dumps(fields | {"metrics": {}, "objects": objects}))


def linked(run, where, victim):
    """Links the other folder into the attempt's folder, or replaces it; returns the key of a file behind the link."""
    (run / "steps").mkdir(parents=True)
    if where == "the attempt":
        (run / ATTEMPT).symlink_to(victim)
        return f"{ATTEMPT}/f"
    (run / ATTEMPT).mkdir()
    (run / ATTEMPT / "l").symlink_to(victim)
    return f"{ATTEMPT}/l/l/f" if where == "deep" else f"{ATTEMPT}/l/f"


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("where", ["below the attempt", "deep", "the attempt"])
def test_a_commit_that_names_files_behind_a_link_deletes_none_of_them(tmp_path, victim, where, caplog):
    run = tmp_path / "run"
    key = linked(run, where, victim)
    commit_of_step_1(run, key)
    manager = CheckpointManager(f"file://{run}", keep_last=1)
    manager.save(2, state(2))
    assert manager.steps() == [2]
    assert files(victim) == ["f", "f", "state.pt"]
    assert "symbolic link" in caplog.text


@pytest.mark.parametrize("where", ["below the attempt", "deep", "the attempt"])
def test_a_sweep_neither_lists_nor_deletes_files_behind_a_link(tmp_path, victim, where):
    run = tmp_path / "run"
    linked(run, where, victim)
    manager = CheckpointManager(f"file://{run}")
    assert manager.leftovers() == []
    assert manager.sweep(0) == []
    assert files(victim) == ["f", "f", "state.pt"]


def test_a_root_that_is_a_link_is_cleared_normally(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    manager = CheckpointManager(f"file://{tmp_path}/run", keep_last=1)
    for step in (1, 2):
        manager.save(step, state(step))
    assert len(list((tmp_path / "disk/steps").iterdir())) == 1
    (tmp_path / "disk" / ATTEMPT).mkdir()
    (tmp_path / "disk" / ATTEMPT / "f").touch()
    assert [item.key for item in manager.sweep(0)] == [f"{ATTEMPT}/f"]
    assert len(list((tmp_path / "disk/steps").iterdir())) == 1


def test_a_removal_deletes_no_file_behind_a_link(tmp_path, caplog):
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (other / "f.distcp").write_text("precious")
    run.mkdir()
    (run / "l").symlink_to(other)
    dcp.save(state(1), storage_writer=StorageWriter(f"file://{run}"))
    metadata = pickle.loads((run / ".metadata").read_bytes())
    metadata.storage_data[MetadataIndex("planted")] = _StorageInfo("l/f.distcp", 0, 1)
    (run / ".metadata").write_bytes(pickle.dumps(metadata))
    ObjectCheckpointIO().remove_checkpoint(f"file://{run}")
    assert files(other) == ["f.distcp"]
    assert list(run.iterdir()) == [run / "l"]
    assert "symbolic link" in caplog.text


def test_a_sweep_of_files_deletes_nothing_behind_a_link(tmp_path, caplog):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run / "step-1", other):
        dcp.save(state(1), storage_writer=StorageWriter(f"file://{folder}"))
    (run / "l").symlink_to(other)
    for names in (FileNames("l/"), FileNames("")):
        (run / names.file(0)).write_text("precious")
    (other / FileNames("").file(0)).write_text("precious")
    before = files(other)
    deleted = sweep(f"file://{run}", older_than_s=0)
    assert deleted == [f"file://{run}/{names.file(0)}"]
    assert files(other) == before
    found = state(0)
    dcp.load(found, storage_reader=StorageReader(f"file://{other}"))
    assert found["x"][0] == 1
    assert "symbolic link" in caplog.text
