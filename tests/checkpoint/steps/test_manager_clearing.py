"""A committed save deletes old steps; one that another process changes does not stop the others."""

import json

import pytest
import torch

from tests.checkpoint.steps.test_commits import Between
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps.commits import Commits, CommittedByAnotherError

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


def state(value):
    return {"x": torch.full((4,), float(value))}


@pytest.mark.providers("s3", "gs")
def test_a_server_that_ignores_conditions_of_a_delete_keeps_the_pointer(bucket, monkeypatch):
    manager = CheckpointManager(f"{bucket.url}/run", keep_last=None, config=bucket.config)
    for step in (1, 2):
        manager.save(step, state(step))
    pointer = json.loads(bucket.body("run/latest.json"))
    manager._commits.store = Between(manager._commits.store, None, None, ignores=True)
    manager._commits._is_delete_conditional = None
    # As if a process was killed before it updated the pointer.
    monkeypatch.setattr(Commits, "point", lambda _: None)
    manager.delete(1)
    assert manager._commits._is_delete_conditional is False
    found = json.loads(bucket.body("run/latest.json"))
    assert found == pointer
    assert (manager.steps(), manager.leftovers()) == ([2], [])


@pytest.mark.providers("s3", "gs")
def test_the_test_for_conditional_deletes_leaves_no_object(bucket):
    manager = CheckpointManager(f"{bucket.url}/run", keep_last=None, config=bucket.config)
    manager.save(1, state(1))
    manager.delete(1)
    assert manager._commits._is_delete_conditional is True
    assert bucket.keys() == []


def test_a_step_that_another_process_saved_again_does_not_stop_the_deletion_of_others(monkeypatch, caplog):
    url = "memory://clearing/run"
    keeping = CheckpointManager(url, keep_last=None)
    for step in range(1, 5):
        keeping.save(step, state(step))
    delete = Commits.delete_commit

    def delete_but_one(self, commit):
        if commit.step == 1:
            raise CommittedByAnotherError("step 1 was saved again, and was not deleted")
        delete(self, commit)

    monkeypatch.setattr(Commits, "delete_commit", delete_but_one)
    manager = CheckpointManager(url, keep_last=1)
    manager.save(5, state(5))
    assert manager.steps() == [1, 5]
    assert json.loads(bytes(manager._commits.store.get("run/latest.json")[:]))["step"] == 5
    assert "step 1 was saved again" in caplog.text
