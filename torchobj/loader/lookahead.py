"""Draws a sampler ahead of its consumer and announces the objects of its indices. Independent of loaders.

If the order of the next pass is known, its objects are announced once the current pass has been drawn to its end. The
next pass reuses these announcements if its order is the same.
"""

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torchobj import _torchobj
from torchobj.datasets.memory_budget import AHEAD_SHARE
from torchobj.datasets.wrappers import ObjectFinder
from torchobj.exceptions import ConfigError
from torchobj.loader.iterator import Progress
from torchobj.loader.sampler import ElasticDistributedSampler
from torchobj.loader.sampler_state import Order, PassPosition, in_batches, load, state_of

logger = logging.getLogger("torchobj")

#: Maximum number of samples drawn ahead: more does not help, and each costs a few hundred bytes.
_MAX_SAMPLES = 32_768

#: Maximum time for drawing further ahead before an item is returned, so that the first batch does not wait for all
#: announcements; or, if longer, until this share of the time since the first item was spent on it.
_MAX_DRAWING_S = 0.001
_DRAWING_SHARE = 1 / 8

#: Number of items after which announcements and requests are compared.
_CHECKED_ITEMS = 1024
#: Number of last items that are left out, because their objects may not have been requested yet. Loaders send fewer to
#: their workers in advance.
_IN_TRANSIT = 256
#: Minimum share of the objects of the other items that are requested if the announcements are right.
_MIN_SHARE = 0.9


def check_lookahead(lookahead: Any) -> None:
    """Checks the `lookahead` argument.

    Raises:
        ConfigError: It is neither None nor an integer of 0 or more.
    """
    if lookahead is not None and (type(lookahead) is not int or lookahead < 0):
        raise ConfigError(f"lookahead={lookahead!r}: must be 0 or more, or None")


class Lookahead:
    """Wraps a sampler or batch sampler and yields the same items in the same order.

    Args:
        sampler: The sampler to draw from.
        find_objects: Maps indices to objects. Without it nothing is announced or drawn ahead.
        max_items: Maximum number of items drawn ahead; None for as many as fit the memory budget.
        loader: Number of the loader whose counters the reads belong to; 0 for none.
    """

    def __init__(
        self, sampler: Any, find_objects: ObjectFinder | None, max_items: int | None = None, loader: int = 0
    ) -> None:
        self.sampler, self.find_objects, self.max_items, self.loader = sampler, find_objects, max_items, loader
        #: Updated by the next iterator, if set.
        self.progress: Progress | None = None
        #: The pass after the one that was drawn to its end. Released with the loader.
        self._following: DrawnItems | None = None
        self._resumed: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "LookaheadIterator":
        return LookaheadIterator(self)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __getstate__(self) -> dict[str, Any]:
        # Announcements belong to this process.
        return self.__dict__ | {"progress": None, "_following": None}

    def resume(self, state: dict[str, Any]) -> None:
        """Starts the next pass at the position of `state`.

        Raises:
            ConfigError: `state` is not a state, or belongs to another sampler.
        """
        load(self.sampler, state)
        self._resumed = state if state["within_epoch"] else None

    def begin(self, drawn: "DrawnItems") -> "DrawnItems":
        """The items of a new pass: `drawn`, or those that were drawn ahead for it."""
        following, self._following = self._following, None
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            drawn.order.resume(resumed)
        if following is None or drawn.order.resumes:
            return drawn
        own, ahead = _elastic(self.sampler), _elastic(following.order.sampler)
        if own is None or ahead is None or _batching(self.sampler) != _batching(following.order.sampler):
            return drawn
        if ahead.latest_plan() != own.plan():
            return drawn
        own.take_over(ahead)
        return following

    def following(self, *, create: bool = False) -> "DrawnItems | None":
        """The next pass, as far as it was drawn; None if its order is not known."""
        if self._following is None and create and (elastic := _elastic(self.sampler)) is not None:
            sampler: Any = elastic.next_pass()
            if self.sampler is not elastic:
                batches = copy.copy(self.sampler)
                batches.sampler = sampler
                sampler = batches
            self._following = DrawnItems(sampler, self.find_objects, self.loader)
        return self._following


def _elastic(sampler: Any) -> ElasticDistributedSampler | None:
    inner = in_batches(sampler)
    return inner if isinstance(inner, ElasticDistributedSampler) else None


def _batching(sampler: Any) -> tuple[Any, ...]:
    return getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", None)


def indices_of(item: Any) -> list[Any]:
    """The indices of an item of a sampler or batch sampler: a list, a tuple, an array or tensor, or one index."""
    try:
        return list(item)
    except TypeError:
        return [item]


class _AnnouncementCheck:
    """Compares what one iterator announced with what is requested."""

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


class DrawnItems:
    """The items of one pass that were drawn and not used yet. Its announcements are cancelled with it."""

    def __init__(self, sampler: Any, find_objects: ObjectFinder | None, loader: int) -> None:
        self._find_objects, self._loader = find_objects, loader
        self._announcer: _torchobj.Announcer | None = None
        self._check = _AnnouncementCheck()
        self.order = Order(sampler)
        #: Items, their numbers of samples, and the positions after them.
        self.pending: deque[tuple[Any, int, PassPosition]] = deque()
        #: Number of samples in `pending`.
        self.samples = 0
        self.ended = False
        # An error of the sampler, raised when the items before it are used.
        self.error: BaseException | None = None

    def draw(self) -> None:
        """Draws one item and announces it."""
        try:
            item = next(self.order)
        except StopIteration:
            self.ended = True
            return
        except BaseException as error:  # noqa: BLE001  raised later
            self.ended, self.error = True, error
            return
        indices = indices_of(item)
        self.pending.append((item, len(indices), self.order.mark()))
        self.samples += len(indices)
        self._check.draw(self._announce(indices))

    def take(self) -> tuple[Any, int, PassPosition]:
        """The next item, its number of samples, and the position after it."""
        if self._check.take(self._count_requested):
            self._stop_announcing()
        item, samples, mark = self.pending.popleft()
        self.samples -= samples
        return item, samples, mark

    def _count_requested(self) -> int:
        return 0 if self._announcer is None else self._announcer.requested()

    def _announce(self, indices: list[Any]) -> int:
        if self._find_objects is None:
            return 0
        try:
            objects = self._find_objects(indices)
        except (IndexError, TypeError):
            # Not an index of the dataset: the dataset raises when the sample is read.
            return 0
        if objects:
            if self._announcer is None:
                self._announcer = _torchobj.Announcer(self._loader)
            self._announcer.announce(objects)
        return len(objects)

    def _stop_announcing(self) -> None:
        self._find_objects = None
        if self._announcer is not None:
            self._announcer.cancel()
            self._announcer = None

    def announced(self) -> tuple[int, int] | None:
        """Bytes that are announced and not taken, and the memory budget; None if nothing was announced."""
        return None if self._announcer is None else self._announcer.pending()

    def limit_by_memory(self) -> None:
        """Records that no more is announced for lack of memory, until the next item is drawn."""
        if self._announcer is not None:
            self._announcer.limit_by_memory()

    def __del__(self) -> None:
        if (announcer := getattr(self, "_announcer", None)) is not None:
            announcer.cancel()


class LookaheadIterator(Iterator[Any]):
    """One pass. Nothing is drawn before the first item is requested, because torch creates iterators that it never
    uses.
    """

    def __init__(self, lookahead: Lookahead) -> None:
        self._lookahead, self._progress = lookahead, lookahead.progress
        self._drawn = DrawnItems(lookahead.sampler, lookahead.find_objects, lookahead.loader)
        # The time of the first request, and the time spent since on drawing further ahead.
        self._started_at: float | None = None
        self._drawing_s = 0.0
        # The position after the last item that was requested.
        self._mark: PassPosition | None = None

    def __next__(self) -> Any:
        if self._progress is not None:
            self._progress.requested += 1
        if self._started_at is None:
            self._drawn = self._lookahead.begin(self._drawn)
        self._draw()
        drawn = self._drawn
        if drawn.pending:
            item, samples, self._mark = drawn.take()
            if self._progress is not None:
                self._progress.dispatch(self._mark, samples)
            return item
        # Not kept, because its traceback would keep the caller's frames alive.
        error, drawn.error = drawn.error, None
        raise StopIteration if error is None else error

    def _draw(self) -> None:
        drawn = self._drawn
        if not drawn.ended and (not drawn.pending or self._may_draw()):
            # Replaces the item that is about to be used.
            drawn.draw()
        now = time.perf_counter()
        if self._started_at is None:
            self._started_at = now
        end = now + max(_MAX_DRAWING_S, (now - self._started_at) * _DRAWING_SHARE - self._drawing_s)
        while not drawn.ended and time.perf_counter() < end and self._may_draw():
            drawn.draw()
        while drawn.ended and drawn.error is None and time.perf_counter() < end and self._may_draw():
            following = self._lookahead.following(create=True)
            if following is None or following.ended:
                break
            following.draw()
        self._drawing_s += time.perf_counter() - now

    def _may_draw(self) -> bool:
        announced = self._drawn.announced()
        if announced is None:
            return False
        following = self._lookahead.following() if self._drawn.ended else None
        # The first pending item is about to be used.
        items = max(0, len(self._drawn.pending) - 1) + (len(following.pending) if following else 0)
        if self._lookahead.max_items is not None and items >= self._lookahead.max_items:
            return False
        if self._drawn.samples + (following.samples if following else 0) >= _MAX_SAMPLES:
            return False
        pending, budget = announced
        after = following.announced() if following else None
        if pending + (after[0] if after else 0) < budget * AHEAD_SHARE:
            return True
        self._drawn.limit_by_memory()
        return False

    def state_dict(self) -> dict[str, Any]:
        """The position after the last requested item, regardless of what was drawn ahead; for torchdata's loaders."""
        return state_of(self._mark or self._drawn.order.mark(), self._lookahead.sampler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Starts at the position of `state_dict`. Skipped items are not announced.

        Raises:
            ConfigError: `state` is not a state, or belongs to another sampler.
        """
        load(self._lookahead.sampler, state_dict)
        self._drawn.order.resume(state_dict)
