"""SIGTERM at random moments of a loop of two ranks: a step is committed soon after, and the ranks end as without torchobj.

A moment is a place of the loop in a step of one rank; the signal arrives just after, or while the rank waits for a sample.
"""

import dataclasses
import itertools
import multiprocessing.connection
import os
import random
import signal
import statistics
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torchobj
from tests.support.managers import of_ranks
from tests.support.ranks import _context, started
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps.commits import Commits

PLACES = ["step", "loader", "evaluation", "background save"]
TARGETS = ["one rank", "both at different steps", "process group"]
#: The batches of an epoch.
BATCHES = 8
#: A step is committed within this time of the signal.
WITHIN_S = 10.0


class Moment:
    """Where a rank gets its signal: `reached` can be read then. `sent` is set when the signal was sent, or is not sent."""

    def __init__(self, place, step):
        self.place, self.step, self.sent = place, step, _context.Event()
        self.reached, self.announcement = _context.Pipe(duplex=False)

    def pass_by(self, place, step):
        """Returns whether the signal is to be sent now."""
        is_now = step >= self.step and place == self.place and not self.sent.is_set()
        if is_now:
            self.announcement.send_bytes(b"reached")
        return is_now


class Samples(torch.utils.data.Dataset):
    """Samples whose worker waits for the signal, so that the signal finds the loop waiting for the worker."""

    def __init__(self, moment, epoch):
        self.moment, self.epoch = moment, epoch

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        if self.moment.pass_by("loader", self.epoch * BATCHES + index):
            assert self.moment.sent.wait(60)
        return torch.full((4,), float(index))


def train(rank, url, config, moments, committed):
    """Trains until it is asked to stop, saves, and ends as the signal ends a program that does not handle it."""
    os.setpgrp()
    dist.init_process_group("gloo")
    moment, weights = moments[rank], torch.zeros(500_000)
    checkpoints = of_ranks(url, config, keep_last=2)
    step, stopped = 0, False
    with checkpoints, checkpoints.on_signal(check_every_s=0.1):
        for epoch in itertools.count():
            loader = torchobj.DataLoader(Samples(moment, epoch), batch_size=None, num_workers=1, lookahead=0)
            for batch in loader:
                step += 1
                moment.pass_by("step", step)
                gradient = batch.sum()
                dist.all_reduce(gradient)
                weights += gradient
                if step % 3 == 0:
                    for _ in range(5):
                        moment.pass_by("evaluation", step)
                        float(weights[:1000].outer(weights[:1000]).sum())
                        stopped = stopped or checkpoints.stop_requested()
                if step % 4 == 0 and not stopped:
                    checkpoints.save_async(step, {"weights": weights})
                    moment.pass_by("background save", step)
                if stopped or checkpoints.stop_requested():
                    stopped = True
                    break
            if stopped:
                break
        checkpoints.save(step, {"weights": weights}, overwrite=True)
        committed[rank] = time.monotonic()
    signal.raise_signal(signal.SIGTERM)


def signal_at(moment, process, is_group, sent):
    """Sends the signal when the rank has come to the moment, or not, if it ends before."""
    ready = multiprocessing.connection.wait([moment.reached, process.sentinel], 60)
    if moment.reached in ready and process.sentinel not in ready:
        sent.append(time.monotonic())
        (os.killpg if is_group else os.kill)(process.pid, signal.SIGTERM)
    moment.sent.set()


def stop_once(random_, url, config):
    """Returns place, target, and the seconds from the first signal to the commit."""
    place, target = random_.choice(PLACES), random_.choice(TARGETS)
    ranks = [random_.randrange(2)] if target == "one rank" else [0, 1]
    moments = [Moment(place if rank in ranks else None, random_.randrange(1, 12)) for rank in range(2)]
    if target == "process group":
        # The launcher signals the groups of all ranks together.
        moments[1].reached, moments[1].announcement = moments[0].reached, moments[0].announcement
    committed, sent = _context.Array("d", 2), []
    with started(train, url, config, moments, committed) as processes:
        senders = [
            threading.Thread(target=signal_at, args=(moments[rank], processes[rank], target == "process group", sent))
            for rank in ranks
        ]
        for thread in senders:
            thread.start()
        for each in (*processes, *senders):
            each.join(60)
        assert [process.exitcode for process in processes] == [-signal.SIGTERM] * 2
    return place, target, max(committed) - min(sent)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.matrix)])
def test_a_signal_at_any_moment_leads_to_a_committed_step(bucket, count):
    random_, taken = random.Random(count), []
    # So that a background save takes a moment.
    config = dataclasses.replace(bucket.config, upload_mbit_s=100)
    for number in range(count):
        url = f"{bucket.url}/{number}"
        place, target, seconds = stop_once(random_, url, config)
        [*_, latest] = CheckpointManager(url, config=bucket.config).steps()
        assert latest > 0, (place, target)
        assert seconds < WITHIN_S, (place, target)
        taken.append((seconds, place, target))
    print("seconds from signal to commit: median", statistics.median(each[0] for each in taken), "max", max(taken))
    print({(place, target): sum(each[1:] == (place, target) for each in taken) for _, place, target in taken})


@pytest.mark.parametrize("is_written", [False, True], ids=["before the request", "after the response"])
def test_a_signal_in_a_commit_does_not_interrupt_it(bucket, monkeypatch, is_written):
    real, in_commit, sent, held = Commits.publish, threading.Event(), threading.Event(), []

    def hold():
        in_commit.set()
        held.append(sent.wait(60))

    def publish(*given):
        if not is_written:
            hold()
        real(*given)
        if is_written:
            hold()

    def signal_in_commit():
        assert in_commit.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        sent.set()

    monkeypatch.setattr(Commits, "publish", publish)
    url = f"{bucket.url}/run"
    with CheckpointManager(url, config=bucket.config) as checkpoints, checkpoints.on_signal(signal.SIGTERM):
        sender = threading.Thread(target=signal_in_commit)
        sender.start()
        checkpoints.save(1, {"x": torch.ones(4)})
        sender.join()
        assert held == [True]
        assert (checkpoints.stop_requested(), checkpoints.steps()) == (True, [1])
