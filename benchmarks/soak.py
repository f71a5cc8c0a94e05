"""Do memory, descriptors, threads or sockets grow while a process reads, saves and loads for a long time under faults?

    python benchmarks/soak.py                      # ten minutes
    python benchmarks/soak.py --duration 3600      # an hour
    python benchmarks/soak.py --only loader        # operations whose names have this word

One process runs the operations of `faults.py` in random order on the strict servers of S3 and Google Cloud Storage,
with 5 % of all requests failing in a way after which a retry succeeds. Loaders are also left in mid-epoch and resumed
by their state, and a worker is killed. Every byte is compared. The process is sampled after each operation.

Exits with 1 if bytes are wrong, an operation fails without a typed error or hangs, or the median of a figure in the
last quarter exceeds that in the second by more than the tolerance.
"""

import contextlib
import faulthandler
import gc
import itertools
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torchobj
from benchmarks.faults import SETTINGS
from benchmarks.harness import Program
from benchmarks.harness.fault_kinds import Script, kinds
from benchmarks.harness.fault_operations import (
    OPERATIONS,
    Location,
    Operation,
    attempt,
    check_names,
    checked,
    epoch,
    name_and_bytes,
    prepare,
    served,
)
from benchmarks.harness.report import aligned
from benchmarks.lab.objects import MIB
from tests.support.process_memory import pss_bytes

_SHARE, _OBJECTS, _LIMIT_S, _BUDGET_BYTES = 0.05, 96, 120.0, 64 * MIB
_LEFT_AFTER, _DIES = 3, 0.05
#: Figure: share and number by which its median may grow. The allocator of the system returns memory late.
#: Idle connections are closed after some seconds: their number depends on the last operations.
_TOLERANCES = {"PSS MiB": (0.05, 16.0), "files": (0.0, 4.0), "threads": (0.0, 2.0), "sockets": (0.1, 32.0)}


def _left_and_resumed(location: Location) -> None:
    """Leaves a loader in mid-epoch, and reads the rest with another one that has its state."""
    left, resumed = epoch(location, shuffle=True), epoch(location, shuffle=True)
    seen = list(map(checked, itertools.islice(left, _LEFT_AFTER)))
    resumed.load_state_dict(left.state_dict())
    check_names(location, itertools.chain(seen, map(checked, resumed)))


def _dying(reader: Any) -> Any:
    """Kills its worker now and then. Elsewhere than in a transform, the worker could hold a lock of torch."""
    if random.random() < _DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    return name_and_bytes(reader)


def _killed_worker(location: Location) -> None:
    """Kills a worker in mid-epoch; torch's error names it."""
    try:
        for batch in epoch(location, transform=_dying, shuffle=True):
            checked(batch)
    except RuntimeError as error:
        if isinstance(error, torchobj.TorchobjError) or "DataLoader worker" not in str(error):
            raise


OPERATIONS |= {"loader left": Operation(_left_and_resumed), "worker killed": Operation(_killed_worker)}


def _sample() -> list[float]:
    """The figures of this process, in the order of the tolerances."""
    gc.collect()
    files = list(Path("/proc/self/fd").iterdir())
    # The one that read the folder is closed.
    links = [os.path.realpath(file) for file in files if file.is_symlink()]
    sockets = sum("socket:" in link for link in links)
    return [pss_bytes() / MIB, len(links) - sockets, len(list(Path("/proc/self/task").iterdir())), sockets]


def _growth(quarters: list[list[float]]) -> list[str]:
    """The figures that grew by more than their tolerance."""
    second, last = quarters[1], quarters[3]
    return [
        f"{name} grew from {before:.0f} to {after:.0f}: more than {share:.0%} + {number:.0f}"
        for (name, (share, number)), before, after in zip(_TOLERANCES.items(), second, last, strict=True)
        if not after <= before * (1 + share) + number
    ]


def main() -> int:
    program = Program("soak", __doc__, without="leave out an operation", only="only operations with this word")
    program.parser.add_argument("--duration", type=float, default=600.0, help="seconds (default 600)")
    program.parser.add_argument("--seed", type=int, default=1, help="random seed (default 1)")
    given = program.start()
    torchobj.set_memory_budget(_BUDGET_BYTES)
    wanted = [name for name in OPERATIONS if not given.only or any(word in name for word in given.only)]
    generator, failures, ended = random.Random(given.seed), list[str](), Counter[str]()
    sampled: list[list[list[float]]] = [[], [], [], []]
    with contextlib.ExitStack() as stack:
        locations = [stack.enter_context(served(scheme, _OBJECTS)) for scheme in ("s3", "gs")]
        locations = [replace(each, config=replace(each.config, **SETTINGS), folder="soak") for each in locations]
        for location in locations:
            prepare(location)
        began_s = time.monotonic()
        while time.monotonic() - began_s < given.duration:
            name, location = generator.choice(wanted), generator.choice(locations)
            names = tuple(kind.name for kind in kinds("") if kind.is_retried(location.scheme))
            # A hang ends the process with 1 and the stacks of its threads.
            faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
            outcome = attempt(name, location, Script(names, _SHARE, generator.randrange(1 << 20)))
            faulthandler.cancel_dump_traceback_later()
            ended[f"{name}: {outcome.word().rpartition(' ')[0]}"] += 1
            if outcome.failed:
                failures.append(f"{location.scheme}:// {name}: {outcome.word()}\n{outcome.text}")
            quarter = min(3, int(4 * (time.monotonic() - began_s) / given.duration))
            sampled[quarter].append(_sample())
    nothing = [[math.nan] * len(_TOLERANCES)]
    quarters = [[statistics.median(figure) for figure in zip(*(each or nothing), strict=True)] for each in sampled]
    failures += _growth(quarters)
    title = f"{ended.total()} operations in {given.duration:.0f} s, faults in {_SHARE:.0%} of all requests: medians"
    rows = [[f"quarter {number}", *(f"{value:.0f}" for value in row)] for number, row in enumerate(quarters, 1)]
    print(aligned(title, [["", *_TOLERANCES], *rows]), "", sep="\n")
    print(*(f"{count:5}  {word}" for word, count in sorted(ended.items())), "", *failures, sep="\n")
    print(f"{len(failures)} failures")
    program.finish({"quarters": quarters, "ended": ended, "failures": failures, "duration_s": given.duration})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
