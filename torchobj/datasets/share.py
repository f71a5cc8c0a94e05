"""Which objects, in which order, are one rank's, and of these one DataLoader worker's. Lists and reads nothing."""

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Uneven = Literal["drop", "pad"] | None
#: Numbers of objects.
Order: TypeAlias = np.ndarray[Any, Any]


class Share(NamedTuple):
    """A part of a job."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def of(self, order: Order, uneven: Uneven) -> Order:
        """This part of an order: every n-th of it is a rank's, and of these every n-th a worker's.

        With `uneven` each rank has as many as the others: `drop` leaves out what is too much, `pad` begins again.
        """
        objects = len(order)
        if uneven == "drop":
            end = objects - objects % self.world_size
        elif uneven == "pad" and objects:
            end = objects + -objects % self.world_size
        else:
            end = objects
        start, step = self.rank + self.world_size * self.worker, self.world_size * self.workers
        positions = np.arange(start, end, step)
        return order[positions % objects] if objects else order


def in_order(objects: int) -> Order:
    """All objects, as they were listed."""
    return np.arange(objects, dtype=np.uint32 if objects < 1 << 32 else np.int64)


def shuffled(objects: int, seed: int, epoch: int) -> Order:
    """All objects, in an order that only these numbers decide: the same in every process."""
    return np.random.default_rng((seed, epoch)).permutation(in_order(objects))
