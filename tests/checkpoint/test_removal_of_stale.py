"""A checkpoint whose manifest is of another save than its metadata: removed whole, and a running save is left alone."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchobj import Store
from torchobj.checkpoint import StorageWriter
from torchobj.checkpoint.dcp.attempt import record_of_file
from torchobj.lightning import ObjectCheckpointIO

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

STATE = {"weight": torch.ones(9)}
MANIFEST = "_torchobj_manifest.json"


class Killed(StorageWriter):
    """Ends after the manifest is written, as a process that is killed there."""

    def _commit(self, *_):
        raise KeyboardInterrupt


def test_a_checkpoint_that_torchs_own_writer_replaced_is_removed_whole(tmp_path):
    run = tmp_path / "run"
    dcp.save(STATE, storage_writer=StorageWriter(f"file://{run}"))
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(run))
    (run / "notes.txt").write_text("precious")
    assert {"__0_0.distcp", MANIFEST} < {path.name for path in run.iterdir()}
    ObjectCheckpointIO().remove_checkpoint(f"file://{run}")
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("is_protected", [True, False])
def test_without_metadata_the_files_of_a_save_that_may_be_running_stay(is_protected):
    store = Store(f"memory://stale-{is_protected}")
    writer = Killed(f"{store.url}/run")
    with pytest.raises((KeyboardInterrupt, dcp.api.CheckpointException)):
        dcp.save(STATE, storage_writer=writer)
    keys = {info.key for info in store.list()}
    [file] = [key for key in keys if key.endswith(".distcp")]
    record = record_of_file(file.removeprefix("run/"))
    assert keys == {file, f"run/{MANIFEST}", f"run/{record.name}"}
    if not is_protected:
        store.delete(f"run/{record.name}")
    ObjectCheckpointIO().remove_checkpoint(f"{store.url}/run")
    assert {info.key for info in store.list()} == (keys if is_protected else set())


def test_a_save_that_replaces_a_checkpoint_of_torchs_own_writer_deletes_the_files_of_both(tmp_path):
    run = tmp_path / "run"
    dcp.save(STATE, storage_writer=StorageWriter(f"file://{run}"))
    first = {path.name for path in run.glob("*.distcp")}
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(run))
    dcp.save(STATE, storage_writer=StorageWriter(f"file://{run}"))
    left = {path.name for path in run.iterdir()}
    assert "__0_0.distcp" not in left
    assert not first & left
    assert len(left) == 3
