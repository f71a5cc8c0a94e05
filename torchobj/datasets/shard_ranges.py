"""Reads shards as consecutive ranges, several ahead, across the ends of shards. Does not parse them."""

import collections
from collections.abc import Iterator
from typing import NamedTuple

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.datasets.read_ahead import ahead_bytes, in_announced_groups, in_threads
from torchobj.datasets.ref_reader import RefReader
from torchobj.manifest import Manifest
from torchobj.memory import budget_bytes

__all__ = ["Range", "ShardPart", "read_ranges"]

#: Maximum number of bytes of a range: a request per range is efficient, and a member that crosses the end of a range,
#: which must be copied, is rare.
_RANGE_BYTES = 4 << 20

#: Maximum number of bytes that a process reads ahead: 32 requests. More would not be faster, but would use memory that
#: was not used before, and its first use takes as long as the request.
_MAX_AHEAD_BYTES = 128 << 20

_MIN_RANGE_BYTES = 64 << 10

#: A process that announces at most this share at a time in one range keeps several requests running.
_RANGE_SHARE = 1 / 8


class ShardPart(NamedTuple):
    """Bytes `begin..end` of a shard, which are read as one stream."""

    number: int
    """Assigned by the caller."""
    shard: int
    """Index of the shard in the manifest."""
    begin: int
    end: int


class Range(NamedTuple):
    """One range of a part."""

    part: ShardPart
    ref: ObjectRef | None
    """None for an empty part."""
    is_first: bool
    is_last: bool


def read_ranges(
    reader: RefReader, manifest: Manifest, parts: Iterator[ShardPart]
) -> Iterator[tuple[Range, ObjectReader | Exception | None]]:
    """Reads parts of shards in order. The next ranges are announced within this process's share of the memory budget.

    Yields:
        Each range with its bytes, or with the exception if it cannot be read; None for an empty part.
    """
    iteration = reader.iteration()
    share = ahead_bytes(budget_bytes() if iteration is None else iteration.budget())
    limit = min(share, _MAX_AHEAD_BYTES)
    range_bytes = max(_MIN_RANGE_BYTES, min(_RANGE_BYTES, int(limit * _RANGE_SHARE)))
    ranges: collections.deque[Range] = collections.deque()

    def groups() -> Iterator[tuple[list[ObjectRef], int]]:
        for part in parts:
            for found in _ranges(manifest, part, range_bytes):
                ranges.append(found)
                if found.ref is None:
                    yield [], 0
                else:
                    yield [found.ref], min(range_bytes, part.end - found.ref.start)

    if iteration is None:
        found = in_threads(reader.read, (refs for refs, _ in groups()))
    else:
        found = in_announced_groups(iteration.read, groups(), limit)
    for _, readers in found:
        yield ranges.popleft(), (readers.pop() if readers else None)


def _ranges(manifest: Manifest, part: ShardPart, range_bytes: int) -> Iterator[Range]:
    _, _, size, version = manifest.entry(part.shard)
    url = manifest.url(part.shard)
    if part.begin >= part.end:
        yield Range(part, None, is_first=True, is_last=True)
    for begin in range(part.begin, part.end, range_bytes):
        end = min(begin + range_bytes, part.end)
        ref = ObjectRef(url, start=begin, end=end, size=size, version=version)
        yield Range(part, ref, is_first=begin == part.begin, is_last=end == part.end)
