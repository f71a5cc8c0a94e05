"""The items of a load that several ranks ask alike, such as replicated tensors, which ranks of a machine read once.

The coordinator finds them in the plans of all ranks. Each rank reads its own as ranges, together with those ranks that
it meets at the same time; what cannot be read so is left to `load_items`.
"""

import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torchobj.checkpoint.archive.plan import TensorArchive
from torchobj.checkpoint.archive.zip_archive import DESCRIPTOR_MARK
from torchobj.ranks.shared_read.reads import Peers

__all__ = ["AlikeItems", "FramedRange", "alike_items"]

#: Size of a descriptor up to the CRC-32, and of what precedes it.
_DESCRIPTOR_BYTES = len(DESCRIPTOR_MARK) + 4


class AlikeItems(NamedTuple):
    """Items of a rank's plan that the same ranks of its machine ask, in the same order."""

    items: list[int]
    """Their indices."""
    peers: Peers
    """The ranks."""


def alike_items(plans: Sequence[LoadPlan], machines: Sequence[str]) -> list[list[AlikeItems]]:
    """Returns for each rank the items that another rank of its machine asks as well.

    Args:
        plans: The plans of all ranks, by rank number.
        machines: The machine of each rank.
    """
    asked: dict[Any, dict[int, int]] = defaultdict(dict)
    for rank, plan in enumerate(plans):
        for index, item in enumerate(plan.items):
            if item.type is LoadItemType.TENSOR:
                asked[_key(item)].setdefault(rank, index)
    groups: dict[tuple[int, ...], list[dict[int, int]]] = defaultdict(list)
    for key in sorted(asked, key=repr):
        by_machine: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(asked[key]):
            by_machine[machines[rank]].append(rank)
        for ranks in by_machine.values():
            if len(ranks) > 1:
                groups[tuple(ranks)].append(asked[key])
    found: list[list[AlikeItems]] = [[] for _ in plans]
    # In one order on all ranks, so that none waits for one that waits for it.
    for together, items in groups.items():
        peers = Peers(secrets.token_bytes(16), len(together))
        for rank in together:
            found[rank].append(AlikeItems([item[rank] for item in items], peers))
    return found


def _key(item: ReadItem) -> tuple[Any, ...]:
    index = item.storage_index
    return index.fqn, tuple(index.offset or ()), tuple(item.storage_offsets), tuple(item.lengths)


class FramedRange:
    """The bytes of a tensor in a file, with the parts of its archive that show whether they are complete.

    Args:
        offset: Where the archive starts; without a frame, the tensor.
        frame: The archive that is expected; None if there is none.
        memory: What is filled: uint8 array of shape (nbytes,).
    """

    def __init__(self, offset: int, frame: TensorArchive | None, memory: Any) -> None:
        self._frame, self._offset, self._memory = frame, offset, memory
        self._before = bytearray(0 if frame is None else len(frame.before))
        self._descriptor = bytearray(0 if frame is None else _DESCRIPTOR_BYTES)

    def ranges(self) -> list[tuple[int, Any]]:
        """Returns the (offset, memory) pairs to read."""
        start = self._offset + len(self._before)
        found = [(start, self._memory)]
        if self._frame is not None:
            found += [(self._offset, self._before), (start + len(self._memory), self._descriptor)]
        return found

    def has_other_frame(self) -> bool:
        """Returns whether another archive was read than was expected."""
        return self._frame is not None and (
            self._before != self._frame.before or not self._descriptor.startswith(DESCRIPTOR_MARK)
        )

    def is_damaged(self, crc32: int) -> bool:
        """Returns whether the archive has another CRC-32 than the bytes that were read."""
        saved = int.from_bytes(self._descriptor[len(DESCRIPTOR_MARK) :], "little")
        return saved not in (0, crc32)
