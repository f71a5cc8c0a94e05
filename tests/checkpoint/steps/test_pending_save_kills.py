"""A process that is killed at any moment of a save: what was committed loads, what is left is found and swept.

A moment is a request: the server holds the answer to the one of a random number, done or not, and then comes the kill.
"""

import random
import signal
from pathlib import Path

import pytest
import torch

from tests.support.killing import HELD_S, Saver, kill_at
from torchobj.checkpoint import CheckpointManager

#: More than the requests of a save.
MOST_REQUESTS = 24
#: Size of the saved tensor in `checkpoint_killed.py`.
FLOATS = 2_700_000


@pytest.fixture
def saver(bucket):
    saver = Saver(bucket, Path(__file__).with_name("checkpoint_killed.py"))
    yield saver
    saver.close()


def check_committed(manager, earlier):
    """Each committed step loads, and the latest step never decreases."""
    steps = manager.steps()
    assert max(steps) >= max(earlier)
    for step in steps:
        into = {"x": torch.zeros(FLOATS), "step": 0}
        manager.restore(step, into)
        assert (into["step"], into["x"][0].item(), into["x"][-1].item()) == (step, step, step)
    return steps


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("performed", "sharded", "storage_provider", "count"),
    [
        pytest.param(performed, sharded, provider, count, id=f"{provider}-{name}-{count}", marks=marks)
        for provider, count, marks in (("s3", 4, ()), ("s3", 10, pytest.mark.matrix), ("gs", 10, pytest.mark.matrix))
        for performed, sharded, name in (
            (True, False, "request done"),
            (False, False, "request not done"),
            (True, True, "sharded"),
        )
    ],
)
def test_a_save_killed_at_any_moment_damages_no_committed_step(bucket, control, saver, performed, sharded, count):
    moments = random.Random(11 + performed)
    url = f"{bucket.url}/run"
    manager = CheckpointManager(url, config=bucket.config, sharded=sharded)
    saver.begin(url=url, step=1, sharded=sharded, **{"async": False}, overwrite=False)
    assert saver.end() is None
    strangers = {"run/steps/notes.txt", "run/commits/notes.txt", "elsewhere"}
    for key in strangers:
        bucket.write(key, b"x")
    kills = found = 0
    held = {"delay_first_byte_s": HELD_S} | ({} if performed else {"status": 500})
    while kills < count:
        earlier = manager.steps()
        overwrite = moments.random() < 0.3
        step = max(earlier) if overwrite else max(earlier) + 1
        control.faults({"skip": moments.randrange(MOST_REQUESTS), "times": 1, "action": held})
        orders = {"async": moments.random() < 0.5 and not overwrite, "overwrite": overwrite}
        pid = saver.begin(url=url, step=step, sharded=sharded, **orders)
        killed = kill_at(control, pid)
        assert saver.end() == (signal.SIGKILL if killed else None)
        control.clear_faults()
        kills += killed
        steps = manager.steps()
        left = manager.leftovers()
        found += len(left)
        keys = set(bucket.keys())
        assert {(item.key, item.upload and item.upload.upload_id) for item in manager.sweep(0)} == {
            (item.key, item.upload and item.upload.upload_id) for item in left
        }
        assert set(bucket.keys()) == keys - {f"run/{item.key}" for item in left if item.upload is None}
        assert (bucket.uploads(), manager.leftovers()) == ([], [])
        assert check_committed(manager, earlier) == steps
        assert len({key.split("/")[2] for key in bucket.keys() if key.startswith("run/steps/0")}) == len(steps)
    assert strangers < set(bucket.keys())
    assert found > 0
