"""Ranks that restore from local disks: all the same step, whichever disks are lost, damaged, full or locked."""

import fcntl
import resource

import pytest
import torch
import torch.distributed as dist

from tests.support.disks import data_of, disk_of, lose, on_disks, warnings_of
from tests.support.managers import of_ranks, outcome, whole_and_shard
from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint.steps import local_copy
from torchobj.checkpoint.steps.state_content import StateContent

pytestmark = pytest.mark.filterwarnings("ignore")

IN_MATRIX = pytest.mark.matrix


def state_of(value, sharded):
    """A state of which each rank has a part, if it is sharded."""
    return {"x": whole_and_shard(value)[1] if sharded else torch.full((16,), float(value)), "step": value}


def value_of(state):
    x = state["x"]
    return state["step"], (x.to_local() if hasattr(x, "to_local") else x).flatten()[0].item()


def right_value(step, rank, sharded):
    """What a rank restores: its shard starts with other numbers than that of the first rank."""
    return step, float(step + (8 * rank if sharded else 0))


def killed(*given, **named):
    raise exceptions.StoreConnectionError("killed")


def resumed(rank, root, machines, sharded, interrupted, spoil):
    """Saves step 1, and then step 2, of which the upload may be interrupted. A new job restores after `spoil(rank)`.

    Returns its step, the steps of the bucket then, the warnings, and the steps of the bucket after another save.
    """
    manager = on_disks(rank, root, machines=machines, sharded=sharded)
    manager.save(1, state_of(1, sharded))
    real, local_copy.upload = local_copy.upload, killed if interrupted else local_copy.upload
    handle = manager.save_async(2, state_of(2, sharded))
    handle.wait_local()
    assert (outcome(handle.result) is None) != interrupted
    local_copy.upload = real
    manager.close()
    spoil(root, rank)
    dist.barrier()
    into, logged = state_of(0, sharded), warnings_of()
    with on_disks(rank, root, machines=machines, sharded=sharded) as manager:
        manager.restore(into=into)
        steps = manager.steps()
        dist.barrier()
        manager.save(3, state_of(3, sharded))
        again = state_of(0, sharded)
        manager.restore(into=again)
        assert value_of(again) == right_value(3, rank, sharded)
    return value_of(into), steps, logged


def check(root, machines, sharded, interrupted, spoil, step, steps):
    """Checks what all ranks restore, and returns the warnings of the first one, which decides."""
    found = run_ranks(resumed, root, machines, sharded, interrupted, spoil)
    results = [(value, in_bucket) for value, in_bucket, _ in found]
    assert results == [(right_value(step, rank, sharded), steps) for rank in range(2)]
    assert found[1][2] == []
    return found[0][2]


def nothing(root, rank):
    pass


@pytest.mark.parametrize(
    ("machines", "sharded"), [(1, True), (2, True), pytest.param(1, False, marks=IN_MATRIX), (2, False)]
)
def test_a_step_whose_upload_was_interrupted_is_restored_by_all_ranks(tmp_path, machines, sharded):
    # One machine reads its disk; several finish the upload first.
    steps = [1] if machines == 1 else [1, 2]
    assert check(tmp_path, machines, sharded, True, nothing, 2, steps) == []


def lose_first(root, rank):
    if rank == 0:
        lose(root, 0)


def lose_second(root, rank):
    if rank == 1:
        lose(root, 1)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=IN_MATRIX)])
def test_a_step_of_which_a_part_is_lost_is_not_restored(tmp_path, lost):
    warned = check(tmp_path, 2, True, True, [lose_first, lose_second][lost], 1, [1])
    assert len(warned) == 1
    assert f"the local copy of step 2 is not complete: the disks have {1 + lost} of its 3 objects" in warned[0]


@pytest.mark.matrix
@pytest.mark.parametrize("lost", [0, 1])
def test_a_file_is_on_the_disk_of_the_first_rank(tmp_path, lost):
    step, steps = (1, [1]) if lost == 0 else (2, [1, 2])
    assert check(tmp_path, 2, False, True, [lose_first, lose_second][lost], step, steps) == []


@pytest.mark.parametrize("lost", [pytest.param(0, marks=IN_MATRIX), 1])
def test_a_rank_with_a_new_disk_reads_the_bucket(tmp_path, lost):
    assert check(tmp_path, 2, True, False, [lose_first, lose_second][lost], 2, [1, 2]) == []


def flip(root, rank):
    if rank == 1:
        path = data_of(root, 1, 2)
        data = bytearray(path.read_bytes())
        # A number of the tensor: 11.0.
        data[data.index(torch.tensor([11.0]).numpy().tobytes())] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize(("interrupted", "step"), [(False, 2), (True, 1)])
def test_a_damaged_copy_of_one_rank_is_used_by_none(tmp_path, interrupted, step):
    warned = check(tmp_path, 2, True, interrupted, flip, step, [1, 2][: 2 - interrupted])
    assert len(warned) == 1
    assert "the local copy of step 2 is damaged" in warned[0]


def spoil_bucket(root, rank):
    if rank == 1:
        [path] = (root / "bucket").glob(f"steps/*/{data_of(root, 1, 2).name}")
        path.write_bytes(b"\0" * path.stat().st_size)


def test_each_rank_reads_its_own_disk(tmp_path):
    assert check(tmp_path, 2, True, False, spoil_bucket, 2, [1, 2]) == []


def full(rank, root):
    """The disk of the second rank is full, and the first one has space."""
    logged, real = warnings_of(), StateContent.write

    def write(self, folder, writers, copied=None):
        if copied is not None and rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            return real(self, folder, writers, copied)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    with on_disks(rank, root, machines=2, sharded=True) as manager:
        manager.save(1, state_of(1, True))
        StateContent.write = write
        for step in (2, 3):
            handle = manager.save_async(step, state_of(step, True))
            handle.wait_local()
            handle.result()
        files = [path for path in disk_of(root, rank).rglob("*") if path.is_file()]
        return manager.steps(), len(files), logged


def test_a_full_disk_of_one_rank_is_left_out_by_all(tmp_path):
    first, second = run_ranks(full, tmp_path)
    # The file of the lock.
    assert (first[:2], second[:2]) == (([1, 2, 3], 1), ([1, 2, 3], 1))
    assert len(first[2]) == 1
    assert "saved without a local copy" in first[2][0]
    assert second[2] == []


def locked(rank, root):
    manager = on_disks(rank, root, machines=2, sharded=True)
    found = [outcome(lambda: manager.save(1, {"step": 1})), outcome(manager.restore)]
    # Without it on one rank.
    local = {"local": root / "other"} if rank == 0 else {}
    return [*found, outcome(lambda: of_ranks(manager.url, None, **local).save(1, {}))]


def test_a_disk_that_another_job_uses_is_an_error_of_all_ranks(tmp_path):
    disk = disk_of(tmp_path, 1)
    disk.mkdir(parents=True)
    with (disk / ".torchobj-lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = run_ranks(locked, tmp_path)
    for of_save, of_restore, without in found:
        assert of_save[0] == of_restore[0] == without[0] == "ConfigError"
        assert str(disk) in of_save[1] and str(disk) in of_restore[1]
        assert without[1] == "local=False on rank 1, True on rank 0: must be the same on all ranks"
