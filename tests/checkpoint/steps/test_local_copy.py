"""Saves through a local disk that fails, is full or is slow, and uploads from it that fail."""

import os
import resource
import subprocess

import pytest
import torch

from tests.support.managers import Gate, outcome, saved_value, tensor
from torchobj import StoreConfig, exceptions
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps import local_copy, state_content
from torchobj.checkpoint.steps.commits import Commits
from torchobj.checkpoint.steps.local import LocalSteps
from torchobj.checkpoint.steps.local_copy import finish_upload
from torchobj.checkpoint.steps.nearest import Copies
from torchobj.ranks.meeting import Ranks
from torchobj.store.transfers import Progress


def interrupt(*given, **named):
    raise InterruptedError


def saves_directly(tier, manager, caplog, step):
    """Checks that a save goes to the bucket, with one warning for all saves, and leaves nothing on the disk."""
    handle = manager.save_async(step, {"x": tensor(step, 1_000_000)})
    handle.wait_local()
    handle.result()
    assert (manager.latest(), saved_value(manager)) == (step, float(step))
    assert sum("saved without a local copy" in record.message for record in caplog.records) == 1


@pytest.fixture
def small_files():
    """Files of this process have less than 1 MB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_full_disk_is_left_out(tier, caplog, small_files, sharded):
    manager = tier.open(sharded=sharded)
    manager.save(1, {"x": tensor(1)})
    assert tier.copies() == [1]
    for step in (2, 3):
        saves_directly(tier, manager, caplog, step)
        assert (tier.copies(), tier.files()) == ([], [])
    manager.save(4, {"x": tensor(4)})
    assert tier.copies() == [4]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("options", ["size=1m", "size=1m,nr_inodes=4", "ro"])
def test_another_file_system_that_is_full_or_read_only_is_left_out(tier, caplog, options):
    tier.disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tier.disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount")
    try:
        manager = tier.open()
        for step in (1, 2):
            saves_directly(tier, manager, caplog, step)
        manager.close()
    finally:
        subprocess.run(["umount", str(tier.disk)], check=True)


def test_a_slow_disk_is_left_out(tier, caplog, monkeypatch):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    monkeypatch.setattr(local_copy, "_LEAST_S", -1.0)
    monkeypatch.setattr(local_copy, "_UPLOADS", 0)
    for step in (2, 3):
        saves_directly(tier, manager, caplog, step)
    assert "slower than the bucket" in caplog.text
    assert (tier.copies(), tier.files()) == ([], [])


def test_the_time_for_a_copy_depends_on_the_last_upload(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(local_copy.time, "monotonic", lambda: now[0])
    for upload_s, total, longest_s in [(None, 0, 30), (None, 5_000_000_000, 100), (5.0, 10**12, 30), (50.0, 0, 150)]:
        now[0] = 1000.0
        limit = local_copy._Limit(upload_s)
        now[0] += longest_s
        limit.check(Progress(0, 1, 0, total, 0))
        now[0] += 1
        with pytest.raises(TimeoutError, match="slower than the bucket"):
            limit.check(Progress(0, 1, 0, total, 0))


def test_an_upload_that_fails_is_an_error_and_the_copy_stays(tier, monkeypatch):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})

    def refused(*given, **named):
        raise exceptions.AccessDeniedError("put: 403")

    with monkeypatch.context() as patch:
        patch.setattr(local_copy, "upload", refused)
        handle = manager.save_async(2, {"x": tensor(2)})
        handle.wait_local()
        assert outcome(handle.result) == ("AccessDeniedError", "put: 403")
    assert (manager.steps(), tier.copies(), saved_value(manager)) == ([1], [1, 2], 2.0)


def test_a_state_that_changes_is_an_error_and_leaves_no_copy(tier, monkeypatch):
    manager, x, gate = tier.open(), tensor(1), Gate(monkeypatch)
    handle = manager.save_async(1, {"x": x}, stage=False)
    assert gate.reached.wait(60)
    with torch.no_grad():
        x.add_(1)
    gate.open.set()
    found = outcome(handle.wait_local)
    assert found == outcome(handle.result)
    assert (found[0], manager.steps(), tier.copies()) == ("CheckpointError", [], [])


def test_progress_is_that_of_the_upload(tier):
    reports = []
    tier.open().save(1, {"x": tensor(1, 1_000_000)}, progress=reports.append)
    assert reports[-1].bytes_done == reports[-1].bytes_total == tier.files(1)[0].stat().st_size


def test_an_exception_of_progress_ends_the_save(tier):
    def refuse(progress):
        raise KeyError("closed")

    manager = tier.open()
    assert outcome(lambda: manager.save(1, {"x": tensor(1)}, progress=refuse))[0] == "KeyError"
    assert manager.steps() == []


def test_the_settings_of_the_bucket_do_not_slow_down_the_disk(tier, monkeypatch):
    used, real = [], state_content.save_counted

    def save(*given, config, **named):
        used.append(config)
        return real(*given, config=config, **named)

    monkeypatch.setattr(state_content, "save_counted", save)
    tier.open(config=StoreConfig(upload_mbit_s=1)).save(1, {"x": tensor(1)})
    assert used == [None]


def test_a_copy_that_cannot_be_committed_is_left_out(tier, caplog, monkeypatch):
    def gone(*given):
        raise exceptions.CheckpointError("state.pt is gone")

    monkeypatch.setattr(LocalSteps, "publish", gone)
    saves_directly(tier, tier.open(), caplog, 1)
    assert "state.pt is gone" in caplog.text
    assert (tier.copies(), tier.files()) == ([], [])


@pytest.mark.parametrize("how", ["nothing sent", "a part sent", "all sent", "damaged"])
def test_the_upload_of_an_interrupted_save_is_finished(bucket, tmp_path, monkeypatch, how):
    url = f"{bucket.url}/run"
    with CheckpointManager(url, local=tmp_path, config=bucket.config) as manager, monkeypatch.context() as patch:
        patch.setattr(local_copy, "upload", interrupt)
        with pytest.raises(InterruptedError):
            manager.save(1, {"x": tensor(1)}, {"loss": 2.0})
    [path] = tmp_path.glob("*/steps/*/state.pt")
    key = f"run/{path.relative_to(path.parents[2])}"
    if how == "a part sent":
        bucket.boto.create_multipart_upload(Bucket=bucket.name, Key=key)
    elif how == "all sent":
        bucket.write(key, path.read_bytes())
    elif how == "damaged":
        path.write_bytes(path.read_bytes()[::-1])
    steps, commits, ranks = LocalSteps(tmp_path, 1, url), Commits(url, bucket.config), Ranks()
    steps.open(ranks, {})
    [copy] = steps.copies()
    sent = finish_upload(Copies(copy.attempt, {"x": copy}), steps, commits, ranks, bucket.config)
    assert bucket.uploads() == []
    if how == "damaged":
        assert (sent, steps.copies(), bucket.keys()) == (None, [], [])
        return
    assert (sent, sent.local, sent.metrics) == (commits.read(1), None, {"loss": 2.0})
    manager = CheckpointManager(url, config=bucket.config)
    assert (manager.steps(), saved_value(manager), manager.leftovers()) == ([1], 1.0, [])
    steps.close()
