"""SplitMix64: random words that are numbered, and depend on a seed and their number only, on every machine."""

from collections.abc import Sequence

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
