"""Takes one measurement of accelerators as MLPerf Storage emulates them: DLIO's loop, one process per accelerator.
`mlperf.py` chooses their number, `rivals.feeds` has the loaders.
"""

import dataclasses
import multiprocessing
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
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


def _train(feed: Feed, run: Accelerators, rank: int, barrier: Any) -> dict[str, float]:
    """Reads, computes and waits at the barrier. Running time starts at the end of the first step."""
    run.plan.location.enter()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    size = run.plan.family.size
    loader = feed.loader(dataclasses.replace(run.plan, seed=run.plan.seed + rank))
    batches = iter(loader)
    barrier.wait(_BARRIER_S)
    began_s = 0.0
    for step in range(run.steps + 1):
        batch = next(batches)
        names = feed.names(batch)
        if (len(names), feed.bytes(batch)) != (run.plan.batch, run.plan.batch * size):
            raise AssertionError(f"{feed.bytes(batch)} bytes in a batch of {len(names)} objects of {size}")
        position = step % len(names)
        check(names[position], size, feed.content(batch, position).numpy())
        time.sleep(run.batch_s)
        barrier.wait(_BARRIER_S)
        if step == 0:
            began_s = time.perf_counter()
    return {"running_s": time.perf_counter() - began_s, "compute_s": run.steps * run.batch_s}


def _rank(feed: Feed, run: Accelerators, rank: int, barrier: Any, sender: Any) -> None:
    try:
        sender.send(_train(feed, run, rank, barrier))
    except Exception:
        # Makes the other ranks fail instead of wait.
        barrier.abort()
        sender.send({"error": traceback.format_exc()})


def measure(run: Accelerators, make: Callable[[], Feed]) -> Found:
    """Runs the accelerators, each a forked process with its own dataset, loader and workers."""
    feed = make()
    context = multiprocessing.get_context("fork")
    ranks = run.accelerators
    barrier = context.Barrier(ranks)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(feed, run, rank, barrier, sender)) for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    limit_s = 2 * _BARRIER_S + run.steps * (run.batch_s + 1.0)
    answers = [_answer(receiver, limit_s) for receiver, _ in pipes]
    for process in processes:
        process.join(10.0)
        process.kill()
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed:
        # The first rank to fail broke the barrier of the others.
        raise RuntimeError(min(failed, key=lambda text: "BrokenBarrierError" in text))
    au = statistics.mean(answer["compute_s"] / answer["running_s"] for answer in answers)
    samples = sum(run.steps * run.plan.batch / answer["running_s"] for answer in answers)
    return Found(ranks, au, samples)


def _answer(receiver: Any, limit_s: float) -> Any:
    return receiver.recv() if receiver.poll(limit_s) else {"error": f"did not end within {limit_s:.0f} s"}
