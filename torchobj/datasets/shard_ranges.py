"""Reads shards as consecutive ranges, several ahead, across the ends of shards. Does not parse them."""

from collections.abc import Iterator
from typing import NamedTuple

from torchobj._torchobj import ObjectReader, ObjectRef
from torchobj.datasets.dataset_reader import RefReader
from torchobj.datasets.read_ahead import Group, read_ahead
from torchobj.manifest import Manifest

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
    is_last: bool


def read_ranges(
    reader: RefReader, manifest: Manifest, parts: Iterator[ShardPart]
) -> Iterator[tuple[Range, ObjectReader | Exception | None]]:
    """Reads parts of shards in order. The next ranges are announced within this process's share of the memory budget.

    Yields:
        Each range with its bytes, or with the exception if it cannot be read; None for an empty part.
    """

    def groups(limit: int) -> Iterator[Group[ObjectRef]]:
        range_bytes = max(_MIN_RANGE_BYTES, min(_RANGE_BYTES, int(limit * _RANGE_SHARE)))
        for part in parts:
            _, _, size, version = manifest.entry(part.shard)
            url = manifest.url(part.shard)
            if part.begin >= part.end:
                yield Group([], 0, Range(part, is_last=True))
            for begin in range(part.begin, part.end, range_bytes):
                end = min(begin + range_bytes, part.end)
                ref = ObjectRef(url, start=begin, end=end, size=size, version=version)
                yield Group([ref], end - begin, Range(part, is_last=end == part.end))

    for group, readers in read_ahead(reader, groups, _MAX_AHEAD_BYTES):
        yield group.content, next(readers, None)
