"""Takes one measurement of accelerators as MLPerf Storage emulates them: DLIO's loop, one process for each. Leaves how
many there are to `mlperf`. `python -m benchmarks.dlio FEED` is a feed's nursery.
"""

import dataclasses
import functools
import multiprocessing
import statistics
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

from benchmarks.feeds import Feed, Plan, load
from benchmarks.lab.objects import Family, check
from benchmarks.lab.place import Place
from benchmarks.nursery import serve

# A step in which nobody comes to the barrier is a failure, not a wait.
_BARRIER_S = 60.0


@dataclass(frozen=True)
class Accelerators:
    """What one measurement runs."""

    plan: Plan
    """Each has a permutation of its own of all objects, and workers of its own."""
    accelerators: int
    batch_s: float
    """Each sleeps so long with a batch."""
    steps: int
    """Beside the first, which does not count. All within one epoch."""


@dataclass(frozen=True)
class Found:
    """What all ranks did, without the first step."""

    accelerators: int
    au: float
    """The mean over ranks."""
    samples_per_s: float
    """Of all ranks together."""


def _train(feed: Feed, run: Accelerators, rank: int, barrier: Any) -> dict[str, float]:
    """Read, compute, meet. Running time is counted from the end of the first step."""
    run.plan.place.enter()
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


def _rank(feed: Feed, run: Accelerators, rank: int, barrier: Any, said: Any) -> None:
    try:
        said.send(_train(feed, run, rank, barrier))
    except Exception:
        # The others are to fail too, not to wait.
        barrier.abort()
        said.send({"error": traceback.format_exc()})


def measure(feed: Feed, run: Accelerators) -> Found:
    """Runs the accelerators, each a forked process with its own dataset, loader and workers."""
    context = multiprocessing.get_context("fork")
    ranks = run.accelerators
    barrier = context.Barrier(ranks)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(feed, run, rank, barrier, said)) for rank, (_, said) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    limit_s = 2 * _BARRIER_S + run.steps * (run.batch_s + 1.0)
    answers = [_answer(heard, limit_s) for heard, _ in pipes]
    for process in processes:
        process.join(10.0)
        process.kill()
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed:
        # The first to fail broke the barrier of the others.
        raise RuntimeError(min(failed, key=lambda text: "BrokenBarrierError" in text))
    au = statistics.mean(answer["compute_s"] / answer["running_s"] for answer in answers)
    samples = sum(run.steps * run.plan.batch / answer["running_s"] for answer in answers)
    return Found(ranks, au, samples)


def _answer(heard: Any, limit_s: float) -> Any:
    return heard.recv() if heard.poll(limit_s) else {"error": f"did not end within {limit_s:.0f} s"}


def _work(feed: Feed, fields: dict[str, Any]) -> dict[str, Any]:
    plan = fields.pop("plan")
    place, family = Place(**plan.pop("place")), Family(**plan.pop("family"))
    return dataclasses.asdict(measure(feed, Accelerators(Plan(place, family, **plan), **fields)))


if __name__ == "__main__":
    serve(functools.partial(_work, load(sys.argv[1])))
