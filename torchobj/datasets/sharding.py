"""Divides the objects of a pass among ranks and their DataLoader workers. Does no I/O."""

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

Uneven = Literal["drop", "pad"] | None
#: Numbers of objects.
Order: TypeAlias = np.ndarray[Any, Any]


class Shard(NamedTuple):
    """The part of the objects that one worker of one rank yields."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1

    def select(self, order: Order, uneven: Uneven) -> Order:
        """This shard of an order: every n-th object belongs to a rank, and every n-th of those to a worker.

        With `uneven` all ranks get the same number: `drop` leaves out the rest, `pad` repeats the first objects.
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
    """All objects, in the order of the listing."""
    return np.arange(objects, dtype=np.uint32 if objects < 1 << 32 else np.int64)


def shuffled(objects: int, seed: int, epoch: int) -> Order:
    """All objects, in an order that depends on these arguments only, and is the same in every process."""
    return np.random.default_rng((seed, epoch)).permutation(in_order(objects))
