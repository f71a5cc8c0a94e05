"""The order of an epoch in which each sample belongs to one host, the same in all epochs. Does not know which rank
takes which position.
"""

import functools

import numpy as np

from torchobj.datasets.splitmix import mixed_word
from torchobj.loader.order.permutation import Numbers, Permutation

#: Numbers of the words that are drawn from a seed: for the parts of the hosts, and for the order within the first part.
_PARTS, _WITHIN = 2, 3


class HostOrder:
    """A shuffled order of `0..size` whose position `p` has a sample of host `p % hosts`.

    A permutation that depends on `seed` only divides the samples into parts of equal size (or one sample more), one for
    each host; each epoch shuffles them within their part. With one host, it is a permutation of all samples.

    Args:
        size: Number of samples, `hosts` or more.
        hosts: Number of hosts, 1 or more.
        seed, epoch: Any integers.
    """

    def __init__(self, size: int, hosts: int, seed: int, epoch: int) -> None:
        self._size, self._hosts, self._seed, self._epoch = size, hosts, seed, epoch

    def at(self, positions: Numbers) -> Numbers:
        """The samples at `positions`. The part of a host starts again after its end."""
        if self._hosts == 1:
            return Permutation(self._size, self._seed, self._epoch).at(positions % np.uint64(self._size))
        hosts = positions % np.uint64(self._hosts)
        numbers = positions // np.uint64(self._hosts)
        for host in np.unique(hosts).tolist():
            of_host = np.flatnonzero(hosts == host)
            numbers[of_host] = self._of_host(host, numbers[of_host])
        return Permutation(self._size, mixed_word(self._seed, _PARTS), 0).at(numbers)

    def _of_host(self, host: int, numbers: Numbers) -> Numbers:
        """The elements of the fixed permutation with these numbers in the order of a host."""
        size = _part_size(self._size, self._hosts, host)
        order = Permutation(size, mixed_word(self._seed, _WITHIN + host), self._epoch)
        found: Numbers = order.at(numbers % np.uint64(size))
        part = _parts(self._size, self._hosts)[host]
        ends = np.cumsum([len(each) for each in part])
        firsts = np.array([each.stop for each in part]) - ends
        # Numbers below the first end are in the first range, and so on.
        at = np.searchsorted(ends, found, side="right")
        found += firsts[at].astype(np.uint64)
        return found


def _part_size(size: int, hosts: int, host: int) -> int:
    """Number of positions of `0..size` that a host has."""
    return -(-(size - host) // hosts)


@functools.lru_cache(maxsize=8)
def _parts(size: int, hosts: int) -> list[list[range]]:
    """Divides `0..size` among hosts. Each host that is added gets an equal number of elements from each of the others,
    so that no element moves between hosts that stay.
    """
    parts = [[range(size)]]
    for added in range(1, hosts):
        gained: list[range] = []
        for host, part in enumerate(parts):
            surplus = _part_size(size, added, host) - _part_size(size, added + 1, host)
            while surplus:
                last = part.pop()
                kept = max(0, len(last) - surplus)
                gained.append(last[kept:])
                surplus -= len(last) - kept
                if kept:
                    part.append(last[:kept])
        parts.append(gained)
    return parts
