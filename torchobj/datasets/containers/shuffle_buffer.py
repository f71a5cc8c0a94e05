"""A shuffle buffer whose state can be saved: draws are numbered, and depend on a seed and their number only."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from torchobj.datasets.splitmix import mixed_seed, mixed_word

T = TypeVar("T")


class ShuffleBuffer(Iterator[T], Generic[T]):
    """Holds the next items of an iterator and returns them in random order.

    Args:
        items: The items.
        size: Number of items to hold, from which each next one is drawn.
        seed: Numbers that determine the order.
        draws: Number of items that were drawn before.
        held: Items that were in the buffer then, in the order of `held`.
    """

    def __init__(
        self, items: Iterator[T], size: int, seed: Sequence[int], draws: int = 0, held: Sequence[T] = ()
    ) -> None:
        self._items, self._size = items, size
        self._seed = mixed_seed(seed)
        #: Number of items drawn so far.
        self.draws = draws
        #: The items in the buffer.
        self.held: list[T] = list(held)

    def __next__(self) -> T:
        held = self.held
        while len(held) < self._size:
            try:
                held.append(next(self._items))
            except StopIteration:
                # Not asked again: a generator at its end stays there.
                break
        if not held:
            raise StopIteration
        self.draws += 1
        drawn = mixed_word(self._seed, self.draws) * len(held) >> 64
        held[drawn], held[-1] = held[-1], held[drawn]
        return held.pop()
