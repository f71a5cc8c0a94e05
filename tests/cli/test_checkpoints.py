"""`torchobj checkpoints`."""

import math

import pytest
import torch

from tests.support.long_tables import GCS_IN_MATRIX
from torchobj.checkpoint import CheckpointManager, FolderCheckpoints

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.fixture
def saved(bucket):
    manager = CheckpointManager(f"{bucket.url}/run", config=bucket.config)
    for step in (100, 200):
        manager.save(step, {"w": torch.zeros(4)}, metrics={"loss": 1 / step})
    return manager


def test_steps_are_listed_with_their_metrics(cli, saved):
    first, second = cli.records("checkpoints", "steps", saved.url)
    assert (first["step"], second["step"]) == (100, 200)
    assert first["metrics"] == {"loss": 0.01} and first["objects"] == 1 and first["bytes"] > 16 and not first["sharded"]
    assert "loss=0.005" in cli.lines("checkpoints", "steps", f"{saved.url}/")[1]


def test_a_step_of_a_folder_is_listed_with_its_files(cli, bucket, saved, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "checkpoint-300").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-300" / name).write_bytes(b"data")
    FolderCheckpoints(saved.url, config=bucket.config).save(300, tmp_path / "checkpoint-300")
    *_, row = cli.lines("checkpoints", "steps", saved.url)
    assert " folder " in row and "2 files" in row and "8 B" in row
    records = cli.records("checkpoints", "steps", saved.url)
    assert [record["kind"] for record in records] == ["state", "state", "folder"]


def test_the_latest_step_is_printed_for_scripts(cli, saved):
    assert cli.lines("checkpoints", "latest", saved.url) == ["200"]


def test_a_folder_without_checkpoints_is_an_error(cli, bucket):
    for command in ("latest", "steps"):
        assert "no step is committed" in cli.error("checkpoints", command, f"{bucket.url}/run")


def test_metrics_of_a_step_are_printed(cli, saved):
    saved.save(300, {"w": torch.zeros(4)}, metrics={"loss": math.inf})
    assert cli.records("checkpoints", "metrics", saved.url, 200) == [{"step": 200, "metrics": {"loss": 0.005}}]
    assert cli.records("checkpoints", "metrics", saved.url)[-1]["metrics"] == {"loss": "inf"}
    assert "step 150 is not committed" in cli.error("checkpoints", "metrics", saved.url, 150)


def test_a_commit_object_that_cannot_be_read_is_listed(cli, bucket, saved):
    bucket.write("run/commits/000000000150.json", b"{}")
    assert "commit object cannot be read" in cli.lines("checkpoints", "steps", saved.url)[1]


def test_leftovers_are_listed_and_swept(cli, bucket, saved):
    key = f"steps/000000000150-{'0' * 32}/state.pt"
    bucket.write(f"run/{key}", b"left")
    [found] = cli.records("checkpoints", "leftovers", saved.url)
    assert found["key"] == key and found["step"] == 150 and found["size"] == 4
    assert "--yes" in cli.error("checkpoints", "sweep", saved.url)
    assert cli.lines("checkpoints", "sweep", "--yes", saved.url) == ["nothing to do"]
    assert cli.records("checkpoints", "sweep", "--yes", saved.url) == []
    [swept] = cli.lines("checkpoints", "sweep", "--yes", "--older-than", "0s", saved.url)
    assert swept.startswith("delete") and f"run/{key}" not in bucket.keys()
    assert cli.lines("checkpoints", "latest", saved.url) == ["200"]


def test_steps_are_deleted_after_a_question_and_none_if_one_is_not_committed(cli, bucket, saved):
    assert "delete step 100 of" in cli.error("checkpoints", "delete", saved.url, 100)
    assert "step 150 is not committed" in cli.error("checkpoints", "delete", "--yes", saved.url, 100, 150)
    assert cli.records("checkpoints", "delete", "--dry-run", saved.url, 100) == [
        {"action": "would delete", "step": 100}
    ]
    assert saved.steps() == [100, 200]
    assert cli.lines("checkpoints", "delete", "--yes", saved.url, 200, 200) == ["delete step 200"]
    assert cli.lines("checkpoints", "latest", saved.url) == ["100"]
    assert saved.leftovers() == [] and not any("0200" in key for key in bucket.keys())
