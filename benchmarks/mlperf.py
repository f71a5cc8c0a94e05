"""How many accelerators of MLPerf Storage's RetinaNet can a loader feed, with every byte delivered?

    python benchmarks/mlperf.py                         # about seven minutes
    python benchmarks/mlperf.py --batch-ms 20           # a faster accelerator than theirs
    python benchmarks/mlperf.py --rounds 1 --steps 20   # a preview: not for publication

RetinaNet-B200 of MLPerf Storage v3: objects of 322,957 bytes, batches of 24, 47.55 ms a batch, and an accelerator
utilisation (AU) of at least 0.85. The loop is DLIO's: an accelerator is a process that sleeps for each batch and
waits for the others at a barrier in each step; the first step does not count; AU is compute time over running time.
Unlike DLIO, which hands a made-up tensor to the trainer, every byte reaches the trainer's process, and one object of
each batch is compared. The server answers after a lognormal 20 ms, and one time in a hundred after 0.1 to 0.6 s.

Accelerators are added until AU falls below the bar. Each has its own dataset, loader and workers, as many for both
loaders. Ours has a budget of memory of 128 MiB, of which it reads twelve batches ahead, where four workers of the rival
hold eight: what is read during the first step is little of the result.
"""

import contextlib
import dataclasses
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Spread, targets
from benchmarks.harness.dlio import Accelerators, Found, measure
from benchmarks.harness.report import aligned
from benchmarks.harness.rivals.feeds import Plan
from benchmarks.lab import nginx
from benchmarks.lab.objects import Family

OBJECT_BYTES = 322_957
BATCH = 24
THEIR_BATCH_MS = 47.55
MIN_AU = 0.85
RIVAL = "getitems"
MIN_RATIO = 2.0
_BUDGET_BYTES = 128 << 20
_MOST = 32
_LIMIT_S = 400.0


class Search:
    """Finds the number of accelerators that a feed keeps busy."""

    def __init__(self, run: Accelerators, pool: Clients) -> None:
        self._run, self._pool = run, pool
        self.tried: dict[str, list[list[Found]]] = {OURS: [], RIVAL: []}

    def _enough(self, feed: str, accelerators: int) -> bool:
        job = dataclasses.replace(self._run, accelerators=accelerators)
        found: Found = self._pool.run(feed, partial(measure, job))
        self.tried[feed][-1].append(found)
        print(f"  {feed:10} {accelerators:3}  AU {found.au:.3f}  {found.samples_per_s:,.0f} samples/s", flush=True)
        return found.au >= MIN_AU

    def most(self, feed: str) -> int:
        """Returns the largest number whose AU reaches the bar, 0 if one is too many: doubles, then bisects."""
        self.tried[feed].append([])
        fed, too_many = 0, 1
        while too_many <= _MOST and self._enough(feed, too_many):
            fed, too_many = too_many, 2 * too_many
        while too_many - fed > 1 and fed < _MOST:
            middle = (fed + too_many) // 2
            if self._enough(feed, middle):
                fed = middle
            else:
                too_many = middle
        return fed

    def rates(self, feed: str) -> list[float]:
        """The samples/s of the largest number in each round."""
        fed = ([found.samples_per_s for found in each if found.au >= MIN_AU] for each in self.tried[feed])
        return [max(rates, default=0.0) for rates in fed]


def main() -> None:
    program = Program("mlperf", __doc__, 3, without="", only="")
    program.parser.add_argument("--steps", type=int, default=200, help="counted steps of an accelerator (default 200)")
    program.parser.add_argument("--workers", type=int, default=4, help="of each accelerator (default 4)")
    batch_help = f"compute time of a batch (default {THEIR_BATCH_MS})"
    program.parser.add_argument("--batch-ms", type=float, default=THEIR_BATCH_MS, help=batch_help)
    given = program.start()
    demand = BATCH / given.batch_ms * 1000
    what = "theirs" if given.batch_ms == THEIR_BATCH_MS else f"not their {THEIR_BATCH_MS} ms"
    print(f"{given.batch_ms:g} ms a batch ({what}): an accelerator takes {demand:.0f} samples/s", flush=True)
    # The epoch is longer than a run: MLPerf's has thousands of steps, and its end would weigh too much in so few.
    family = Family(OBJECT_BYTES, BATCH * (given.steps + 20))
    fed: dict[str, list[int]] = {OURS: [], RIVAL: []}
    with contextlib.ExitStack() as stack:
        locations = stack.enter_context(nginx.running([family], [nginx.TAIL]))
        pool = stack.enter_context(Clients("harness.rivals.feeds", _LIMIT_S))
        plan = Plan(locations[nginx.TAIL], family, BATCH, given.workers, budget_bytes=_BUDGET_BYTES)
        search = Search(Accelerators(plan, 1, given.batch_ms / 1000, given.steps), pool)
        for number in range(given.rounds):
            print(f"round {number + 1}", flush=True)
            for feed, counts in fed.items():
                counts.append(search.most(feed))
    rows = [["", "accelerators at AU >= 0.85", "samples/s there"]]
    rows += [[feed, Spread.of(fed[feed]).text(0), Spread.of(search.rates(feed)).text(0)] for feed in fed]
    title = f"{given.workers} workers each, median (min-max) of {given.rounds} rounds, {given.steps} steps"
    print("", aligned(title, rows), "", sep="\n")
    tried = {feed: [[*map(dataclasses.asdict, each)] for each in rounds] for feed, rounds in search.tried.items()}
    settings = {"batch_ms": given.batch_ms, "workers": given.workers, "steps": given.steps}
    content = {**settings, "object_bytes": OBJECT_BYTES, "batch": BATCH, "accelerators": fed, "tried": tried}
    # A rival that feeds no accelerator counts as one: a ratio needs a denominator.
    ratio = Spread.of([ours / max(1, theirs) for ours, theirs in zip(fed[OURS], fed[RIVAL], strict=True)])
    unit = "x (it feeds none; counted as one)" if 0 in fed[RIVAL] else "x"
    target = f"accelerators >= {MIN_RATIO:g}x {RIVAL}"
    program.judge([targets.bounded(target, ratio, 2, unit, least=MIN_RATIO)])
    program.finish(content, part=given.steps < 200)


if __name__ == "__main__":
    main()
