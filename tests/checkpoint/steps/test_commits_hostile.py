"""A folder with keys and commit objects of other tools: saved steps can be restored."""

import dataclasses

import pytest
import torch

from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps import commit
from torchobj.checkpoint.steps.commits import Commits

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

STATE = {"x": torch.ones(4)}


@pytest.mark.parametrize("name", ["", "/f", "a//f", "a/../f", "a\\f"])
def test_a_key_that_no_commit_can_name_is_not_committed(bucket, monkeypatch, name):
    manager = CheckpointManager(f"{bucket.url}/run", config=bucket.config)
    listed = Commits.objects

    def with_another(self, below):
        found = listed(self, below)
        more = [found[0]._replace(key=below + name)] if below.startswith("steps/") and found else []
        return [*more, *found]

    monkeypatch.setattr(Commits, "objects", with_another)
    manager.save(1, STATE)
    assert manager.restore(1)["x"][0] == 1
    assert [item.key.rpartition("/")[2] for item in manager._commits.read(1).objects] == ["state.pt"]


def test_a_commit_that_could_not_be_read_again_is_refused(monkeypatch):
    manager = CheckpointManager("memory://unreadable-commit/run")
    stored = Commits.stored

    def with_a_wrong_size(*given):
        return tuple(dataclasses.replace(item, size=-1) for item in stored(*given))

    monkeypatch.setattr(Commits, "stored", with_a_wrong_size)
    with pytest.raises(exceptions.CheckpointError, match="step 1 cannot be committed"):
        manager.save(1, STATE)
    assert (manager.steps(), manager.leftovers()) == ([], [])


def test_a_commit_object_that_is_too_large_is_not_read(bucket, control, monkeypatch):
    monkeypatch.setattr(commit, "_MAX_BYTES", 100_000)
    url = f"{bucket.url}/run"
    CheckpointManager(url, config=bucket.config).save(1, STATE)
    bucket.write("run/commits/000000000002.json", b" " * 100_001)
    control.clear_requests()
    manager = CheckpointManager(url, config=bucket.config, keep_last=1)
    with pytest.raises(exceptions.CheckpointError, match="it has 100001 bytes"):
        manager.restore(2)
    manager.save(3, STATE)
    assert manager.steps() == [2, 3]
    assert not [request for request in control.requests("GetObject") if request.key.endswith("2.json")]
    manager.delete(2)
    assert manager.steps() == [3]
