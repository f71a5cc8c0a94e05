"""Streams samples from tar shards in the WebDataset format. The native `TarReader` parses them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from torchobj import _torchobj
from torchobj._torchobj import Buffer, ObjectReader, ObjectRef
from torchobj.config import StoreConfig
from torchobj.config.checks import check
from torchobj.datasets.containers.shared_index import SharedIndex
from torchobj.datasets.containers.stream import SampleId, StreamDataset, StreamItem, failed_items
from torchobj.datasets.containers.tar_samples import Decode, Sample, check_decode, decoded, warn_of_decode
from torchobj.datasets.failures import OnIterableError
from torchobj.datasets.listing import Shards, listing_of
from torchobj.datasets.samples import Sample_co
from torchobj.exceptions import ConfigError, TarIndexError
from torchobj.manifest import Manifest
from torchobj.ranks import broadcast
from torchobj.ranks.sample_ranks import SampleRanks
from torchobj.ranks.sharding import Order, Segment
from torchobj.reading.read_ahead import Group, read_ahead
from torchobj.reading.reader import RefReader
from torchobj.shards.shard_urls import TAR_SUFFIXES, checked_urls, compression
from torchobj.urls import parse_url

__all__ = ["TarIterableDataset"]

_NOTHING = Buffer(b"")

#: Maximum number of bytes of a range: a request per range is efficient, and a member that crosses the end of a range,
#: which must be copied, is rare.
RANGE_BYTES = 4 << 20

#: Maximum number of bytes that a process reads ahead: 32 requests. More would not be faster, but would use memory that
#: was not used before, and its first use takes as long as the request.
_MAX_AHEAD_BYTES = 128 << 20

_MIN_RANGE_BYTES = 64 << 10

#: A process that announces at most this share at a time in one range keeps several requests running.
_RANGE_SHARE = 1 / 8

#: What to do if the samples do not divide evenly among ranks.
UnevenShards = Literal["drop", "pad", "resample"] | None


class TarIterableDataset(StreamDataset[Sample_co]):
    r"""An iterable dataset of the samples of tar shards in the WebDataset format.

    Consecutive members of a shard whose names differ in their extension only are a sample: a dict of extension →
    `Buffer`, with the common name as `__key__` and the URL of the shard as `__url__`, as webdataset returns it. A
    buffer shares the memory of the range that was read, of up to 4 MiB, and keeps it: copy what outlives the batch, for
    example with `bytes(buffer)`.

    Ranges of the next shards are read ahead by one process for all its DataLoader workers, within the memory budget
    (`torchobj.set_memory_budget`). Each rank of torch.distributed and each of its workers reads its own part of the
    shards. The position of a `torchobj.DataLoader`, or of torchdata's `StatefulDataLoader`, is exact within a shard and
    contains that of the shuffle buffer; it can be resumed with the same numbers of ranks and workers.

    Shards are tar files of any format without sparse members, plain or compressed with gzip or zstd (by their suffixes
    `.gz`, `.tgz`, `.zst`, `.tzst`). A sample of a compressed shard may have 256 MiB, or 100 times its compressed bytes
    if that is more.

    Args:
        urls: One or several of: the URL of a shard; a pattern with braces, such as `s3://b/train-{000..127}.tar`; a
            pattern with `*`, `?` or `[`; a prefix that ends with a slash, below which names with a part that begins
            with `_` or `.` are skipped.
        decode: Callables by extension, each of which converts a `Buffer`, such as
            `{"jpg": torchobj.decode.image, "json": torchobj.decode.json}`.
        transform: Converts a sample after `decode`.
        shuffle_buffer: Number of samples that are held to draw the next one from. 0: samples have the order of their
            shards. The samples in the buffer are copied.
        shuffle_shards: Whether to shuffle the shards, in an order that depends on `seed` and the epoch only.
        seed: Seed of both orders; 0 or more. Each pass has the order of the next epoch, unless
            `set_epoch` is called.
        uneven: How to make all ranks yield the same number of samples, and with the same number of workers of batches:
            `drop` leaves out the rest, `pad` repeats some, `resample` draws shards with replacement. What is left out
            or repeated is logged. It needs the number of samples of each shard: from the index beside it, otherwise its
            headers are read first; compressed shards are refused. None: shards are divided, and the numbers of samples
            may differ.
        on_error: Action for a sample that cannot be read, decoded or transformed: `raise`, after which iteration can
            continue; `skip`; or a callable that receives the number of the sample in its shard, the URL of the shard
            and the exception, and returns a sample. After a shard that cannot be read further, the next one is read.
        enable_sharding: Whether to divide the shards among the ranks and their DataLoader workers. False: each process
            yields all samples. The ranks are those of torch.distributed when iteration starts; if a loader that
            Accelerate has prepared iterates, which divides the samples itself, there is one rank, and in a Trainer of
            Lightning its strategy determines them.
        rank, world_size: The rank of this process and the number of ranks, instead of those; `rank=0, world_size=1` if
            something else divides.
        mesh: A `DeviceMesh`, instead of `rank` and `world_size`. Ranks that differ only in dimensions for parts of the
            model, such as `tp`, `cp` and `pp`, get the same samples. Dimensions with names such as `dp`, `fsdp`,
            `dp_replicate` and `data_parallel` divide them; pass `mesh["name"]` to divide by one of another name.
        config: Settings of the store.

    Attributes:
        failed_samples: Number of samples that failed, in this process and its DataLoader workers.

    Raises:
        ConfigError: An argument is invalid; when iteration starts: a pattern matches nothing.
        TarError: In iteration: a shard is not a tar, is damaged, or has a sparse member, or a sample that is too large
            for its compressed bytes.

    Example:
        >>> import io, tarfile, torchobj
        >>> shard = io.BytesIO()
        >>> with tarfile.open(fileobj=shard, mode="w") as tar:
        ...     for name in ("a.txt", "a.cls", "b.txt", "b.cls"):
        ...         member = tarfile.TarInfo(name)
        ...         member.size = len(name)
        ...         tar.addfile(member, io.BytesIO(name.encode()))
        >>> _ = torchobj.Store("memory://streamed").put("train-000.tar", shard.getvalue())
        >>> dataset = TarIterableDataset("memory://streamed/train-*.tar", decode={"txt": torchobj.decode.text})
        >>> for sample in dataset:
        ...     print(sample["__key__"], sample["txt"], bytes(sample["cls"]))
        a a.txt b'a.cls'
        b b.txt b'b.cls'
    """

    _policies = ("drop", "pad", "resample")
    _uncounted = "without uneven= a pass does not read the index of the shards"

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        decode: Decode | None = None,
        transform: Callable[[dict[str, Any]], Sample_co] | None = None,
        shuffle_buffer: int = 0,
        shuffle_shards: bool = True,
        seed: int = 0,
        uneven: UnevenShards = None,
        on_error: OnIterableError = "raise",
        enable_sharding: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        config: StoreConfig | None = None,
    ) -> None:
        check("shuffle_shards", shuffle_shards, "True or False", ok=isinstance(shuffle_shards, bool))
        self._decode = check_decode(decode)
        #: Whether the first sample was compared with `decode` in this process.
        self._compared = not self._decode
        # Number of samples of the shards before each, once they were counted.
        self._starts: Order = np.zeros(0, dtype=np.int64)
        self._checked = False
        listing = listing_of(Shards(checked_urls(urls), TAR_SUFFIXES), parse_url, config)
        self._index = SharedIndex(listing)
        self._set_up(
            listing,
            transform=transform,
            shuffle=shuffle_shards,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            uneven=uneven,
            on_error=on_error,
            ranks=SampleRanks.of(enable_sharding, rank, world_size, mesh),
        )

    @override
    def _finished(self, sample: dict[str, Any]) -> Any:
        if not self._compared:
            self._compare(sample)
        fields = Sample(sample)
        decoded(fields, self._decode)
        return super()._finished(fields)

    def _compare(self, sample: dict[str, Any]) -> None:
        """Warns once in all workers of a job if `decode` matches no field of its first sample."""
        self._compared = True
        shard = self._shard()
        if not (shard.rank or shard.worker) and self._epoch.is_first("decode"):
            warn_of_decode(self._decode, sample, f"{sample['__key__']!r} of {sample['__url__']}")

    @override
    def _units(self) -> int:
        if not self._checked:
            for url in map(self.manifest.url, range(len(self.manifest))):
                if compression(url) not in (None, "gzip", "zstd"):
                    raise ConfigError(f"{url}: compressed with {compression(url)}; recompress it with gzip or zstd")
                if self.uneven is not None and compression(url) is not None:
                    raise ConfigError(
                        f"{url}: uneven={self.uneven!r} needs the number of samples, which a compressed shard has only "
                        "at its end; pass uneven=None, or store plain tar files"
                    )
            self._checked = True
        return len(self.manifest)

    @override
    def _is_countable(self) -> bool:
        return super()._is_countable() and (self.uneven is None or self._index.is_found or not broadcast.in_job())

    @override
    def _counts(self) -> Order | None:
        if self.uneven is None:
            return None
        counts = np.array(self._index.get().counts(), dtype=np.int64)
        self._starts = np.cumsum(counts) - counts
        return counts

    @override
    def _items(self, segments: list[Segment], number: int, begin: int | None) -> Iterator[StreamItem]:
        parts = ((self._part(segment, None if at else begin), segment) for at, segment in enumerate(segments))
        return self._read(parts, number)

    def _part(self, segment: Segment, begin: int | None) -> tuple[int, int]:
        """The bytes to read for a segment, whose first sample begins at `begin` if that is known."""
        size = self.manifest.entry(segment.unit)[2] or 0
        if compression(self._unit_url(segment.unit)) is not None:
            # Can be read from its start only.
            return 0, size
        end = size
        if segment.end is not None:
            index, before = self._index.get(), int(self._starts[segment.unit])
            if begin is None:
                begin = index.sample(before + segment.first).begin
            end = index.sample(before + segment.end - 1).end
        return begin or 0, end

    @override
    def _unit_bytes(self, unit: int) -> int | None:
        return None if compression(self._unit_url(unit)) is not None else self.manifest.entry(unit)[2]

    @override
    def _kept(self, value: Any) -> Any:
        if isinstance(value, Exception):
            return value
        return {name: Buffer(field) if isinstance(field, Buffer) else field for name, field in value.items()}

    @override
    def _items_again(self, ids: list[SampleId]) -> Iterator[StreamItem]:
        parts: list[tuple[tuple[int, int], Segment]] = []
        compressed: dict[int, set[int]] = {}
        for each in ids:
            if self._unit_bytes(each.unit) is None:
                compressed.setdefault(each.unit, set()).add(each.sample)
            else:
                parts.append(((each.begin, each.end), Segment(each.unit, each.sample, each.sample + 1)))
        for unit, samples in compressed.items():
            # Read once, because it can be read from its start only.
            segment = Segment(unit, min(samples), max(samples) + 1)
            parts.append((self._part(segment, None), segment))
        wanted = {each[:2]: each for each in ids}
        found = {item.id[:2]: item for item in self._read(iter(parts), 0) if item.id[:2] in wanted}
        return (found[each[:2]] for each in ids)

    def _read(self, parts: Iterator[tuple[tuple[int, int], Segment]], number: int) -> Iterator[StreamItem]:
        """The samples of segments, which are within the given bytes of their shards. `number` is that of the first."""
        opened: dict[int, _OpenShard] = {}

        def ranges() -> Iterator[_ShardPart]:
            for at, ((begin, end), segment) in enumerate(parts, number):
                url = self._unit_url(segment.unit)
                opened[at] = _OpenShard(url, at, segment, begin)
                yield _ShardPart(at, segment.unit, begin, end)

        for found, data in _read_ranges(self._reader, self.manifest, ranges()):
            shard = opened[found.part.number]
            yield from shard.items(found, data)
            if found.is_last:
                del opened[found.part.number]


class _ShardPart(NamedTuple):
    """Bytes `begin..end` of a shard, which are read as one stream."""

    number: int
    """Assigned by the caller."""
    shard: int
    """Index of the shard in the manifest."""
    begin: int
    end: int


class _Range(NamedTuple):
    """One range of a part."""

    part: _ShardPart
    is_last: bool


class _OpenShard:
    """The part of a shard that is being parsed.

    Args:
        url: URL of the shard.
        number: Number of the segment.
        segment: The samples to return.
        begin: Where the first range begins, in bytes: at the first sample of the segment, or at the start of the shard.
    """

    def __init__(self, url: str, number: int, segment: Segment, begin: int) -> None:
        self._url, self._begin = url, begin
        self._reader: _torchobj.TarReader | None = None
        self._number, self._segment = number, segment
        # Number of the next sample.
        self._next = segment.first if begin else 0
        self._done = False

    def items(self, found: _Range, data: Any) -> Iterator[StreamItem]:
        """The samples that the next range completes. A failure ends the shard: it is in place of the samples that are
        left of the segment, or of one if their number is unknown.
        """
        if self._done:
            return
        try:
            if isinstance(data, Exception):
                raise data  # noqa: TRY301  handled below, as other failures
            if self._reader is None:
                self._reader = _torchobj.TarReader(self._url, compression(self._url), self._begin)
            if data is not None:
                yield from self._samples(self._reader.push(data))
                while self._reader.pending and not self._done:
                    # A range of a compressed shard may contain much more than its size.
                    yield from self._samples(self._reader.push(_NOTHING))
            if found.is_last and not self._done:
                yield from self._samples(self._reader.finish())
                self._check_end()
        except Exception as error:  # noqa: BLE001  handled as `on_error` says
            self._done = True
            unit, first, last = self._segment
            begin = max(first, self._next)
            missing = range(begin, begin + 1 if last is None else last)
            yield from failed_items(self._url, unit, self._number, missing, error)

    def _check_end(self) -> None:
        last = self._segment.end
        if last is not None and self._next < last:
            raise TarIndexError(
                f"{self._url}: has no sample {self._next}, which its index has; build the index again with "
                "`torchobj index`"
            )

    def _samples(self, samples: list[tuple[int, int, str, Any]]) -> Iterator[StreamItem]:
        unit, first, last = self._segment
        samples.reverse()
        while samples:
            begin, end, _, value = samples.pop()
            number = self._next
            self._next += 1
            if number < first:
                continue
            if last is not None and number >= last:
                self._done = True
                return
            yield StreamItem(SampleId(unit, number, begin, end), value, (self._number, number + 1, end))


def _read_ranges(
    reader: RefReader, manifest: Manifest, parts: Iterator[_ShardPart]
) -> Iterator[tuple[_Range, ObjectReader | Exception | None]]:
    """Reads parts of shards in order. The next ranges are announced within this process's share of the memory budget.

    Yields:
        Each range with its bytes, or with the exception if it cannot be read; None for an empty part.
    """

    def groups(limit: int) -> Iterator[Group[ObjectRef]]:
        range_bytes = max(_MIN_RANGE_BYTES, min(RANGE_BYTES, int(limit * _RANGE_SHARE)))
        for part in parts:
            _, _, size, version = manifest.entry(part.shard)
            url = manifest.url(part.shard)
            if part.begin >= part.end:
                yield Group([], 0, _Range(part, is_last=True))
            for begin in range(part.begin, part.end, range_bytes):
                end = min(begin + range_bytes, part.end)
                ref = ObjectRef(url, start=begin, end=end, size=size, version=version)
                yield Group([ref], end - begin, _Range(part, is_last=end == part.end))

    for group, readers in read_ahead(reader, groups, _MAX_AHEAD_BYTES):
        yield group.content, next(readers, None)
