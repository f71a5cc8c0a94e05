"""What a save deletes when it is committed: one step that another process changes does not stop the rest."""

import json

import torch

from tests.integration.test_manager_deletes import Between
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.commits import Commits, CommittedByAnotherError


def state(value):
    return {"x": torch.full((4,), float(value))}


def test_a_server_that_ignores_conditions_of_a_delete_keeps_the_pointer(place, monkeypatch):
    manager = CheckpointManager(f"{place.url}/run", keep_last=None, config=place.config)
    for step in (1, 2):
        manager.save(step, state(step))
    pointer = json.loads(place.boto.get_object(Bucket=place.bucket, Key="run/latest.json")["Body"].read())
    manager._commits.store = Between(manager._commits.store, None, None, ignores=True)
    manager._commits._is_delete_conditional = None
    # As a process that is killed before the pointer is moved.
    monkeypatch.setattr(Commits, "point", lambda _: None)
    manager.delete(1)
    assert manager._commits._is_delete_conditional is False
    found = json.loads(place.boto.get_object(Bucket=place.bucket, Key="run/latest.json")["Body"].read())
    assert found == pointer
    assert (manager.steps(), manager.leftovers()) == ([2], [])


def test_whether_deletes_are_conditional_is_found_out_without_leaving_an_object(place):
    manager = CheckpointManager(f"{place.url}/run", keep_last=None, config=place.config)
    manager.save(1, state(1))
    manager.delete(1)
    assert manager._commits._is_delete_conditional is True
    assert place.keys() == []


def test_a_step_that_another_process_saved_anew_does_not_keep_the_others_from_being_cleared(monkeypatch, caplog):
    url = "memory://clearing/run"
    keeping = CheckpointManager(url, keep_last=None)
    for step in range(1, 5):
        keeping.save(step, state(step))
    delete = Commits.delete

    def delete_but_one(self, commit, version):
        if commit.step == 1:
            raise CommittedByAnotherError("step 1 was saved anew, and was not deleted")
        delete(self, commit, version)

    monkeypatch.setattr(Commits, "delete", delete_but_one)
    manager = CheckpointManager(url, keep_last=1)
    manager.save(5, state(5))
    assert manager.steps() == [1, 5]
    assert json.loads(bytes(manager._commits.store.get("run/latest.json")[:]))["step"] == 5
    assert "step 1 was saved anew" in caplog.text
