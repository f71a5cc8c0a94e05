"""A pseudo-random permutation of 0..size that is computed per index and not stored."""

import numpy as np
import numpy.typing as npt

from torchobj.datasets.splitmix import FIRST_FACTOR, SECOND_FACTOR, mixed_word

#: Rounds of the Feistel network. Four are pseudo-random for large halves (Luby and Rackoff); small halves need more.
_ROUNDS, _ROUNDS_OF_SMALL = 8, 24
#: Below this number of bits, halves count as small.
_SMALL_BITS = 16

Numbers = npt.NDArray[np.uint64]


def _mixed(values: Numbers) -> Numbers:
    """The finaliser of SplitMix64, as that of `mixed_word`."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """A permutation of `0..size`, chosen by `seed` and `epoch`; the same on every machine and in every version.

    A Feistel network permutes the next power of two; results outside of `0..size` are permuted again (cycle walking).

    Args:
        size: 0 or more.
        seed, epoch: Any integers.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        bits = max(2, (size - 1).bit_length())
        low_bits = bits // 2
        self._size = np.uint64(size)
        self._low_bits = np.uint64(low_bits)
        self._low, self._high = np.uint64((1 << low_bits) - 1), np.uint64((1 << (bits - low_bits)) - 1)
        key = mixed_word(mixed_word(seed, 1), epoch)
        rounds = _ROUNDS_OF_SMALL if bits < _SMALL_BITS else _ROUNDS
        self._keys = [np.uint64(mixed_word(key, number)) for number in range(1, rounds + 1)]

    def at(self, positions: Numbers) -> Numbers:
        """The elements at `positions`, each within `0..size`."""
        found = self._encrypted(positions)
        while len(outside := np.flatnonzero(found >= self._size)):
            found[outside] = self._encrypted(found[outside])
        return found

    def _encrypted(self, values: Numbers) -> Numbers:
        low, high = values & self._low, values >> self._low_bits
        for number, key in enumerate(self._keys):
            # The upper bits of a mixed number are the most random.
            if number % 2:
                low = low ^ ((_mixed(high ^ key) >> np.uint64(32)) & self._low)
            else:
                high = high ^ ((_mixed(low ^ key) >> np.uint64(32)) & self._high)
        return (high << self._low_bits) | low
