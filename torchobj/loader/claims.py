"""Whether what an iterator announces is asked for. Asks the prefetcher; stops nothing itself."""

import logging
from collections import deque

from torchobj import _torchobj

logger = logging.getLogger("torchobj")

#: Items handed out before it is looked.
_LOOK_AT = 1024
#: Of these, the last that may not have been asked for yet: more than loaders give their workers at a time.
_UNDER_WAY = 256
#: Of what the others are made of, the least that is asked for when all goes well.
_LEAST = 0.9


class Claims:
    """What one iterator announced, against what this process and its workers asked for since."""

    def __init__(self) -> None:
        self._pulled: deque[int] = deque()
        self._handed_out = self._due = 0
        self._asked_before = _asked()

    def pull(self, objects: int) -> None:
        """An item was pulled, and so many objects announced for it."""
        if self._handed_out < _LOOK_AT:
            self._pulled.append(objects)

    def hand_out(self) -> bool:
        """The next item goes to the loader. True, once, when far too little of the former was asked for."""
        self._handed_out += 1
        if self._handed_out > _LOOK_AT:
            return False
        objects = self._pulled.popleft()
        if self._handed_out <= _LOOK_AT - _UNDER_WAY:
            self._due += objects
        if self._handed_out < _LOOK_AT:
            return False
        self._pulled.clear()
        asked = _asked() - self._asked_before
        if asked >= self._due * _LEAST:
            return False
        logger.warning(
            "of %d objects that were announced %d were asked for: no more is announced in this epoch; either something "
            "around the batch sampler hands out a part of its batches (then use torchobj.attach on the outermost "
            "loader), or the dataset does not read what it has already",
            self._due,
            asked,
        )
        return True


def _asked() -> int:
    stats = _torchobj.prefetch_stats()
    return sum(stats.get(name, 0) for name in ("hits", "late", "queued", "misses"))
