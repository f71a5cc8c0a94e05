"""The order in which a mixture draws from its datasets. Does no I/O.

`Mixture` is the whole order of datasets of known lengths, that of Hugging Face's `interleave_datasets`. `Draws` is an
order without an end, for datasets of unknown lengths.
"""

import bisect
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from torchobj.datasets.shuffle_buffer import mixed_seed, mixed_word

#: Numbers of samples or datasets.
Numbers: TypeAlias = np.ndarray[Any, Any]

#: Number of draws per block: the draws of each dataset before each block are kept, those within it are counted.
_BLOCK = 4096

#: Number of draws that are made at a time until the mixture ends.
_DRAWN = 1 << 16


class Mixture:
    """Maps positions to datasets, and to the samples of these. Takes a byte per sample; round robin takes none.

    Args:
        lengths: Number of samples of each dataset; 1 or more.
        probabilities: Probability of each dataset; None: round robin.
        seed: Seed of the draws.
        oversample: Whether it ends when all datasets are exhausted; otherwise when one is.
    """

    def __init__(
        self, lengths: Sequence[int], probabilities: Sequence[float] | None, seed: int, *, oversample: bool
    ) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self._drawn: Numbers | None = None
        if probabilities is None:
            self.samples = int(self.lengths.max() if oversample else self.lengths.min()) * len(lengths)
            return
        self._drawn = _drawn(self.lengths, probabilities, seed, oversample=oversample)
        self.samples = len(self._drawn)
        blocks = range(0, self.samples, _BLOCK)
        counts = [np.bincount(self._drawn[begin : begin + _BLOCK], minlength=len(lengths)) for begin in blocks]
        #: Number of draws from each dataset before each block.
        self._before = np.cumsum([np.zeros(len(lengths), dtype=np.int64), *counts[:-1]], axis=0)

    def located(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """The dataset of each position, and the number of the sample in it."""
        if self._drawn is None:
            members, numbers = positions % len(self.lengths), positions // len(self.lengths)
        else:
            members, numbers = self._drawn[positions], np.empty(len(positions), dtype=np.int64)
            for at, (position, member) in enumerate(zip(positions.tolist(), members.tolist(), strict=True)):
                block = position // _BLOCK
                within = np.count_nonzero(self._drawn[block * _BLOCK : position] == member)
                numbers[at] = self._before[block, member] + within
        return members, numbers % self.lengths[members]


def _drawn(lengths: Numbers, probabilities: Sequence[float], seed: int, *, oversample: bool) -> Numbers:
    """The dataset of each sample. Equals the draws of `numpy.random.Generator.choice`, which Hugging Face uses."""
    random, ends = np.random.default_rng(seed), _ends(probabilities)
    drawable = np.array(probabilities) > 0
    counts, parts = np.zeros(len(lengths), dtype=np.int64), []
    #: Position of the draw that exhausts each dataset.
    last = np.full(len(lengths), -1, dtype=np.int64)
    done = 0
    while not (last[drawable] >= 0).any() if not oversample else (last[drawable] < 0).any():
        part = np.searchsorted(ends, random.random(_DRAWN), side="right").astype(np.min_scalar_type(len(lengths)))
        for member in np.flatnonzero(last < 0).tolist():
            found = np.flatnonzero(part == member)
            missing = int(lengths[member] - counts[member])
            if missing <= len(found):
                last[member] = done + found[missing - 1]
            counts[member] += len(found)
        parts.append(part)
        done += len(part)
    known = last[last >= 0]
    return np.concatenate(parts)[: int(known.max() if oversample else known.min()) + 1]


def _ends(probabilities: Sequence[float]) -> Numbers:
    ends = np.cumsum(np.array(probabilities, dtype=np.float64))
    scaled: Numbers = ends / ends[-1]
    return scaled


class Draws:
    """The dataset of each draw. It depends on the seed and the number of the draw only.

    Args:
        members: Number of datasets.
        probabilities: Probability of each dataset; None: round robin.
        seed: Numbers that determine the draws.
    """

    def __init__(self, members: int, probabilities: Sequence[float] | None, seed: Sequence[int]) -> None:
        self._members, self._seed = members, mixed_seed(seed)
        self._ends: list[float] | None = None if probabilities is None else _ends(probabilities).tolist()

    def at(self, number: int) -> int:
        """The dataset of draw `number`."""
        if self._ends is None:
            return number % self._members
        # The 53 bits that a float represents exactly.
        return bisect.bisect_right(self._ends, (mixed_word(self._seed, number) >> 11) * 2.0**-53)
