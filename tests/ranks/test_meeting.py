"""The ranks of a job, or the only one."""

import contextlib
import multiprocessing
import os
import threading

import pytest
import torch

from tests.support.ranks import LONGEST_S, run_ranks, started
from torchobj.ranks import meeting as ranks


def test_without_torch_distributed_there_is_one_rank():
    alone = ranks.Ranks()
    assert (alone.several, alone.is_first, alone.group) == (False, True, None)
    with alone.meeting() as meeting:
        assert meeting.gather(3) == [3]
        meeting.result = 4
    assert meeting.result == 4
    alone.agree(None)
    with pytest.raises(KeyError):
        alone.agree(KeyError("k"))
    with pytest.raises(KeyError), alone.meeting():
        raise KeyError("k")


class WorkError(Exception):
    pass


def met(rank, failing):
    """The result of a meeting, or its error: `failing` says who fails where."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    own = ranks.Ranks()
    found = []
    for who, where in failing:
        try:
            with own.meeting() as meeting:
                if (who, where) == (rank, "before"):
                    raise WorkError(f"of rank {rank}")
                given = (lambda: 1) if (who, where) == (rank, "pickling") else rank
                values = meeting.gather(given) if where != "nothing" else None
                if values is not None:
                    if where == "combining":
                        raise WorkError("of the first rank")
                    meeting.result = (lambda: 1) if where == "result" else sum(values)
            found.append(meeting.result)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}".partition(" <")[0])
    return found


def test_every_rank_has_the_result_of_a_meeting_or_the_first_error():
    failing = [(None, None), (0, "before"), (2, "before"), (1, "pickling"), (0, "combining"), (0, "result")]
    for found in run_ranks(met, [*failing, (None, "nothing"), (None, None)], size=3):
        assert found[:3] == [3, "WorkError: of rank 0", "WorkError: of rank 2"]
        assert all("pickle" in found[at] and "lambda" in found[at] for at in (3, 5))
        assert found[4] == "WorkError: of the first rank"
        # Nothing is left of a meeting that failed.
        assert found[6:] == [None, 3]


def waiting(rank, gone, first_began, ends):
    torch.distributed.init_process_group("gloo")
    own = ranks.Ranks()
    with own.meeting() as meeting:
        meeting.result = meeting.gather(rank)
    assert meeting.result == [0, 1, 2]

    def meet():
        with own.meeting() as meeting:
            meeting.gather(None)

    if rank == 1:
        # It is gone while the others wait for the first one.
        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        assert first_began.wait(60)
        gone.set()
        os._exit(0)
    for _ in range(2):
        # Those that the first one has reached fail at the next meeting.
        try:
            with own.meeting() as meeting:
                if meeting.gather(None) is not None:
                    first_began.set()
                    assert gone.wait(60)
        except ranks.RankGoneError as error:
            ends.put((rank, str(error).partition(":")[0]))
    with contextlib.suppress(ranks.RankGoneError):
        meet()


def test_no_rank_waits_for_the_first_one_after_another_is_gone():
    context = multiprocessing.get_context("fork")
    gone, first_began, ends = context.Event(), context.Event(), context.Queue()
    with started(waiting, gone, first_began, ends, size=3) as processes:
        found = [ends.get(timeout=LONGEST_S) for _ in range(3)]
        for process in processes:
            process.join(LONGEST_S)
    assert {rank for rank, _ in found} == {0, 2}
    assert {text for _, text in found} == {"another rank is gone"}
