"""A checkpoint that torch's own writer replaced is removed whole, and the files of a save that may be running stay."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchobj import Store
from torchobj.checkpoint import StorageWriter
from torchobj.lightning import ObjectCheckpointIO

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

STATE = {"weight": torch.ones(9)}


class Killed(StorageWriter):
    """Ends before the metadata is written, as a process that is killed there."""

    def _commit(self, *_):
        raise KeyboardInterrupt


def save_killed(url):
    with pytest.raises((KeyboardInterrupt, dcp.api.CheckpointException)):
        dcp.save(STATE, storage_writer=Killed(url))


def test_a_checkpoint_that_torchs_own_writer_replaced_is_removed_whole(tmp_path):
    run = tmp_path / "run"
    dcp.save(STATE, storage_writer=StorageWriter(f"file://{run}"))
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(run))
    (run / "notes.txt").write_text("precious")
    assert {"__0_0.distcp", ".metadata"} < {path.name for path in run.iterdir()}
    ObjectCheckpointIO().remove_checkpoint(f"file://{run}")
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


def test_without_metadata_the_files_of_a_save_that_may_be_running_stay():
    store = Store("memory://stale")
    save_killed(f"{store.url}/run")
    keys = {info.key for info in store.list()}
    assert len(keys) == 1
    ObjectCheckpointIO().remove_checkpoint(f"{store.url}/run")
    assert {info.key for info in store.list()} == keys


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_save_that_may_be_running_keeps_its_files_if_they_are_newer_than_the_metadata_or_below(tmp_path, is_removed):
    run = tmp_path / "run"
    save_killed(f"file://{run}/below")
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(run))
    save_killed(f"file://{run}")
    left = {path for path in run.rglob("*.distcp") if path.name != "__0_0.distcp"}
    assert len(left) == 2
    [newer] = (path for path in left if path.parent == run)
    time_s = (run / ".metadata").stat().st_mtime + 1
    os.utime(newer, (time_s, time_s))
    if is_removed:
        ObjectCheckpointIO().remove_checkpoint(f"file://{run}")
        assert set(run.rglob("*.distcp")) == left
    else:
        dcp.save(STATE, storage_writer=StorageWriter(f"file://{run}"))
        assert left < set(run.rglob("*.distcp"))
        assert len(list(run.iterdir())) == 4


def test_a_save_that_replaces_a_checkpoint_of_torchs_own_writer_deletes_the_files_of_both(tmp_path):
    run = tmp_path / "run"
    dcp.save(STATE, storage_writer=StorageWriter(f"file://{run}"))
    first = {path.name for path in run.glob("*.distcp")}
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(run))
    dcp.save(STATE, storage_writer=StorageWriter(f"file://{run}"))
    left = {path.name for path in run.iterdir()}
    assert "__0_0.distcp" not in left
    assert not first & left
    assert len(left) == 2
