"""Selects the step that all ranks restore: the bucket's, or one that is only on their local disks. Reads no data.

A copy that the bucket does not have is of a save whose upload was interrupted, of a branch of the run that was given
up, or of a step that was deleted. Only the first counts: it continues the newest step of the bucket, or one that does.
It must be complete on the disks together.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from torchobj.checkpoint.leftovers import Attempt
from torchobj.checkpoint.steps.commit import Commit

__all__ = ["Copies", "newer_copies"]

logger = logging.getLogger("torchobj")


class Copies(NamedTuple):
    """The copies of one attempt, by their disks."""

    attempt: Attempt[int]
    of_disks: Mapping[str, Commit]

    @property
    def commit(self) -> Commit:
        """The commit of one of them; each has the whole step if it is on all disks."""
        return next(iter(self.of_disks.values()))

    def keys(self) -> set[str]:
        """Returns the keys of the objects that the disks have together."""
        return {item.key for commit in self.of_disks.values() for item in commit.objects}

    def is_on(self, disks: Iterable[str]) -> bool:
        """Returns whether each of the disks has the whole step, which they have together."""
        return all(disk in self.of_disks and len(self.of_disks[disk].objects) == len(self.keys()) for disk in disks)


def newer_copies(
    newest: Commit | None,
    wanted: int | None,
    disks: Sequence[str],
    copies: Sequence[Sequence[Commit]],
    *,
    damaged: Collection[Attempt[int]],
    source: str,
) -> Copies | None:
    """Returns the copies of the newest step that is only on local disks and counts; None if no step is.

    Copies that do not count are logged.

    Args:
        newest: The newest commit of the bucket; None if the bucket has no commit.
        wanted: Number of the step; None: the newest one.
        disks: The disk of each rank.
        copies: The copies that each rank has found: the first one of a disk gives them.
        damaged: Attempts whose copies are damaged.
        source: URL of the checkpoints, for warnings.
    """
    by_attempt: dict[Attempt[int], dict[str, Commit]] = {}
    for disk, commits in zip(disks, copies, strict=True):
        for commit in commits:
            by_attempt.setdefault(commit.attempt, {})[disk] = commit
    for attempt in sorted(by_attempt, reverse=True):
        step, found = attempt.checkpoint, Copies(attempt, by_attempt[attempt])
        first = found.commit.local
        is_newer = newest is None or step > newest.step
        if not is_newer or wanted not in (None, step) or attempt in damaged or first is None or not first.continues:
            continue
        if (None if newest is None else newest.attempt.nonce) not in first.continues:
            newest_step = "no step there" if newest is None else f"step {newest.step}, the newest one there"
            message = "%s: the local copy of step %d is ignored: it does not continue %s"
            logger.warning(message, source, step, newest_step)
            continue
        if len(found.keys()) != first.total:
            message = "%s: the local copy of step %d is not complete: the disks have %d of its %d objects"
            logger.warning(message, source, step, len(found.keys()), first.total)
            continue
        return found
    return None
