"""A save with a deadline gives up in time, whatever it waits for; the older step stays, and the process can exit."""

import concurrent.futures
import dataclasses
import pickle
import signal
import threading
import time
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support import warm_python
from tests.support.killing import HELD_S
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import LARGE, Gate, of_ranks, outcome, saved_value, tensor, whole_and_shard
from tests.support.ranks import run_ranks
from torchobj.checkpoint import CheckpointManager, FolderCheckpoints
from torchobj.exceptions import CheckpointError, ConfigError

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

#: A deadline of saves that give up, and one that saves do not need.
SHORT_S, LONG_S = 0.8, 60.0


@pytest.fixture
def url(bucket):
    return f"{bucket.url}/run"


@pytest.fixture
def checkpoints(bucket, url):
    with CheckpointManager(url, config=bucket.config) as manager:
        manager.save(1, {"x": tensor(1)})
        yield manager


def gives_up(manager, state=None, step=2, deadline_s=SHORT_S):
    """Returns the error of a save that gives up before what it waits for has come."""
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match="deadline") as raised:
        manager.save(step, state or {"x": tensor(2)}, deadline_s=deadline_s)
    assert time.monotonic() - began_s < HELD_S / 2
    return str(raised.value)


def test_a_save_with_time_is_committed_and_deletes_no_older_step(checkpoints):
    checkpoints._rules = dataclasses.replace(checkpoints._rules, keep_last=1)
    checkpoints.save(2, {"x": tensor(2)}, deadline_s=LONG_S)
    assert (checkpoints.steps(), saved_value(checkpoints)) == ([1, 2], 2.0)
    checkpoints.save(3, {"x": tensor(3)})
    assert checkpoints.steps() == [3]


@pytest.mark.parametrize("request_number", range(4), ids=["begin", "data", "listing", "commit"])
def test_a_save_gives_up_whichever_request_has_no_response(checkpoints, control, request_number):
    control.faults({"skip": request_number, "times": 1, "action": {"delay_first_byte_s": HELD_S, "status": 500}})
    message = gives_up(checkpoints)
    assert ("call steps()" in message) is (request_number == 3)
    control.clear_faults()
    assert checkpoints.steps() == [1]
    # What is left does not prevent another save of the step.
    checkpoints.save(2, {"x": tensor(2)}, deadline_s=LONG_S)
    assert checkpoints.steps() == [1, 2]


def test_a_save_of_a_folder_gives_up_and_leaves_no_links(bucket, url, control, tmp_path):
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"weights")
    with FolderCheckpoints(url, config=bucket.config) as checkpoints:
        # The request that begins the save, the listing of the last one, and the file.
        control.faults({"skip": 2, "times": 1, "action": {"delay_first_byte_s": HELD_S, "status": 500}})
        gives_up(checkpoints, folder)
        control.clear_faults()
        assert (checkpoints.steps(), list(tmp_path.iterdir())) == ([], [folder])
        checkpoints.save(2, folder, deadline_s=LONG_S)
        assert checkpoints.restore(2, tmp_path / "restored") == 2
    assert (tmp_path / "restored" / "model.bin").read_bytes() == b"weights"


def test_a_save_that_gives_up_leaves_its_copy_on_the_local_disk(bucket, url, control, tmp_path):
    with CheckpointManager(url, local=tmp_path, config=bucket.config) as manager:
        manager.save(1, {"x": tensor(1)})
        control.faults({"skip": 1, "times": 1, "action": {"delay_first_byte_s": HELD_S, "status": 500}})
        assert "the local disks have it" in gives_up(manager)
        control.clear_faults()
        assert (manager.steps(), saved_value(manager)) == ([1], 2.0)


def test_a_commit_that_takes_effect_after_the_deadline_is_not_called_uncommitted(checkpoints, control):
    control.faults({"skip": 3, "times": 1, "action": {"delay_first_byte_s": HELD_S}})
    assert "it is not known whether it was committed" in gives_up(checkpoints)
    control.clear_faults()
    assert checkpoints.steps() == [1, 2]


def test_a_save_gives_up_if_the_bandwidth_is_too_low(bucket, url, checkpoints):
    slow = dataclasses.replace(bucket.config, upload_mbit_s=8)
    with CheckpointManager(url, config=slow) as manager:
        gives_up(manager, {"x": tensor(2, 3 * LARGE)})
    assert (checkpoints.steps(), saved_value(checkpoints)) == ([1], 1.0)
    checkpoints.sweep(0)
    assert checkpoints.leftovers() == []


def test_a_background_save_gets_the_time_first_and_is_aborted(checkpoints, control):
    control.faults({"skip": 1, "times": 1, "action": {"delay_first_byte_s": HELD_S, "status": 500}})
    handle = checkpoints.save_async(2, {"x": tensor(2)})
    assert "step 2 was still being saved at the deadline" in gives_up(checkpoints, step=3)
    assert "deadline" in str(handle.exception(HELD_S / 2))
    assert checkpoints.steps() == [1]


def test_after_a_request_to_stop_a_manager_waits_for_a_background_save_until_the_deadline(checkpoints, control):
    control.faults({"skip": 1, "times": 1, "action": {"delay_first_byte_s": HELD_S, "status": 500}})
    checkpoints.on_signal(signal.SIGUSR1, deadline_s=SHORT_S)
    checkpoints.save_async(2, {"x": tensor(2)})
    signal.raise_signal(signal.SIGUSR1)
    assert checkpoints.stop_requested()
    with pytest.raises(CheckpointError, match="step 2 was still being saved at the deadline"):
        checkpoints.close()
    control.clear_faults()
    assert checkpoints.steps() == [1]


def test_a_program_that_goes_on_after_the_deadline_saves_without_one(checkpoints, monkeypatch):
    with checkpoints.on_signal(signal.SIGUSR1):
        signal.raise_signal(signal.SIGUSR1)
        assert checkpoints.stop_requested()
    assert checkpoints._deadline(None) is not None
    monkeypatch.setattr(checkpoints._stop, "end_s", time.monotonic())
    checkpoints.save(2, {"x": tensor(2)})
    assert checkpoints.steps() == [1, 2]


def test_a_background_save_that_ends_in_time_is_followed_by_the_save(checkpoints, monkeypatch):
    gate = Gate(monkeypatch)
    checkpoints.save_async(2, {"x": tensor(2)})
    gate.reached.wait()
    threading.Timer(0.05, gate.open.set).start()
    checkpoints.save(3, {"x": tensor(3)}, deadline_s=LONG_S)
    assert checkpoints.steps() == [1, 2, 3]


def test_a_background_save_that_failed_does_not_prevent_a_save_with_a_deadline(checkpoints, control):
    control.faults({"skip": 1, "times": 1, "action": {"status": 403}})
    handle = checkpoints.save_async(2, {"x": tensor(2)})
    concurrent.futures.wait([handle._future])
    checkpoints.save(3, {"x": tensor(3)}, deadline_s=LONG_S)
    assert checkpoints.steps() == [1, 3]


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), "5", True], ids=str)
def test_a_deadline_must_be_a_number_of_seconds(checkpoints, deadline_s):
    with pytest.raises(ConfigError, match="deadline_s"):
        checkpoints.save(2, {"x": tensor(2)}, deadline_s=deadline_s)


_EXITS = """
import pickle, sys, torch
from torchobj.checkpoint import CheckpointManager, FolderCheckpoints
from torchobj.exceptions import CheckpointError
url, config, size, in_background, deadline_s = pickle.loads(bytes.fromhex(sys.argv[1]))
manager, state = CheckpointManager(url, config=config), {"x": torch.ones(size)}
if in_background:
    manager.save_async(2, state)
try:
    manager.save(3, state, deadline_s=deadline_s)
except CheckpointError as error:
    print(type(error).__name__)
"""


def exits(*arguments):
    done = warm_python.run(["-c", _EXITS, pickle.dumps(arguments).hex()], timeout=HELD_S / 2)
    assert (done.returncode, done.stdout) == (0, "DeadlineError\n"), done.stderr


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "background save"])
def test_the_process_exits_although_a_save_has_no_response(bucket, url, checkpoints, control, in_background):
    control.faults({"skip": 1, "times": 1, "action": {"delay_first_byte_s": HELD_S, "status": 500}})
    exits(url, bucket.config, 4, in_background, SHORT_S)
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "background save"])
def test_the_process_exits_if_the_bandwidth_is_too_low(bucket, url, checkpoints, in_background):
    # A save takes three times as long.
    slow = dataclasses.replace(bucket.config, upload_mbit_s=64)
    exits(url, slow, 3 * LARGE, in_background, 1.5)
    assert (checkpoints.steps(), saved_value(checkpoints)) == ([1], 1.0)


def saved_by_ranks(rank, url, config, sharded, slow_rank):
    """Saves with little bandwidth on one rank: the errors, the steps, and whether all was in time."""
    manager = of_ranks(
        url, dataclasses.replace(config, upload_mbit_s=8) if rank == slow_rank else config, sharded=sharded
    )
    whole, shard = whole_and_shard(1)
    manager.save(1, {"x": whole, "shard": shard} if sharded else {"x": whole})
    large = tensor(2, 3 * LARGE)
    large = distribute_tensor(large, shard.device_mesh, [Shard(0)]) if sharded else large
    began_s = time.monotonic()
    error = outcome(lambda: manager.save(2, {"x": large}, deadline_s=1.5))
    in_time = time.monotonic() - began_s < HELD_S / 2
    dist.barrier()
    return error, manager.steps(), in_time


@pytest.mark.parametrize(("sharded", "slow_rank"), [(False, 0), (True, 0), (True, 1)])
def test_all_ranks_give_up_together(bucket, url, sharded, slow_rank):
    for (kind, message), steps, in_time in run_ranks(saved_by_ranks, url, bucket.config, sharded, slow_rank):
        assert (kind, steps, in_time) == ("DeadlineError", [1], True), message


def saved_on_one_rank(rank, url, config):
    manager = of_ranks(url, config)
    manager.save(1, {"x": tensor(1)})
    if rank == 0:
        return [outcome(partial(manager.save, step, {"x": tensor(2)}, deadline_s=SHORT_S)) for step in (2, 3)]
    return None


def test_a_rank_that_does_not_save_is_an_error_at_the_deadline_and_later(bucket, url):
    both, _ = run_ranks(saved_on_one_rank, url, bucket.config)
    assert [kind for kind, _ in both] == ["DeadlineError", "RankGoneError"]
    assert all("the save of step 2 did not begin by its deadline" in message for _, message in both)
