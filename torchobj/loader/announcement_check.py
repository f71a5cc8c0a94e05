"""Compares what an iterator announces with what is requested. Does not stop announcing itself."""

import logging
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("torchobj")

#: Number of items after which announcements and requests are compared.
_CHECKED_ITEMS = 1024
#: Number of last items that are left out, because their objects may not have been requested yet. Loaders send fewer to
#: their workers in advance.
_IN_TRANSIT = 256
#: Minimum share of the objects of the other items that are requested if the announcements are right.
_MIN_SHARE = 0.9


class AnnouncementCheck:
    """Counts what one iterator announced."""

    def __init__(self) -> None:
        self._drawn: deque[int] = deque()
        self._taken = self._due = 0

    def draw(self, objects: int) -> None:
        """Records that an item was drawn and `objects` were announced for it."""
        if self._taken < _CHECKED_ITEMS:
            self._drawn.append(objects)

    def take(self, count_requested: Callable[[], int]) -> bool:
        """Records that the next item goes to the loader. Returns True once, if too few of the announced objects were
        requested. `count_requested` returns their number.
        """
        self._taken += 1
        if self._taken > _CHECKED_ITEMS:
            return False
        objects = self._drawn.popleft()
        if self._taken <= _CHECKED_ITEMS - _IN_TRANSIT:
            self._due += objects
        if self._taken < _CHECKED_ITEMS:
            return False
        self._drawn.clear()
        requested = count_requested()
        if requested >= self._due * _MIN_SHARE:
            return False
        logger.warning(
            "only %d of %d announced objects were requested: nothing more is announced in this epoch. Either a wrapper "
            "of the batch sampler uses only some of its batches: call torchobj.attach on the outermost loader; or the "
            "dataset caches objects and does not read them again: pass lookahead=0",
            requested,
            self._due,
        )
        return True
