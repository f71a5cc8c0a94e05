"""The billed requests of this process in the passes of a loader."""

from torchobj import _torchobj
from torchobj.telemetry.billing import Billed, billed


class PassRequests:
    """Counts what the process sends from the begin of each pass to its last batch, or to its end.

    A batch costs one call of `request_stats()`, 5 microseconds with one store and 64 with 100, so that what follows a
    loop that was left is not counted. Neither is what the prefetcher reads of the next epoch in the pause before it.
    """

    def __init__(self) -> None:
        self._before = Billed()
        self._began = self._now = _torchobj.request_stats()
        #: Those of the last whole pass.
        self.last: Billed | None = None

    def begin(self) -> None:
        """Begins a pass."""
        self._before = self.total()
        self._began = self._now = _torchobj.request_stats()

    def record(self, *, ended: bool) -> None:
        """Records that the loop has received a batch, or that the pass has ended."""
        self._now = _torchobj.request_stats()
        if ended:
            self.last = billed(self._now).since(billed(self._began))

    def total(self) -> Billed:
        """The sums over all passes."""
        return self._before.plus(billed(self._now).since(billed(self._began)))
