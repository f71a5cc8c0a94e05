"""Draws a sampler ahead of its consumer and announces the objects of its indices. Independent of loaders.

If the order of the next pass is known, its objects are announced once the current pass has been drawn to its end. The
next pass reuses these announcements if its order is the same.

Other libraries save and resume a sampler by its state, or else by the number of items that they drew. Here they find
the same: `state_dict` and `load_state_dict` where the sampler or its iterator has them, with the state after the last
item that they requested, and nothing elsewhere. So their states do not depend on whether a sampler is drawn ahead.
"""

import copy
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, MutableSet
from types import FrameType
from typing import Any, Self

import numpy as np
import torch

from torchobj import _torchobj
from torchobj.datasets.wrappers import ObjectFinder, object_finder
from torchobj.exceptions import ConfigError, TorchobjError
from torchobj.loader.iterator import LoaderPass
from torchobj.loader.order.position import Order, in_batches, load
from torchobj.loader.order.sampler import ElasticDistributedSampler
from torchobj.stateful import Position, checked, is_stateful
from torchobj.workers.memory_budget import AHEAD_SHARE

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
        indexed: The dataset of its indices. Without it nothing is announced or drawn ahead.
        max_items: Maximum number of items drawn ahead; None for as many as fit the memory budget.
        loader: Number of the loader whose counters the reads belong to; 0 for none.
    """

    def __new__(cls, sampler: Any = None, *_: Any, **__: Any) -> Self:
        """One with a state, if the sampler has one."""
        # By its class, because isinstance() of a protocol ignores attributes that __getattr__ finds.
        kind: Any = _StatefulLookahead if is_stateful(sampler) else cls
        created: Self = object.__new__(kind)
        return created

    def __init__(self, sampler: Any, indexed: Any, max_items: int | None = None, loader: int = 0) -> None:
        self.sampler, self.indexed, self.max_items, self.loader = sampler, indexed, max_items, loader
        #: The pass of the next iterator, of a loader of torchobj. Others save the states of the sampler.
        self.loader_pass: LoaderPass | None = None
        #: If not None, receives the number of samples of each item of the latest pass that the loader has requested.
        self.requested: deque[int] | None = None
        #: The state of the sampler after the last item that was requested, as long as it is drawn ahead of it.
        self._state: Any = None
        #: The pass after the one that was drawn to its end. Released with the loader.
        self._following: DrawnItems | None = None
        self._start: Position | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "LookaheadIterator":
        # Whatever was drawn for an earlier pass, the next one starts from the state that the sampler has now.
        self._state = None
        drawn = DrawnItems(self)
        return (_StatefulIterator if is_stateful(drawn.order.iterator) else LookaheadIterator)(self, drawn)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __getstate__(self) -> dict[str, Any]:
        # Announcements belong to this process.
        return self.__dict__ | {"loader_pass": None, "_following": None}

    def start(self, position: Position) -> None:
        """Starts the next pass at a position.

        Raises:
            ConfigError: It is not a position, or belongs to another sampler.
        """
        load(self.sampler, position)
        self._start = position if position["within_epoch"] else None

    def begin(self, drawn: "DrawnItems") -> "DrawnItems":
        """The items of a new pass: `drawn`, or those that were drawn ahead for it."""
        following, self._following = self._following, None
        start, self._start = self._start, None
        if start is not None:
            drawn.order.start(start)
        if following is None or start is not None:
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
            self._following = DrawnItems(self, sampler)
        return self._following

    def record(self, samples: int, states: dict[str, Any]) -> None:
        """Records that an item of `samples` samples was requested, and the states after it; none: the end."""
        self._state = states.get("sampler")
        if self.requested is not None and states:
            self.requested.append(samples)


class _StatefulLookahead(Lookahead):
    """Wraps a sampler that has a state."""

    def state_dict(self) -> Any:
        """The state of the sampler after the last item that was requested, regardless of what was drawn ahead."""
        return self.sampler.state_dict() if self._state is None else copy.deepcopy(checked(self._state))

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores the sampler."""
        self._state = self._following = None
        self.sampler.load_state_dict(state_dict)


def _elastic(sampler: Any) -> ElasticDistributedSampler | None:
    inner = in_batches(sampler)
    return inner if isinstance(inner, ElasticDistributedSampler) else None


def _batching(sampler: Any) -> tuple[Any, ...]:
    return getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", None)


def kept(item: Any) -> Any:
    """An item, copied as far as its sampler may change it after the next one is drawn. Its type stays the same.

    Of an iterator it is a list, because the indices of an item are used twice.
    """
    if isinstance(item, Iterator):
        return list(item)
    try:
        return _copied(item)
    except Exception:  # noqa: BLE001  a type of users that cannot be copied
        return item


def _copied(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.clone()
    if isinstance(item, tuple):
        parts = [_copied(part) for part in item]
        if all(part is before for part, before in zip(parts, item, strict=True)):
            return item
        return item._make(parts) if hasattr(item, "_make") else type(item)(parts)
    if not isinstance(item, (np.ndarray, MutableSequence, MutableMapping, MutableSet)):
        return item
    copied: Any = copy.copy(item)
    # Most are lists of int.
    if isinstance(item, (list, dict)) and {*map(type, item.values() if isinstance(item, dict) else item)} != {int}:
        for key, part in item.items() if isinstance(item, dict) else enumerate(item):
            copied[key] = _copied(part)
    return copied


def indices_of(item: Any) -> list[Any]:
    """The indices of an item of a sampler or batch sampler: a list, a tuple, an array or tensor, or one index."""
    if isinstance(item, (str, bytes)):
        return [item]
    try:
        # Of its iterator: a length that raises is not asked for.
        return list(iter(item))
    except Exception:  # noqa: BLE001  a type of users may raise anything
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

    def __init__(self, lookahead: Lookahead, sampler: Any = None) -> None:
        """Of `sampler`; None: of that of `lookahead`."""
        self._indexed, self._loader = lookahead.indexed, lookahead.loader
        self._find_objects: ObjectFinder | None = None
        self._state = Order.states if lookahead.loader_pass is None else Order.state
        self._announcer: _torchobj.Announcer | None = None
        self._check = _AnnouncementCheck()
        self.order = Order(lookahead.sampler if sampler is None else sampler)
        #: Items, their numbers of samples, and the states of the order after them.
        self.pending: deque[tuple[Any, int, Any]] = deque()
        #: Number of samples in `pending`.
        self.samples = 0
        self.ended = False
        # An error of the sampler, raised when the items before it are used.
        self.error: BaseException | None = None

    def draw(self) -> None:
        """Draws one item and announces it."""
        try:
            item = kept(next(self.order))
        except StopIteration:
            self.ended = True
            return
        except BaseException as error:  # noqa: BLE001  raised later
            self.ended, self.error = True, error
            return
        indices = indices_of(item)
        self.pending.append((item, len(indices), self._state(self.order)))
        self.samples += len(indices)
        self._check.draw(self._announce(indices))

    def take(self) -> tuple[Any, int, Any]:
        """The next item, its number of samples, and the state of the order after it."""
        if self._check.take(self._count_requested):
            self._stop_announcing()
        item, samples, state = self.pending.popleft()
        self.samples -= samples
        return item, samples, state

    def _count_requested(self) -> int:
        return 0 if self._announcer is None else self._announcer.requested()

    def _announce(self, indices: list[Any]) -> int:
        if self._indexed is None:
            return 0
        try:
            self._find_objects = self._find_objects or object_finder(self._indexed)
            objects = self._find_objects(indices)
        except TorchobjError:
            # An error of the listing.
            raise
        except Exception:  # noqa: BLE001  not an index of the dataset, which raises when the sample is read
            return 0
        if objects:
            if self._announcer is None:
                self._announcer = _torchobj.Announcer(self._loader)
            self._announcer.announce(objects)
        return len(objects)

    def _stop_announcing(self) -> None:
        self._indexed = self._find_objects = None
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

    def __init__(self, lookahead: Lookahead, drawn: DrawnItems) -> None:
        self._lookahead, self._pass = lookahead, lookahead.loader_pass
        self._drawn = drawn
        # The time of the first request, and the time spent since on drawing further ahead.
        self._started_at: float | None = None
        self._drawing_s = 0.0
        # Number of items that the consumer drops.
        self._skipped = 0
        # The states after the last item that was requested, for other libraries; none at the end.
        self._states: dict[str, Any] = {}

    def __next__(self) -> Any:
        if self._pass is not None:
            self._pass.requested += 1
        if self._started_at is None:
            self._begin(sys._getframe(1))
        if self._skipped:
            self._skipped -= 1
            return next(self._drawn.order)
        self._draw()
        drawn = self._drawn
        if drawn.pending:
            item, samples, state = drawn.take()
            if self._pass is not None:
                self._pass.dispatch(drawn.order, samples, state)
            else:
                self._states = state
                self._lookahead.record(samples, state)
            return item
        self._states = {}
        self._lookahead.record(0, {})
        # Not kept, because its traceback would keep the caller's frames alive.
        error, drawn.error = drawn.error, None
        raise StopIteration if error is None else error

    def _begin(self, caller: FrameType) -> None:
        self._started_at = time.perf_counter()
        if self._lookahead.requested is not None:
            self._lookahead.requested = deque()
        self._skipped = _skipped_by(caller)
        if not self._skipped:
            self._drawn = self._lookahead.begin(self._drawn)
        else:
            # The islice drops this pass at its end, when workers have not requested the last items yet: their
            # announcements would be cancelled.
            caller.f_locals["self"]._torchobj_pass = self

    def _draw(self) -> None:
        drawn = self._drawn
        if not drawn.ended and (not drawn.pending or self._may_draw()):
            # Replaces the item that is about to be used.
            drawn.draw()
        now = time.perf_counter()
        assert self._started_at is not None  # noqa: S101  the first request sets it
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


class _StatefulIterator(LookaheadIterator):
    """One pass of a sampler whose iterator has a state."""

    def state_dict(self) -> Any:
        """The state of that iterator after the last item that was requested, regardless of what was drawn ahead."""
        if self._states:
            return copy.deepcopy(checked(self._states["iterator"]))
        return self._drawn.order.iterator.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Moves it to the position of `state_dict`. Skipped items are not announced."""
        self._drawn.order.iterator.load_state_dict(state_dict)


def _skipped_by(caller: FrameType) -> int:
    """Number of items that are requested to be dropped: torchdata's loader resumes an order without a state so.

    Args:
        caller: The frame that requests the first item.
    """
    iterator = caller.f_locals.get("self")
    is_skipping = isinstance(getattr(iterator, "_sampler_iter", None), itertools.islice)
    return getattr(iterator, "_sampler_iter_yielded", 0) if is_skipping else 0
