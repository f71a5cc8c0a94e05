"""Compares the passes that the ranks of a job begin over a dataset, and warns if they are in different epochs. Sends
nothing through a process group and waits for no rank.

Ranks count their passes themselves, so that a rank that begins one alone is an epoch ahead of the others from then on.
Two comparisons show it. Passes that begin after the same number of collectives begin at the same point of the program,
and have the same epoch. And a pass that one rank left and another completed was not the same pass; this needs no
collectives.
"""

import itertools
from typing import Any

import torch.distributed

from torchobj.ranks import broadcast
from torchobj.warn_once import Once, warn_once

_numbers = itertools.count()


class RankPasses:
    """The passes of this rank over one dataset, or of one sampler, whose epoch is not set."""

    def __init__(self) -> None:
        # Ranks create the same datasets in the same order.
        self._number = next(_numbers)
        self._name = ""
        # Number of collectives before the latest pass; the next one may begin at the same number.
        self._begun_at = -1
        # The epoch of a pass that has begun and has not ended.
        self._open: int | None = None
        self._once = Once()

    def begin(self, of: object, epoch: int, start: int = 0) -> None:
        """Called when a pass begins, in the process of the rank.

        Args:
            of: The dataset or sampler.
            epoch: The epoch of the pass.
            start: Number of its samples that are skipped.
        """
        if not broadcast.in_job():
            return
        self._name = type(of).__name__
        if (left := self._open) is not None and left != epoch:
            self._compare_end(left, "left")
        self._open = epoch
        collectives = _collectives()
        if collectives is None or collectives == self._begun_at:
            return
        self._begun_at = collectives
        where = f"epoch {epoch}" + (f" after {start} samples" if start else "")
        rank, first = self._first("begin", collectives, where)
        if first != where:
            self._warn(f"rank {rank} began {first}, and this rank begins {where}: a rank has")

    def end(self) -> None:
        """Called when the pass has ended."""
        if (completed := self._open) is not None:
            self._open = None
            self._compare_end(completed, "completed")

    def _compare_end(self, epoch: int, how: str) -> None:
        rank, first = self._first("end", epoch, how)
        if first != how:
            # Or the ranks have parts of different lengths, and leave the pass at the end of the shortest one.
            self._warn(f"rank {rank} {first} its pass of epoch {epoch}, and this rank {how} it: a rank has probably")

    def _first(self, kind: str, number: int, value: str) -> tuple[str, str]:
        """The first rank that compared this number, and its value: this one, if ranks cannot be compared."""
        found = broadcast.first_value(f"{self._name} {self._number}", kind, number, value)
        if found is None:
            return "", value
        rank, _, first = found.partition(" ")
        return rank, first

    def _warn(self, what: str) -> None:
        warn_once(
            self._once,
            "%s: %s begun a pass alone, so that the ranks are in different epochs, and samples are lost and repeated; "
            "begin each pass on all ranks, or call set_epoch(epoch) before each pass",
            self._name,
            what,
            key="alone",
        )


def _collectives() -> int | None:
    """The number of collectives of the default process group so far; None if its backend does not count them."""
    try:
        group: Any = torch.distributed.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, ValueError, NotImplementedError):
        return None
