"""Reads the statistics of this process's prefetcher: counts, changes over a block, and whether its memory is free."""

import gc
import threading
import time

from torchobj import _torchobj

#: Counters that only grow; other statistics exist once the prefetcher has started.
COUNTS = (
    "hits", "late", "queued", "misses", "objects", "bytes", "retries", "throttled", "connect_failures", "hedges",
    "hedges_won", "transferred", "copied",
)  # fmt: skip


def stats():
    """Returns the prefetcher's statistics; before it starts, counters are 0 and nothing is held or announced."""
    return dict.fromkeys((*COUNTS, "used_bytes", "announced"), 0) | _torchobj.prefetch_stats()


class Taken:
    """Counts samples that were `announced`, samples that were not, and objects that were read in a `with` block."""

    def __enter__(self):
        self.before = stats()
        return self

    def __exit__(self, *_):
        after = stats()
        grown = {name: after[name] - self.before[name] for name in COUNTS}
        self.hits, self.misses, self.objects = grown["hits"], grown["misses"], grown["objects"]
        self.announced = grown["hits"] + grown["late"] + grown["queued"]


def eventually(holds, limit_s=60.0):
    """Waits until a condition holds; returns whether it did within the limit."""
    deadline_s, pause = time.monotonic() + limit_s, threading.Event()
    while time.monotonic() < deadline_s:
        if holds():
            return True
        pause.wait(0.02)
    return False


def all_free():
    """Waits until all memory is released and nothing is announced; returns whether that happened."""
    # An exception's traceback keeps its frames, and their iterators, in a reference cycle.
    gc.collect()
    return eventually(lambda: stats()["used_bytes"] == 0 and stats()["announced"] == 0)
