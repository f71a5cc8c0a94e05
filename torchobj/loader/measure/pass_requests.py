"""The billed requests of this process in the passes of a loader, and the reads that its disk cache answered instead."""

from typing import Any, NamedTuple

from torchobj import _torchobj
from torchobj.telemetry.billing import Billed, billed


class PassReads(NamedTuple):
    """What a process requested in a pass, and what it read from its disk cache."""

    requests: Billed
    cache_hits: int
    """Reads that the disk cache answered."""
    cache_hit_bytes: int
    is_whole: bool
    """False: the pass has not ended."""


class PassRequests:
    """Counts what the process sends from the begin of each pass to its last batch, or to its end.

    A batch costs one call of `request_stats()`, 5 microseconds with one store and 64 with 100, so that what follows a
    loop that was left is not counted. Neither is what the prefetcher reads of the next epoch in the pause before it.
    """

    def __init__(self) -> None:
        self._before = Billed()
        self._began = self._now = _torchobj.request_stats()
        #: That of the last whole pass.
        self._last: PassReads | None = None

    def begin(self) -> None:
        """Begins a pass."""
        self._before = self.total()
        self._began = self._now = _torchobj.request_stats()

    def record(self, *, ended: bool) -> None:
        """Records that the loop has received a batch, or that the pass has ended."""
        self._now = _torchobj.request_stats()
        if ended:
            self._last = self._current(is_whole=True)

    def total(self) -> Billed:
        """The sums over all passes."""
        return self._before.plus(billed(self._now).since(billed(self._began)))

    def latest(self) -> PassReads:
        """Those of the last whole pass; before its end, of the first one so far."""
        return self._current(is_whole=False) if self._last is None else self._last

    def _current(self, *, is_whole: bool) -> PassReads:
        began: dict[str, Any] = self._began
        # A process that was forked in between counts from zero.
        hits, hit_bytes = (max(0, self._now[key] - began[key]) for key in ("cache_hits", "cache_hit_bytes"))
        return PassReads(billed(self._now).since(billed(began)), hits, hit_bytes, is_whole)
