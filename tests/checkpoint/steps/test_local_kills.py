"""Jobs that are killed at random moments of a save, some of which lose a disk: the next one restores the newest step
that all of its ranks can have.

A moment is a call or a return of a function in the local write, the upload, the commit or the deletion of old copies. One
rank or all are killed then: at once, or while the function goes on.
"""

import collections
import contextlib
import json
import os
import random
import signal
import sys
import threading
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.disks import disk_of, lose, on_disks
from tests.support.ranks import run_ranks, started
from torchobj.checkpoint.steps.local_copy import LocalCopy
from torchobj.checkpoint.steps.pending_save import PendingSave

pytestmark = pytest.mark.filterwarnings("ignore")

#: The functions that begin a stage of a save when they are called, or when they return. Those in between do not count.
BEGINS = {
    ("call", LocalCopy._copied.__code__): "local write",
    ("return", LocalCopy._copied.__code__): "upload",
    ("call", PendingSave.commit.__code__): "commit",
    ("call", PendingSave.prune.__code__): None,
    ("call", LocalCopy.mark.__code__): "prune",
    ("call", LocalCopy.prune.__code__): "prune",
}
#: About the number of events of a stage; a local write of one file has a quarter.
EVENTS = {"local write": 8000, "upload": 1500, "commit": 1000, "prune": 2700}


class Killer:
    """Kills the job at an event of a stage in one of its ranks."""

    def __init__(self, pids, moment, delayed):
        self._pids, self._moment, self._delayed = pids, moment, delayed
        self._stage, self.counted = None, collections.Counter()

    def __enter__(self):
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _seen(self, frame, event, _):
        self._stage = BEGINS.get((event, frame.f_code), self._stage)
        self.counted[self._stage] += 1
        if (self._stage, self.counted[self._stage]) == self._moment:
            if self._delayed:
                threading.Thread(target=self._kill, daemon=True).start()
            else:
                self._kill()

    def _kill(self):
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)


def job(rank, root, machines, sharded, pids, orders, step):
    """Restores, and saves steps until it is killed in the last one."""
    pids[rank] = os.getpid()
    torch.set_num_threads(1)
    manager = on_disks(rank, root, machines=machines, sharded=sharded)
    dist.barrier()
    if step:
        manager.restore(into=state(0, rank, sharded))
    # This rank last: it cannot kill another one then.
    victims = [pids[1 - rank], pids[rank]] if orders["all"] else [pids[rank]]
    killer = Killer(victims, orders["moment"], orders["delayed"])
    for number in range(1, orders["saves"] + 1):
        is_last = number == orders["saves"]
        value = orders["value"] + number
        with killer if is_last and rank == orders["rank"] else contextlib.nullcontext():
            manager.save_async(step + number, state(value, rank, sharded), {"value": value}).result()
    # The moment was not reached.
    os._exit(0)


def state(value, rank, sharded):
    """A state of which each rank has a part, if it is sharded."""
    whole = torch.arange(1024.0) + value
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        whole = distribute_tensor(whole, mesh, [Shard(0)])
    return {
        "whole": whole,
        "x": torch.full((50_000,), float(value)),
        "own": torch.full((1000,), value + 0.5 * rank),
        "value": value,
    }


def restored(rank, root, machines, sharded):
    into = state(0, rank, sharded)
    with on_disks(rank, root, machines=machines, sharded=sharded) as manager:
        manager.restore(into=into)
    whole = into["whole"].full_tensor() if sharded else into["whole"]
    assert torch.equal(whole, torch.arange(1024.0) + into["value"])
    assert into["x"].unique().tolist() == [into["value"]]
    assert into["own"].unique().tolist() == [into["value"] + 0.5 * rank]
    return into["value"]


def newest(root, machines):
    """Step and value of the newest step that the bucket has, or all disks together: by the files alone."""
    commits = [json.loads(path.read_text()) for path in (root / "bucket" / "commits").glob("*.json")]
    latest = max((each["step"] for each in commits), default=-1)
    objects, newer = collections.defaultdict(set), {}
    for disk in range(machines):
        for path in disk_of(root, disk).glob("*/commits/*.json"):
            copy = json.loads(path.read_text())
            newer |= {copy["nonce"]: copy} if copy["local"]["continues"] and copy["step"] > latest else {}
            objects[copy["nonce"]] |= {each["key"] for each in copy["objects"]}
    complete = [copy for nonce, copy in newer.items() if len(objects[nonce]) == copy["local"]["total"]]
    chosen = max([*commits, *complete], key=lambda each: each["step"], default=None)
    return None if chosen is None else (chosen["step"], chosen["metrics"]["value"])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("machines", "sharded", "kills"),
    [
        pytest.param(machines, sharded, kills, id=f"{machines}-{'shards' if sharded else 'file'}-{kills}", marks=marks)
        for kills, marks in ((1, ()), (34, pytest.mark.matrix))
        for machines, sharded in ((1, True), (2, True), (2, False))
    ],
)
def test_a_killed_job_resumes_from_the_newest_step_that_is_complete(tmp_path, machines, sharded, kills):
    moments = random.Random(44 + 2 * machines + sharded)
    killed = jobs = step = 0
    while killed < kills:
        jobs += 1
        stage, pids = moments.choice(list(EVENTS)), get_context("fork").Array("i", 2)
        most = EVENTS[stage] // (1 if sharded or stage != "local write" else 4)
        moment, delayed = (stage, moments.randrange(most) + 1), moments.random() < 0.5
        # Only the first rank commits.
        rank = 0 if stage == "commit" else moments.randrange(2)
        orders = {"moment": moment, "delayed": delayed, "rank": rank, "all": moments.random() < 0.5}
        orders |= {"saves": moments.randrange(1, 4), "value": 100 * jobs}
        with started(job, tmp_path, machines, sharded, pids, orders, step) as ranks:
            for rank in ranks:
                rank.join(100)
            ended = {rank.exitcode for rank in ranks}
        if ended == {0}:
            step += orders["saves"]
            continue
        # A rank that finds that the other one is gone ends with an error.
        assert -signal.SIGKILL in ended
        killed += 1
        if moments.random() < 0.3:
            lose(tmp_path, moments.randrange(machines))
        expected = newest(tmp_path, machines)
        if expected is None:
            step = 0
            continue
        values = run_ranks(restored, tmp_path, machines, sharded)
        assert values == [expected[1]] * 2, (orders, expected)
        step = expected[0]
