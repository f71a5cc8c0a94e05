"""Finds the members of tar shards by ranged reads of their headers, many shards concurrently. Saves nothing.

The native `TarIndexer` parses headers and skips the bodies of large members. Shards are read in rounds: one range of
each open shard, in one call.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torchobj import _torchobj
from torchobj._torchobj import ObjectRef
from torchobj.config import StoreConfig
from torchobj.exceptions import ConfigError
from torchobj.shards.index_file import TarShard, members_table
from torchobj.shards.shard_urls import compression
from torchobj.store.reads import get_many
from torchobj.store.transfers import Progress, ProgressCallback, callback_of

__all__ = ["check_plain", "members_of"]

#: Maximum number of shards that are read at the same time; each has one range in memory.
_OPEN_SHARDS = 64

#: Members that are kept as Python objects, before they become columns.
_PENDING_SAMPLES = 10_000


def check_plain(url: str) -> None:
    """Raises ConfigError if a shard is compressed, according to its name."""
    if compression(url) is not None:
        raise ConfigError(
            f"{url}: a compressed shard has no random access, because its members cannot be read by their ranges; "
            "store it as a plain .tar, whose members may be compressed, or read it in order with TarIterableDataset"
        )


class _OpenShard:
    """A shard that is being read."""

    def __init__(self, number: int, shard: TarShard) -> None:
        self.number, self.shard = number, shard
        self._indexer = _torchobj.TarIndexer(shard.name, shard.size)
        self._columns: dict[str, list[Any]] = {}
        self._tables: list[Any] = []
        self._pending = 0
        self._clear()
        self.range = self._indexer.next()

    def _clear(self) -> None:
        self._columns = {name: [] for name in ("shard", "key", "field", "offset", "size", "begin", "end")}
        self._pending = 0

    def ref(self, begin: int, end: int) -> ObjectRef:
        return ObjectRef(self.shard.name, begin, end, self.shard.size, self.shard.version)

    def feed(self, data: Any) -> None:
        """Parses the range."""
        self._indexer.feed(data)
        self.range = self._indexer.next()
        columns = self._columns
        for key, begin, end, members in self._indexer.samples():
            for field, offset, size in members:
                columns["shard"].append(self.shard.name)
                columns["key"].append(key)
                columns["field"].append(field)
                columns["offset"].append(offset)
                columns["size"].append(size)
                columns["begin"].append(begin)
                columns["end"].append(end)
            self._pending += 1
        if self._pending >= _PENDING_SAMPLES:
            self._flush()

    def _flush(self) -> None:
        self._tables.append(members_table(self._columns))
        self._clear()

    def tables(self) -> list[Any]:
        """The members, when all ranges were parsed."""
        self._flush()
        return self._tables


def members_of(
    shards: Sequence[TarShard], config: StoreConfig | None, progress: ProgressCallback | None = None
) -> list[list[Any]]:
    """The members of shards as tables of `index_file`, several per shard. The name of a shard is its URL.

    Raises:
        ConfigError: A shard is compressed.
        TarError: A shard is not a tar file, or is damaged.
        ObjectChangedError: A shard has another version.
        StoreError: A read failed.
    """
    for shard in shards:
        check_plain(shard.name)
    report = None if progress is None else callback_of(progress)
    found: list[list[Any]] = [[] for _ in shards]
    waiting, opened = deque(enumerate(shards)), list[_OpenShard]()
    total, done, done_bytes = sum(shard.size for shard in shards), 0, 0
    while waiting or opened:
        while waiting and len(opened) < _OPEN_SHARDS:
            opened.append(_OpenShard(*waiting.popleft()))
        ranges = [(each, each.range) for each in opened]
        refs = [each.ref(*part) for each, part in ranges if part is not None]
        datas = iter(get_many(refs, config=config))
        remaining = []
        for each, part in ranges:
            if part is not None:
                each.feed(next(datas))
                remaining.append(each)
                continue
            found[each.number] = each.tables()
            done, done_bytes = done + 1, done_bytes + each.shard.size
        opened = remaining
        if report is not None:
            reached = sum(each.range[0] if each.range else each.shard.size for each in opened)
            report(Progress(done, len(shards), done_bytes + reached, total, 0))
    return found
