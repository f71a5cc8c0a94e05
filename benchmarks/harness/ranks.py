"""Measures what several ranks of one machine do at the same time. Each is a process, and together they are a gloo
group. `measure` measures one process.
"""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.measure import Timed, Worker, cpu_s, touch
from benchmarks.lab import origin
from benchmarks.lab.location import Location

_LOOK_S = 0.02
_GLOO_TIMEOUT = timedelta(seconds=120)


def _resident_bytes(pids: Sequence[int]) -> int:
    """The resident memory of processes, with what they share counted once: the most that one of them has."""
    private = shared = 0
    for pid in pids:
        lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        # None of a process that has ended.
        fields = {name: int(value.split()[0]) << 10 for name, _, value in lines if name.startswith("Rss")}
        private += fields.get("RssAnon", 0) + fields.get("RssFile", 0)
        shared = max(shared, fields.get("RssShmem", 0))
    return private + shared


class _Rank:
    """A process that does the work of a rank in steps, each of which ends with an answer."""

    def __init__(self, rank: int, ranks: int, folder: str, make: Callable[[], Worker]) -> None:
        self._rank, self._ranks, self._folder, self._make = rank, ranks, folder, make
        self.pipe, self._end = multiprocessing.Pipe()
        # Forked from a process that has imported everything, and has no threads.
        self.process = multiprocessing.get_context("fork").Process(target=self._run, daemon=True)
        self.process.start()
        self._end.close()

    def _run(self) -> None:
        try:
            self._enter_group()
            worker = self._make()
            worker.warm()
            self._answer(None)
            started_s = cpu_s()
            items = worker.run()
            self._answer((items, cpu_s() - started_s))
            worker.check()
            self._answer(None)
        # CheckpointException of torch is a BaseException.
        except BaseException:
            self._end.send(("error", traceback.format_exc()))
        # A client may have left threads.
        os._exit(0)

    def _answer(self, value: Any) -> None:
        """Answers, and waits until the next step is due."""
        self._end.send(("done", value))
        self._end.recv()

    def _enter_group(self) -> None:
        if self._ranks == 1:
            return
        from torch import distributed

        number, ranks = str(self._rank), str(self._ranks)
        os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        where = {"init_method": f"file://{self._folder}/group", "rank": self._rank, "world_size": self._ranks}
        distributed.init_process_group("gloo", timeout=_GLOO_TIMEOUT, **where)


def _answers(ranks: Sequence[_Rank], look: Callable[[], None]) -> list[Any]:
    """Waits for an answer of each rank, and calls `look` meanwhile.

    Raises:
        RuntimeError: A rank failed, with its traceback.
    """
    answers: dict[int, Any] = {}
    waited = {rank.pipe: number for number, rank in enumerate(ranks)}
    while waited:
        for pipe in connection.wait(list(waited), _LOOK_S):
            number = waited.pop(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "error", f"rank {number} died"
            if kind == "error":
                raise RuntimeError(value)
            answers[number] = value
        look()
    return [answers[number] for number in sorted(answers)]


def in_ranks(
    number: int, location: Location, counted: Location, touch_bytes: int, make: Callable[[Any], Worker], client: Any
) -> Timed:
    """Runs a worker in each of `number` ranks.

    Args:
        number: That of the ranks.
        location: What the process enters.
        counted: The location whose origin counts.
        touch_bytes: As for `measure.touch`, at most half of what is free.
        make: Makes the worker of a rank from the client's class, after the group exists.
        client: That class.

    Returns:
        The time from the common start to the end of the last rank, the CPU time of all, the growth of the memory of all
        at its peak, and the items of the first.
    """
    location.enter()
    touch(min(touch_bytes, psutil.virtual_memory().available // 2))
    memory = tempfile.TemporaryDirectory(prefix="torchobj-ranks-", dir="/dev/shm")
    with memory as folder, contextlib.ExitStack() as stack:
        # All ranks have the same folder for temporary files. It is deleted here, since ranks end without finalizers.
        tempfile.tempdir = folder
        ranks = [_Rank(rank, number, folder, partial(make, client)) for rank in range(number)]
        for rank in ranks:
            stack.callback(rank.process.kill)
        pids = [rank.process.pid or 0 for rank in ranks]
        _answers(ranks, lambda: None)
        before, before_bytes = origin.counters(counted), _resident_bytes(pids)
        peak_bytes = before_bytes

        def look() -> None:
            nonlocal peak_bytes
            peak_bytes = max(peak_bytes, _resident_bytes(pids))

        started_s = time.perf_counter()
        for rank in ranks:
            rank.pipe.send(None)
        done = _answers(ranks, look)
        wall_s = time.perf_counter() - started_s
        counters = origin.counters(counted) - before
        for rank in ranks:
            rank.pipe.send(None)
        _answers(ranks, lambda: None)
    used_s = sum(each for _, each in done)
    return Timed(wall_s, used_s, peak_bytes - before_bytes, done[0][0], dict(counters))
