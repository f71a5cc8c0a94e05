"""A sampler that is pulled ahead of who uses it, and announces what it yields. Knows nothing of loaders.

Where the sampler knows the order of its next pass, that is announced too once this one has been pulled dry; the next
pass takes it over if it turns out to be the same.
"""

import copy
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from torchobj import _torchobj
from torchobj.exceptions import ConfigError
from torchobj.loader.batches import Progress
from torchobj.loader.claims import Claims
from torchobj.loader.hints import Hints
from torchobj.loader.nested import in_batches
from torchobj.loader.sampler import ElasticDistributedSampler
from torchobj.loader.state import Mark, Order, load, state_of
from torchobj.memory import AHEAD_SHARE

__all__ = ["Lookahead", "check_lookahead"]

#: Samples that are pulled ahead at most: more of small ones help nobody, and each costs a few hundred bytes.
_MOST_SAMPLES = 32_768

#: How long an item may be kept back for pulling ahead, so that the first batch does not wait for the whole window; or,
#: if that is longer, until half of the time since the first item was spent on it.
_PULLING_S = 0.01


def check_lookahead(lookahead: Any) -> None:
    """Refuses what is no number of items.

    Raises:
        ConfigError: As said.
    """
    if lookahead is not None and (type(lookahead) is not int or lookahead < 0):
        raise ConfigError(f"lookahead={lookahead!r}: must be 0 or more, or None")


class Lookahead:
    """A sampler or batch sampler; it yields what the one within yields, in its order.

    Args:
        sampler: What is pulled.
        hints: Makes objects of indices; without it nothing is announced, and nothing pulled before it is asked for.
        most: At most so many items ahead; None for as many as the budget holds.
    """

    def __init__(self, sampler: Any, hints: Hints | None, most: int | None = None) -> None:
        self.sampler, self.hints, self.most = sampler, hints, most
        #: Told of what the next iterator yields, if anybody wants to know.
        self.progress: Progress | None = None
        #: The pass behind the one that was pulled dry. Kept here, it goes when the loader goes.
        self._following: Window | None = None
        self._resumed: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "Ahead":
        return Ahead(self)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __getstate__(self) -> dict[str, Any]:
        # What is announced is this process's.
        return self.__dict__ | {"progress": None, "_following": None}

    def resume(self, state: dict[str, Any]) -> None:
        """The next pass begins where `state` stood.

        Raises:
            ConfigError: The state is none, or of another sampler.
        """
        load(self.sampler, state)
        self._resumed = state if state["within_epoch"] else None

    def begin(self, window: "Window") -> "Window":
        """The window of a pass that begins: `window`, or the one that was pulled for it before."""
        following, self._following = self._following, None
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            window.order.resume(resumed)
        if following is None or window.order.resumes:
            return window
        mine, theirs = _elastic(self.sampler), _elastic(following.order.sampler)
        if mine is None or theirs is None or _batching(self.sampler) != _batching(following.order.sampler):
            return window
        if theirs.begun() != mine.plan():
            return window
        mine.adopt(theirs)
        return following

    def following(self, *, make: bool = False) -> "Window | None":
        """The pass behind this one, as far as it was pulled; None where it is not known."""
        if self._following is None and make and (elastic := _elastic(self.sampler)) is not None:
            sampler: Any = elastic.following()
            if self.sampler is not elastic:
                batches = copy.copy(self.sampler)
                batches.sampler = sampler
                sampler = batches
            self._following = Window(sampler, self.hints)
        return self._following


def _elastic(sampler: Any) -> ElasticDistributedSampler | None:
    inner = in_batches(sampler)
    return inner if isinstance(inner, ElasticDistributedSampler) else None


def _batching(sampler: Any) -> tuple[Any, ...]:
    return getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", None)


def indices_of(item: Any) -> list[Any]:
    """The indices of what a sampler or batch sampler yields: a list, a tuple, an array or tensor, or one index."""
    try:
        return list(item)
    except TypeError:
        return [item]


class Window:
    """What was pulled of one pass and not used yet. What it announced is forgotten with it."""

    def __init__(self, sampler: Any, hints: Hints | None) -> None:
        self._hints = hints
        self._announcer: _torchobj.Announcer | None = None
        self._claims = Claims()
        self.order = Order(sampler)
        #: Items, how many samples each is of, and the places behind them.
        self.pending: deque[tuple[Any, int, Mark]] = deque()
        #: In what is pending.
        self.samples = 0
        self.ended = False
        # What the sampler raised; raised by `Ahead` when its turn comes.
        self.error: BaseException | None = None

    def pull(self) -> None:
        """Pulls one item, and announces it."""
        try:
            item = next(self.order)
        except StopIteration:
            self.ended = True
            return
        except BaseException as error:  # noqa: BLE001  raised in its turn
            self.ended, self.error = True, error
            return
        indices = indices_of(item)
        self.pending.append((item, len(indices), self.order.mark()))
        self.samples += len(indices)
        self._claims.pull(self._announce(indices))

    def hand_out(self) -> tuple[Any, int, Mark]:
        """The next item, how many samples it is of, and the place behind it."""
        if self._claims.hand_out():
            self._stop_announcing()
        item, samples, mark = self.pending.popleft()
        self.samples -= samples
        return item, samples, mark

    def _announce(self, indices: list[Any]) -> int:
        if self._hints is None:
            return 0
        try:
            objects = self._hints(indices)
        except (IndexError, TypeError):
            # No index of the dataset: whoever takes the sample says so, in its turn.
            return 0
        if objects:
            if self._announcer is None:
                self._announcer = _torchobj.Announcer()
            self._announcer.announce(objects)
        return len(objects)

    def _stop_announcing(self) -> None:
        self._hints = None
        if self._announcer is not None:
            self._announcer.cancel()
            self._announcer = None

    def announced(self) -> tuple[int, int] | None:
        """Bytes that are announced and not taken, and the budget; None if nothing was ever announced."""
        return None if self._announcer is None else self._announcer.pending()

    def __del__(self) -> None:
        if (announcer := getattr(self, "_announcer", None)) is not None:
            announcer.cancel()


class Ahead(Iterator[Any]):
    """One pass. Nothing is pulled before the first item is asked for: torch makes iterators that it never uses."""

    def __init__(self, lookahead: Lookahead) -> None:
        self._lookahead, self._progress = lookahead, lookahead.progress
        if lookahead.hints is not None:
            # Lists what is not listed yet, before workers are started: they inherit it.
            lookahead.hints([])
        self._window = Window(lookahead.sampler, lookahead.hints)
        # When the first item was asked for; and how long pulling took since.
        self._began: float | None = None
        self._spent_s = 0.0
        # The place behind the last item that was asked for.
        self._mark: Mark | None = None

    def __next__(self) -> Any:
        if self._progress is not None:
            self._progress.asked += 1
        if self._began is None:
            self._window = self._lookahead.begin(self._window)
        self._pull()
        window = self._window
        if window.pending:
            item, samples, self._mark = window.hand_out()
            if self._progress is not None:
                self._progress.dispatch(self._mark, samples)
            return item
        # Not kept: its traceback would keep what the caller's frames hold.
        error, window.error = window.error, None
        raise StopIteration if error is None else error

    def _pull(self) -> None:
        window, began = self._window, time.perf_counter()
        if self._began is None:
            self._began = began
        end = began + max(_PULLING_S, (began - self._began) / 2 - self._spent_s)
        while not window.ended and (not window.pending or (time.perf_counter() < end and self._room())):
            window.pull()
        while window.ended and window.error is None and time.perf_counter() < end and self._room():
            following = self._lookahead.following(make=True)
            if following is None or following.ended:
                break
            following.pull()
        self._spent_s += time.perf_counter() - began

    def _room(self) -> bool:
        announced = self._window.announced()
        if announced is None:
            return False
        following = self._lookahead.following() if self._window.ended else None
        # The first that is pending is about to be used.
        items = max(0, len(self._window.pending) - 1) + (len(following.pending) if following else 0)
        if self._lookahead.most is not None and items >= self._lookahead.most:
            return False
        if self._window.samples + (following.samples if following else 0) >= _MOST_SAMPLES:
            return False
        pending, budget = announced
        after = following.announced() if following else None
        return pending + (after[0] if after else 0) < budget * AHEAD_SHARE

    def state_dict(self) -> dict[str, Any]:
        """The place behind the item that was asked for last, whatever was pulled; for torchdata's loaders."""
        return state_of(self._mark or self._window.order.mark(), self._lookahead.sampler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begins at the place of `state_dict`. Nothing that is passed over is announced.

        Raises:
            ConfigError: The state is none, or of another sampler.
        """
        load(self._lookahead.sampler, state_dict)
        self._window.order.resume(state_dict)
