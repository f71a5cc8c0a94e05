"""A process that is killed at any moment of a save or a restore of a folder: what was committed is whole, and nothing else
looks as if it were.

A moment is a request: the server holds the answer to the one of a random number, done or not, and then comes the kill.
"""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.checkpoint.steps.folder_killed import content_of
from tests.support.folders import content
from tests.support.killing import HELD_S, Saver, kill_at
from torchobj.checkpoint import FolderCheckpoints

#: More than the requests of a save.
MOST_REQUESTS = 24


@pytest.fixture
def saver(bucket):
    saver = Saver(bucket, Path(__file__).with_name("folder_killed.py"))
    yield saver
    saver.close()


def temporary(parent):
    return [path.name for path in parent.iterdir() if path.name.startswith(".torchobj-")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("performed", "storage_provider", "count"),
    [
        pytest.param(performed, provider, count, id=f"{provider}-{name}-{count}", marks=marks)
        for provider, count, marks in (("s3", 3, ()), ("s3", 15, pytest.mark.matrix), ("gs", 15, pytest.mark.matrix))
        for performed, name in ((True, "request done"), (False, "request not done"))
    ],
)
def test_a_save_killed_at_any_moment_damages_no_committed_step(bucket, control, saver, tmp_path, performed, count):
    moments = random.Random(5 + performed)
    url = f"{bucket.url}/run"
    checkpoints = FolderCheckpoints(url, config=bucket.config)
    orders = {"url": url, "parent": os.fspath(tmp_path), "restore": False}
    saver.begin(step=1, **{"async": False}, **orders)
    assert saver.end() is None
    held = {"delay_first_byte_s": HELD_S} | ({} if performed else {"status": 500})
    kills = left_beside = 0
    while kills < count:
        earlier = max(checkpoints.steps())
        control.faults({"skip": moments.randrange(MOST_REQUESTS), "times": 1, "action": held})
        pid = saver.begin(step=earlier + 1, **{"async": moments.random() < 0.5}, **orders)
        killed = kill_at(control, pid)
        assert saver.end() == (signal.SIGKILL if killed else None)
        control.clear_faults()
        kills += killed
        left_beside += len(temporary(tmp_path))
        checkpoints.sweep(0)
        assert (bucket.uploads(), checkpoints.leftovers()) == ([], [])
        steps = checkpoints.steps()
        assert max(steps) >= earlier
        for step in steps:
            restored = tmp_path / "restored"
            checkpoints.restore(step, restored)
            assert content(restored) == content_of(step)
            shutil.rmtree(restored)
        # The restore removes what the killed process left beside its folder.
        assert temporary(tmp_path) == []
    assert left_beside > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [3, pytest.param(15, marks=pytest.mark.matrix)])
def test_a_restore_killed_at_any_moment_leaves_no_folder(bucket, control, saver, tmp_path, count):
    moments = random.Random(7)
    url = f"{bucket.url}/run"
    orders = {"url": url, "parent": os.fspath(tmp_path), "async": False, "step": 1}
    saver.begin(restore=False, **orders)
    assert saver.end() is None
    restored, kills = tmp_path / "restored-1", 0
    while kills < count:
        control.faults({"skip": moments.randrange(8), "times": 1, "action": {"delay_first_byte_s": HELD_S}})
        pid = saver.begin(restore=True, **orders)
        killed = kill_at(control, pid)
        assert saver.end() == (signal.SIGKILL if killed else None)
        control.clear_faults()
        kills += killed
        assert restored.exists() is not killed
        if not killed:
            assert content(restored) == content_of(1)
            shutil.rmtree(restored)
    FolderCheckpoints(url, config=bucket.config).restore(1, restored)
    assert (content(restored), temporary(tmp_path)) == (content_of(1), [])
