"""Finds the items of a load that several ranks request, such as replicated tensors, and compares what is read of them.

The coordinator finds them in the plans of all ranks; `load_items` reads them once per machine.
"""

import math
import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torchobj.checkpoint.archive.plan import TensorArchive
from torchobj.checkpoint.archive.zip_archive import DESCRIPTOR_MARK
from torchobj.ranks.shared_read import reads
from torchobj.ranks.shared_read.reads import Peers

__all__ = ["FramedRange", "ReplicatedItems", "replicated_items"]

#: Size of a descriptor up to the CRC-32, and of what precedes it.
_DESCRIPTOR_BYTES = len(DESCRIPTOR_MARK) + 4


class ReplicatedItems(NamedTuple):
    """Items of a rank's plan that the same ranks of its machine request, in the same order."""

    items: list[int]
    """Their indices."""
    peers: Peers
    """The ranks."""


def replicated_items(
    plans: Sequence[LoadPlan], machines: Sequence[str], metadata: Metadata
) -> list[list[ReplicatedItems]]:
    """Returns for each rank the items that other ranks of its machine request, unless they are too small to be shared.

    Args:
        plans: The plans of all ranks, by rank number.
        machines: The machine of each rank.
        metadata: Metadata of the checkpoint.
    """
    groups = _groups(plans, machines)
    found: list[list[ReplicatedItems]] = [[] for _ in plans]
    # In one order on all ranks, so that none waits for one that waits for it.
    for together, items in groups.items():
        if sum(_nbytes(plans[together[0]].items[item[together[0]]], metadata) for item in items) < reads.MIN_BYTES:
            continue
        peers = Peers(secrets.token_bytes(16), len(together))
        for rank in together:
            found[rank].append(ReplicatedItems([item[rank] for item in items], peers))
    return found


def _groups(plans: Sequence[LoadPlan], machines: Sequence[str]) -> dict[tuple[int, ...], list[dict[int, int]]]:
    """Returns, for ranks of one machine, the items that all of them request: the index of each item in their plans."""
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
    return groups


def _nbytes(item: ReadItem, metadata: Metadata) -> int:
    described: Any = metadata.state_dict_metadata.get(item.storage_index.fqn)
    is_tensor = isinstance(described, TensorStorageMetadata)
    return math.prod(item.lengths) * int(described.properties.dtype.itemsize) if is_tensor else 0


def _key(item: ReadItem) -> tuple[Any, ...]:
    index = item.storage_index
    return index.fqn, tuple(index.offset or ()), tuple(item.storage_offsets), tuple(item.lengths)


class FramedRange:
    """The bytes of a tensor in a file, with the parts of its archive that show whether they are complete.

    Args:
        offset: Where the archive starts; without a frame, the tensor.
        frame: The archive that is expected; None for a tensor without one.
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
