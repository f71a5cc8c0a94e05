"""The ranks of a job, or the only one."""

import contextlib
import multiprocessing
import os
import threading

import pytest
import torch

from tests.support.ranks import LONGEST_S, started
from torchobj.checkpoint.state import ranks


def test_without_torch_distributed_there_is_one_rank():
    alone = ranks.Ranks()
    assert (alone.several, alone.is_first, alone.group, alone.all_reduce(lambda: 3, sum)) == (False, True, None, 3)
    alone.agree(None)
    with pytest.raises(KeyError):
        alone.agree(KeyError("k"))


def waiting(rank, gone, first_began, ends):
    torch.distributed.init_process_group("gloo")
    own = ranks.Ranks()
    assert own.gather(rank) == [0, 1, 2]

    def combine(_):
        first_began.set()
        assert gone.wait(60)

    if rank == 1:
        # It is gone while the others wait for the first one.
        thread = threading.Thread(target=own.gather, args=(None,), daemon=True)
        thread.start()
        assert first_began.wait(60)
        gone.set()
        os._exit(0)
    for _ in range(2):
        # Those that the first one has reached fail at the next meeting.
        try:
            own.all_reduce(lambda: None, combine)
        except ranks.RankGoneError as error:
            ends.put((rank, str(error).partition(":")[0]))
    with contextlib.suppress(ranks.RankGoneError):
        own.gather(None)


def test_no_rank_waits_for_the_first_one_after_another_is_gone():
    context = multiprocessing.get_context("fork")
    gone, first_began, ends = context.Event(), context.Event(), context.Queue()
    with started(waiting, gone, first_began, ends, size=3) as processes:
        found = [ends.get(timeout=LONGEST_S) for _ in range(3)]
        for process in processes:
            process.join(LONGEST_S)
    assert {rank for rank, _ in found} == {0, 2}
    assert {text for _, text in found} == {"another rank is gone"}
