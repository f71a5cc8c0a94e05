"""A sampler that is pulled ahead of who uses it, and announces what it yields. Knows nothing of loaders."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torchobj import _torchobj
from torchobj.loader.claims import Claims
from torchobj.loader.hints import Hints

__all__ = ["Lookahead"]

#: Of the budget, what one iterator announces: the rest is what workers and the trainer hold.
_SHARE = 0.75


class Lookahead:
    """A sampler or batch sampler; it yields what the one within yields, in its order.

    Args:
        sampler: What is pulled.
        hints: Makes objects of indices.
        most: At most so many items ahead; None for as many as the budget holds.
    """

    def __init__(self, sampler: Any, hints: Hints, most: int | None = None) -> None:
        self.sampler, self.hints, self.most = sampler, hints, most

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "Ahead":
        return Ahead(self)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)


class Ahead(Iterator[Any]):
    """One pass. Nothing is pulled before the first item is asked for: torch makes iterators that it never uses."""

    def __init__(self, lookahead: Lookahead) -> None:
        self._hints, self._most = lookahead.hints, lookahead.most
        # Lists what is not listed yet, before workers are started: they inherit it.
        self._hints([])
        self._inner = iter(lookahead.sampler)
        self._pending: deque[Any] = deque()
        self._announcer: _torchobj.Announcer | None = None
        self._claims = Claims()
        self._ended = False
        # What the sampler raised; raised here when its turn comes.
        self._error: BaseException | None = None

    def __next__(self) -> Any:
        self._pull()
        if self._pending:
            if self._claims.hand_out():
                self._stop_announcing()
            return self._pending.popleft()
        # Not kept: its traceback would keep what the caller's frames hold.
        error, self._error = self._error, None
        raise StopIteration if error is None else error

    def _pull(self) -> None:
        while not self._ended and (not self._pending or self._room()):
            try:
                item = next(self._inner)
            except StopIteration:
                self._ended = True
                return
            except BaseException as error:  # noqa: BLE001  raised in its turn
                self._ended, self._error = True, error
                return
            self._pending.append(item)
            self._claims.pull(self._announce(item))

    def _room(self) -> bool:
        if self._announcer is None or (self._most is not None and len(self._pending) > self._most):
            return False
        announced, budget = self._announcer.pending()
        return announced < budget * _SHARE

    def _announce(self, item: Any) -> int:
        indices = item if isinstance(item, (list, tuple)) else [item]
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
        self._hints = lambda _indices: []
        if self._announcer is not None:
            self._announcer.cancel()
            self._announcer = None

    def __del__(self) -> None:
        if self._announcer is not None:
            self._announcer.cancel()
