"""A shuffle buffer whose state can be saved: draws are numbered, and depend on a seed and their number only."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1

#: The step of SplitMix64, 2^64 over the golden ratio, and the factors of its finalizer (Steele, Lea and Flood, "Fast
#: splittable pseudorandom number generators", 2014).
_STEP = 0x9E3779B97F4A7C15
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64."""
    value = (value ^ value >> 30) * FIRST_FACTOR & _MASK
    value = (value ^ value >> 27) * SECOND_FACTOR & _MASK
    return value ^ value >> 31


def mixed_seed(numbers: Sequence[int]) -> int:
    """One seed that depends on all of these numbers."""
    seed = 0
    for number in numbers:
        seed = _mixed((seed + number + _STEP) & _MASK)
    return seed


def mixed_word(seed: int, number: int) -> int:
    """Draw `number` of a seed: 64 random bits."""
    return _mixed((seed + number * _STEP) & _MASK)


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
