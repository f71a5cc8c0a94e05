"""Takes one measurement of accelerators as MLPerf Storage emulates them: DLIO's loop, one process per accelerator.
`mlperf.py` chooses their number, `rivals.feeds` has the loaders.
"""

import dataclasses
import multiprocessing
import statistics
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.rivals.feeds import Feed, Plan
from benchmarks.lab.objects import check

# A step that a rank does not reach is a failure after this time.
_BARRIER_S = 60.0


@dataclass(frozen=True)
class Accelerators:
    """The parameters of one measurement."""

    plan: Plan
    """Each has its own permutation of all objects and its own workers."""
    accelerators: int
    batch_s: float
    """Sleep per batch, in each accelerator."""
    steps: int
    """Counted steps, all within one epoch; the first step is extra and does not count."""


@dataclass(frozen=True)
class Found:
    """The result of all ranks, without the first step."""

    accelerators: int
    au: float
    """The mean over ranks."""
    samples_per_s: float
    """The sum over all ranks."""


_shared: tuple[Feed, Any]
"""The loader and the barrier of all ranks, in each of their processes."""


def _enter(*shared: Any) -> None:
    global _shared  # noqa: PLW0603  state of a rank's process
    _shared = shared


def _rank(run: Accelerators, rank: int) -> float:
    try:
        return _running_s(*_shared, run, rank)
    except Exception:
        # Makes the other ranks fail instead of wait.
        _shared[1].abort()
        raise


def _running_s(feed: Feed, barrier: Any, run: Accelerators, rank: int) -> float:
    """Reads, computes and waits at the barrier. Returns the time from the end of the first step."""
    run.plan.location.enter()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    size = run.plan.family.size
    loader = feed.loader(dataclasses.replace(run.plan, seed=run.plan.seed + rank))
    batches = iter(loader)
    barrier.wait(_BARRIER_S)
    began_s = 0.0
    for step in range(run.steps + 1):
        names, got, sample = feed.unpacked(next(batches))
        if (len(names), got) != (run.plan.batch, run.plan.batch * size):
            raise AssertionError(f"{got} bytes in a batch of {len(names)} objects of {size}")
        position = step % len(names)
        check(names[position], size, sample(position).numpy())
        time.sleep(run.batch_s)
        barrier.wait(_BARRIER_S)
        if step == 0:
            began_s = time.perf_counter()
    return time.perf_counter() - began_s


def measure(run: Accelerators, feed: Feed) -> Found:
    """Runs the accelerators, each a forked process with its own dataset, loader and workers."""
    ranks, context = run.accelerators, multiprocessing.get_context("fork")
    with ProcessPoolExecutor(ranks, context, _enter, (feed, context.Barrier(ranks))) as pool:
        futures = [pool.submit(_rank, run, rank) for rank in range(ranks)]
    # The first rank to fail broke the barrier of the others.
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    running_s = [future.result() for future in futures]
    au = statistics.mean(run.steps * run.batch_s / each_s for each_s in running_s)
    return Found(ranks, au, sum(run.steps * run.plan.batch / each_s for each_s in running_s))
