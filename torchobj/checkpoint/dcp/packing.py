"""Which items of a rank go to which of its files: the largest first, each to the file that has least so far."""

import heapq
import math

from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

__all__ = ["item_bytes", "packed"]


def item_bytes(item: WriteItem) -> int:
    """The bytes of an item's tensor, as the plan says it; 0 for other objects, whose size nobody knows yet."""
    data = item.tensor_data
    if data is None:
        return 0
    sizes = data.size if data.chunk is None else data.chunk.sizes
    return math.prod(sizes) * data.properties.dtype.itemsize


def packed(items: list[WriteItem], files: int) -> list[list[WriteItem]]:
    """Items of each file that has any.

    Args:
        items: Of the rank.
        files: How many files there are at most.
    """
    if files == 1 or len(items) < 2:
        return [items] if items else []
    # What is no tensor is small, and goes round.
    others = [item for item in items if item.type is WriteItemType.BYTE_IO]
    bins: list[list[WriteItem]] = [others[number::files] for number in range(files)]
    tensors = sorted((item for item in items if item.type is not WriteItemType.BYTE_IO), key=item_bytes, reverse=True)
    sizes = [(0, len(content), number) for number, content in enumerate(bins)]
    heapq.heapify(sizes)
    for item in tensors:
        size, count, number = sizes[0]
        bins[number].append(item)
        heapq.heapreplace(sizes, (size + item_bytes(item), count + 1, number))
    return [content for content in bins if content]
