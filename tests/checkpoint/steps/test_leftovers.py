"""A save deletes what killed saves left a day ago, and nothing else."""

import datetime
import os
import time

import pytest
import torch

import torchobj
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, leftovers
from torchobj.checkpoint.leftovers import Attempt
from torchobj.checkpoint.steps.commit import folder_of
from torchobj.checkpoint.steps.commits import Commits

DAY_S = 86_400


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/run"


@pytest.fixture
def left(tmp_path):
    """Writes an object of an attempt that was never committed, some time ago."""

    def write(attempt, name, age_s):
        path = tmp_path / "run" / folder_of(attempt) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left")
        aged(path, age_s)
        return path

    return write


def aged(path, age_s):
    time_s = path.stat().st_mtime - age_s
    os.utime(path, (time_s, time_s))


def state():
    return {"x": torch.ones(4)}


def test_a_save_deletes_what_killed_saves_left_a_day_ago(url, left):
    old, young, mixed = Attempt.new(7), Attempt.new(7), Attempt.new(8)
    expired = left(old, "state.pt", DAY_S + 5)
    others = [
        left(young, "state.pt", DAY_S - 60),
        left(mixed, "__0_0.distcp", 3 * DAY_S),
        left(mixed, "__1_0.distcp", 60),
    ]
    with CheckpointManager(url) as manager:
        manager.save(1, state())
        assert not expired.exists()
        assert all(path.exists() for path in others)
        assert {item.key.split("/")[1] for item in manager.leftovers()} == {
            folder_of(young).split("/")[1],
            folder_of(mixed).split("/")[1],
        }


def test_opening_and_restoring_delete_nothing(url, left):
    with CheckpointManager(url) as manager:
        manager.save(1, state())
    expired = left(Attempt.new(7), "state.pt", 2 * DAY_S)
    with CheckpointManager(url) as manager:
        manager.restore()
        manager.steps()
        manager.leftovers()
    assert expired.exists()


def test_the_data_of_committed_steps_and_of_other_programs_stay(url, left, tmp_path):
    with CheckpointManager(url, keep_last=None) as manager:
        manager.save(1, state())
        manager.save(2, state())
        for path in (tmp_path / "run").rglob("*"):
            if path.is_file():
                aged(path, 3 * DAY_S)
        (tmp_path / "run/commits/000000000002.json").write_text("damaged")
        others = [tmp_path / "run/steps/notes.txt", tmp_path / "run/steps/000000000003-short/x"]
        for other in others:
            other.parent.mkdir(exist_ok=True)
            other.write_text("mine")
            aged(other, 3 * DAY_S)
    with CheckpointManager(url, keep_last=None) as manager:
        manager.save(4, state())
        assert manager.steps() == [1, 2, 4]
        assert manager.restore(1)["x"].tolist() == [1.0] * 4
        assert all(other.exists() for other in others)
        assert len(list((tmp_path / "run/steps").glob("000000000002-*/state.pt"))) == 1


def test_a_slow_save_with_an_upload_keeps_everything(bucket, config, monkeypatch):
    # What is as old as the save that was committed is expired.
    monkeypatch.setattr(leftovers, "EXPIRED_AFTER", leftovers.EXPIRED_AFTER * 0)
    slow, killed = Attempt.new(7), Attempt.new(8)
    bucket.write(f"run/{folder_of(slow)}__0_0.distcp", b"data")
    bucket.write(f"run/{folder_of(killed)}__0_0.distcp", b"data")
    key = f"run/{folder_of(slow)}__1_0.distcp"
    bucket.boto.create_multipart_upload(Bucket=bucket.name, Key=key)
    with CheckpointManager(f"{bucket.url}/run", config=config) as manager:
        manager.save(1, state())
        assert {item.key.split("/")[1] for item in manager.leftovers()} == {folder_of(slow).split("/")[1]}
    assert len(bucket.uploads()) == 1


def test_a_slow_save_that_ends_an_upload_during_a_sweep_keeps_everything(url, left, monkeypatch):
    slow, listing = Attempt.new(7), Commits.written
    first = left(slow, "__0_0.distcp", 2 * DAY_S)

    def ended(commits, delimiter=None):
        left(slow, "__1_0.distcp", 0)
        return listing(commits, delimiter)

    monkeypatch.setattr(Commits, "written", ended)
    with CheckpointManager(url) as manager:
        manager.save(1, state())
    assert first.exists()
    assert first.with_name("__1_0.distcp").exists()


def test_a_failed_sweep_does_not_fail_the_save(url, left, monkeypatch, caplog):
    expired = left(Attempt.new(7), "state.pt", 2 * DAY_S)
    delete = Commits.delete

    def refuse(self, keys):
        names = list(keys)
        if any("000000000007-" in name for name in names):
            raise exceptions.AccessDeniedError("delete x: refused")
        delete(self, names)

    monkeypatch.setattr(Commits, "delete", refuse)
    with CheckpointManager(url) as manager:
        manager.save(1, state())
        manager.save(2, state())
        assert manager.steps() == [1, 2]
    assert expired.exists()
    assert caplog.text.count("what killed saves left was not deleted: delete x: refused") == 1


def test_a_running_save_of_this_process_is_kept(url, left):
    attempt = Attempt.new(7)
    running = left(attempt, "state.pt", 2 * DAY_S)
    with CheckpointManager(url) as manager, leftovers.under_way(attempt):
        manager.save(1, state())
    assert running.exists()


def test_nothing_is_deleted_if_the_listing_of_commits_is_old(url, left, tmp_path, monkeypatch):
    with CheckpointManager(url, keep_last=None) as manager:
        manager.save(1, state())
        manager.save(2, state())
    for path in (tmp_path / "run").rglob("*.pt"):
        aged(path, 3 * DAY_S)
    (tmp_path / "run/commits/000000000002.json").write_text("damaged")
    expired = left(Attempt.new(7), "state.pt", 2 * DAY_S)
    monkeypatch.setattr(Commits, "_commit_objects", lambda _: [])
    with CheckpointManager(url, keep_last=None) as manager:
        manager.save(3, state())
    assert not expired.exists()
    assert len(list((tmp_path / "run/steps").rglob("*.pt"))) == 3


def test_times_of_the_year_one_do_not_fail_a_save(monkeypatch):
    # The zero time of Go, which some gateways list.
    listed, zero = Commits.objects, datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)
    monkeypatch.setattr(
        Commits,
        "objects",
        lambda self, *below: [info._replace(last_modified=zero) for info in listed(self, *below)],
    )
    with CheckpointManager("memory://zero/run") as manager:
        manager.save(1, state())
        assert manager.steps() == [1]


def test_the_first_save_of_a_manager_lists_the_objects_of_all_steps(bucket, config, control):
    with CheckpointManager(f"{bucket.url}/run", keep_last=None, config=config) as manager:
        for step, expected in ((1, 1), (2, 0)):
            control.clear_requests()
            manager.save(step, state())
            listed = [each.target for each in control.requests("ListObjectsV2")]
            assert sum(target.endswith("steps%2F") for target in listed) == expected


def test_a_slow_save_that_is_writing_a_file_keeps_everything(tmp_path):
    # On a file store; on S3 and Google Cloud Storage its upload is found.
    slow = Attempt.new(7)
    first = tmp_path / folder_of(slow) / "__0_0.distcp"
    first.parent.mkdir(parents=True)
    first.write_bytes(b"data")
    os.utime(first, (time.time() - 2 * DAY_S,) * 2)
    with torchobj.open(f"file://{tmp_path}/{folder_of(slow)}__1_0.distcp", "wb") as file:
        file.write(b"x" * (40 << 20))
        with CheckpointManager(f"file://{tmp_path}") as manager:
            manager.save(1, state())
    assert first.exists()


def test_the_unfinished_upload_of_a_file_is_found_from_its_folder(tmp_path):
    # Written with the root "/", as torchobj.open and torchobj.save do, and listed with the root of the folder.
    with torchobj.open(f"file://{tmp_path}/steps/x", "wb") as file:
        file.write(b"x" * (40 << 20))
        assert len(torchobj.Store(f"file://{tmp_path}").unfinished_uploads("steps/")) == 1


def test_the_data_of_a_replaced_step_whose_commit_cannot_be_read_is_left_for_sweep(url, tmp_path, caplog):
    with CheckpointManager(url) as manager:
        manager.save(1, state())
    [old] = (tmp_path / "run/steps").rglob("*.pt")
    aged(old, 2 * DAY_S)
    (tmp_path / "run/commits/000000000001.json").write_text('{"version": 2}')
    with CheckpointManager(url) as manager:
        manager.save(1, state(), overwrite=True)
    assert "the data of the old step is left for sweep()" in caplog.text
    assert old.exists()


def test_a_leftover_is_a_tuple_of_these(url, left):
    attempt = Attempt.new(7)
    path = left(attempt, "state.pt", 5)
    with CheckpointManager(url) as manager:
        [(key, step, size, modified, upload, own)] = manager.leftovers()
    assert (key, step, size, upload, own) == (f"{folder_of(attempt)}state.pt", 7, 4, None, attempt)
    assert modified.timestamp() == pytest.approx(path.stat().st_mtime, abs=0.01)


def test_the_commit_of_a_step_is_read_once_for_all_its_leftovers(url, left, monkeypatch):
    for step in (7, 7, 7, 8):
        left(Attempt.new(step), "state.pt", 5)
    steps, read = [], Commits.read
    monkeypatch.setattr(Commits, "read", lambda *given: steps.append(given[1]) or read(*given))
    with CheckpointManager(url) as manager:
        assert len(manager.leftovers()) == 4
    assert sorted(steps) == [7, 8]


def test_a_sweep_without_leftovers_writes_nothing(url, left, monkeypatch):
    with CheckpointManager(url) as manager:
        manager.save(1, state())
        monkeypatch.setattr(Commits, "time", None)
        assert manager.sweep(0) == []
