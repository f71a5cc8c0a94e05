"""What tests ask of this process's prefetcher: what it counted, what was taken meanwhile, whether its memory is free."""

import gc
import time

from torchobj import _torchobj

#: What only grows; the rest is not known before the prefetcher is made.
COUNTS = (
    "hits", "late", "queued", "misses", "objects", "bytes", "retries", "throttled", "connect_failures", "hedges",
    "hedges_won", "transferred", "copied",
)  # fmt: skip


def stats():
    """Its numbers; counts are 0 before it is made."""
    return dict.fromkeys(COUNTS, 0) | _torchobj.prefetch_stats()


class Taken:
    """How many objects were taken while this was entered: `announced` and not, and how many were read."""

    def __enter__(self):
        self.before = stats()
        return self

    def __exit__(self, *_):
        after = stats()
        grown = {name: after[name] - self.before[name] for name in COUNTS}
        self.hits, self.misses, self.objects = grown["hits"], grown["misses"], grown["objects"]
        self.announced = grown["hits"] + grown["late"] + grown["queued"]


def eventually(holds, limit_s=15.0):
    """Whether something holds soon."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if holds():
            return True
        time.sleep(0.02)
    return False


def all_free():
    """Whether all memory is given back soon, and nothing is announced."""
    # An exception's traceback holds the frames, and their iterators, in a cycle.
    gc.collect()
    return eventually(lambda: stats()["used_bytes"] == 0 and stats()["announced"] == 0)
