"""Trainings of other frameworks that are killed at a random moment, resume, and must end as if they had not been.

A moment is a Python call of the training, at which it kills itself, or a request, whose answer the server holds until the
kill. `train` runs in processes that are forked from the test, which has imported the framework.
"""

import itertools
import json
import multiprocessing.connection
import os
import signal
import sys
import threading
from typing import NamedTuple

from tests.support.killing import HELD_S, kill_at
from tests.support.ranks import LONGEST_S, on_one_machine, started


class Training(NamedTuple):
    """A training: `train(rank, url, config, folder)` returns what it resumed from, and its losses."""

    train: object
    size: int
    folder: object

    def run(self, url=None, config=None, kill_at_call=None, killed_rank=0):
        """Runs it to its end, and returns the results of the first rank: what `train` returned, and its calls.

        Without `url` the training saves nothing. Returns None if it was killed: the others of a job end then, as torchrun
        would end them.
        """
        out = self.folder / "results.json"
        out.unlink(missing_ok=True)
        arguments = self.train, url, config, self.folder, out, self.size, (kill_at_call, killed_rank)
        with started(_rank, *arguments, size=self.size) as ranks:
            _wait(ranks)
        return json.loads(out.read_text()) if out.exists() else None

    def run_until_request(self, control, number, url, config, *, is_answered):
        """Runs it until a request is held, and kills all ranks. Returns the results if it came to its end before."""
        held = {"delay_first_byte_s": HELD_S} | ({} if is_answered else {"status": 500})
        control.faults({"skip": number, "times": 1, "action": held})
        out = self.folder / "results.json"
        out.unlink(missing_ok=True)
        arguments = self.train, url, config, self.folder, out, self.size, (None, 0)
        with started(_rank, *arguments, size=self.size) as ranks:
            if not kill_at(control, ranks[0].pid):
                _wait(ranks)
        control.clear_faults()
        return json.loads(out.read_text()) if out.exists() else None


def _wait(ranks):
    """Waits until all have ended, or one has failed: the others are killed at the end of `started`."""
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = multiprocessing.connection.wait(list(running), LONGEST_S)
        assert ended, "the ranks do not end"
        for each in ended:
            rank = running.pop(each)
            # Its sentinel may end before the system has its exit code.
            rank.join()
            if rank.exitcode:
                return


def _rank(rank, train, url, config, folder, out, size, kill):
    if size > 1:
        on_one_machine(rank, size)
    calls = _count_calls(kill[0] if rank == kill[1] else None)
    resumed, losses = train(rank, url, config, folder)
    sys.setprofile(None)
    if rank == 0:
        out.write_text(json.dumps({"resumed": resumed, "losses": losses, "calls": next(calls)}))


def _count_calls(last):
    """Counts the calls of all threads, of functions of Python and of C. Kills the process at call number `last`."""
    calls = itertools.count(1)

    def count(*_):
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)
    return calls
