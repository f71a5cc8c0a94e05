"""`torchobj bench --estimate`: the requests of an epoch and their price, from one listing. Reads no samples.

Parquet files also need their footers, and tar shards in any order their indexes: those of some files are read.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torchobj._torchobj import ObjectRef
from torchobj.cli.options import Settings
from torchobj.cli.output import counted, human_size, print_line, shown
from torchobj.cli.targets import Target
from torchobj.config import PriceOptions, StoreConfig, resolve
from torchobj.parquet.row_groups import FOOTER_BYTES, missing_footer_bytes, open_file
from torchobj.shards.index import TarIndex
from torchobj.shards.index_file import SUFFIX
from torchobj.shards.shard_urls import TAR_SUFFIXES, compression, is_data
from torchobj.store import Store
from torchobj.telemetry import metrics
from torchobj.telemetry.billing import Billed, shown_dollars
from torchobj.urls import CLOUD_SCHEMES

#: Maximum number of files whose footers or indexes are read: the others are assumed to be alike.
_SOME = 64

#: Names of Parquet files.
_TABLES = (".parquet", ".pq")

#: Minimum size of the parts of a large object, and the concurrent requests that `max_in_flight="auto"` begins with:
#: those of `read/plan.rs` and `policy/settings.rs`.
_MIN_PART_BYTES, _IN_FLIGHT = 4 << 20, 64

#: A file of the disk cache fills whole pages, and has a trailer: those of `cache/usage.rs` and `cache/entry.rs`.
_PAGE_BYTES, _BLOCK_BYTES, _CRC_BYTES, _END_BYTES = 4 << 10, 64 << 10, 4, 72

#: Length of the URL in a trailer, which is not known of each object.
_URL_BYTES = 100


class Reads(NamedTuple):
    """What one rank requests to read all that was listed, in one way."""

    name: str
    is_bound: bool
    """Whether an epoch may need fewer requests, because neighbours are read together."""
    start_gets: int
    """Requests at the start of a job, for footers or indexes."""
    gets: int
    """Requests of an epoch without a cache."""
    bytes: int
    """Bytes of an epoch."""
    admitted_gets: int
    """Requests that a disk cache admits."""
    admitted_bytes: int
    """Bytes of these requests."""
    disk_bytes: int
    """Bytes of the disk cache that they fill."""

    def later(self, max_bytes: int) -> Billed:
        """What an epoch requests after the first one, with a disk cache of this size."""
        kept = min(1.0, max_bytes / max(1, self.disk_bytes))
        gets, received = self.gets - kept * self.admitted_gets, self.bytes - kept * self.admitted_bytes
        return Billed(billed_gets=round(gets), received_bytes=round(received))


def parts_of(length: int, config: StoreConfig) -> list[int]:
    """The bytes of each request of one read of this many bytes, whose size is known."""
    if length < config.advanced.whole_below_bytes:
        return [length]
    rest = max(0, length - config.part_bytes)
    in_flight = _IN_FLIGHT if config.max_in_flight == "auto" else config.max_in_flight
    part_bytes = min(max(_divided(rest, in_flight), min(_MIN_PART_BYTES, config.part_bytes)), config.part_bytes)
    return [length - rest, *(min(part_bytes, rest - begin) for begin in range(0, rest, part_bytes))]


def _disk_bytes(length: int) -> int:
    """Bytes of the disk that a file of the cache fills."""
    file_bytes = length + _divided(length, _BLOCK_BYTES) * _CRC_BYTES + _URL_BYTES + _END_BYTES
    return _divided(file_bytes, _PAGE_BYTES) * _PAGE_BYTES


def _divided(length: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-length // by)


def _reads(
    name: str, lengths: Sequence[int], config: StoreConfig, *, scale: float = 1, starts: int = 0, is_bound: bool = False
) -> Reads:
    """Reads of these lengths, a share of all that `scale` multiplies, after `starts` other requests."""
    parts = [part for length in lengths for part in parts_of(length, config)]
    max_part_bytes = min(config.cache.max_object_bytes, config.cache.max_bytes)
    admitted = [part for part in parts if part <= max_part_bytes]
    disk_bytes = sum(map(_disk_bytes, admitted))
    numbers = [starts, len(parts), sum(parts), len(admitted), sum(admitted), disk_bytes]
    return Reads(name, is_bound, *(round(scale * number) for number in numbers))


class Listing(NamedTuple):
    """The objects of a listing, by what reads them."""

    sizes: "array[int]"
    """Of objects that are samples; no more of them is kept, because there may be many."""
    shards: list[ObjectRef]
    tables: list[ObjectRef]
    indexed: set[str]
    """URLs of shards with an index beside them."""


def list_target(target: Target, store: Store, prefix: str) -> Listing:
    """Lists the target, without markers of folders. Names that begin with `_` or `.` are no shards and no tables."""
    found = Listing(array("q"), [], [], set())
    for info in target.objects(store, prefix):
        url, size = f"{store.url}/{info.key}", info.size or 0
        if url.endswith(SUFFIX):
            found.indexed.add(url.removesuffix(SUFFIX))
        elif url.endswith((*TAR_SUFFIXES, *_TABLES)):
            if is_data(info.key.removeprefix(prefix)):
                kind = found.shards if url.endswith(TAR_SUFFIXES) else found.tables
                kind.append(ObjectRef(url, size=size, version=info.version))
        elif not url.endswith("/"):
            found.sizes.append(size)
    return found


def ways_to_read(found: Listing, store: Store, config: StoreConfig, columns: Sequence[str] | None) -> Iterator[Reads]:
    """The ways in which datasets read these objects, each for one rank that reads all of them.

    Args:
        found: The objects.
        store: Their store.
        config: Its resolved configuration.
        columns: Columns of Parquet files; None: all.

    Raises:
        ConfigError: A column does not exist.
        ParquetError, TarIndexError: A file is damaged.
        StoreError: It cannot be read.
    """
    if found.sizes:
        yield _reads("objects", found.sizes, config)
    if found.shards:
        yield _in_order(found.shards, config)
        if all(ref.url in found.indexed and compression(ref.url) is None for ref in found.shards):
            yield _in_any_order(found.shards, config)
    if found.tables:
        yield _of_tables(found.tables, store, config, columns)


def _in_order(shards: Sequence[ObjectRef], config: StoreConfig) -> Reads:
    from torchobj.datasets.containers.tar_stream import RANGE_BYTES  # noqa: PLC0415  imports torch

    ranges = [
        min(RANGE_BYTES, size - begin)
        for size in (ref.size or 0 for ref in shards)
        for begin in range(0, size, RANGE_BYTES)
    ]
    return _reads("tar shards, in their order", ranges, config)


def _in_any_order(shards: Sequence[ObjectRef], config: StoreConfig) -> Reads:
    some = _some(shards)
    lengths: list[int] = []
    for ref in some:
        index = TarIndex.load(f"{ref.url}{SUFFIX}", config=config)
        ranges = (index.data_range(number) for number in range(len(index)))
        lengths += [end - begin for _, begin, end in ranges]
    scale = len(shards) / len(some)
    return _reads("tar shards, in any order", lengths, config, scale=scale, starts=len(some), is_bound=True)


def _of_tables(tables: Sequence[ObjectRef], store: Store, config: StoreConfig, columns: Sequence[str] | None) -> Reads:
    some, lengths, starts = _some(tables), list[int](), 0
    ends = store.get_many([_end(ref, FOOTER_BYTES) for ref in some])
    for ref, end in zip(some, ends, strict=True):
        missing = missing_footer_bytes(end, ref.size or 0, ref.url)
        footer = store.get_many([_end(ref, len(end) + missing)])[0] if missing else end
        starts += 2 if missing else 1
        file = open_file(ref.url, footer, ref.size or 0, columns)
        lengths += [last - first for group in file.row_groups for first, last in group.ranges]
    scale = len(tables) / len(some)
    return _reads("Parquet", lengths, config, scale=scale, starts=starts, is_bound=True)


def _end(ref: ObjectRef, length: int) -> ObjectRef:
    size = ref.size or 0
    return ObjectRef(ref.url, start=max(0, size - length), end=size, size=size, version=ref.version)


def _some(refs: Sequence[ObjectRef]) -> Sequence[ObjectRef]:
    return refs[:: _divided(len(refs), _SOME)]


def _is_cached(target: Target, config: StoreConfig) -> bool:
    """Whether a disk cache has what earlier epochs read."""
    has_customer_key = target.url.scheme == "s3" and config.s3.customer_key_file is not None
    has_cache = config.cache.folder is not None and config.cache.admit
    return has_cache and target.url.scheme in CLOUD_SCHEMES and not has_customer_key


def estimate(target: Target, config: StoreConfig, columns: Sequence[str] | None, chosen: Settings) -> None:
    """Lists the target, and prints the requests and the price of an epoch, and of later ones with the disk cache.

    Raises:
        CommandError: There are no objects.
        ConfigError, ParquetError, TarIndexError, StoreError: As `ways_to_read` raises.
    """
    store, prefix = target.open(config)
    config = resolve(str(target.url), config)
    before = metrics()["torchobj.billed_lists"]
    found = list_target(target, store, prefix)
    files = [*found.shards, *found.tables]
    count, total = len(found.sizes) + len(files), sum(found.sizes) + sum(ref.size or 0 for ref in files)
    if not count:
        raise target.nothing()
    lists, prices = Billed(billed_lists=int(metrics()["torchobj.billed_lists"] - before)), config.prices
    # An error precedes all that is printed.
    ways = list(ways_to_read(found, store, config, columns))
    fields = {"objects": count, "bytes": total, "lists": lists.billed_lists, **_dollars("dollars", lists, prices)}
    requests = " ".join([counted(lists.billed_lists, "request"), *(f"({cost})" for cost in _costs(lists, prices))])
    what = f"{counted(count, 'object')}, {human_size(total)}, listed with {requests}"
    chosen.show(fields, f"{shown(target.text)}: {what}")
    max_bytes = config.cache.max_bytes if _is_cached(target, config) else None
    dollars = ["dollars"] if prices.are_given else []
    table = [["", "at the start", "each epoch", "", *("" for _ in dollars)], ["reads", "GET", "GET", "bytes", *dollars]]
    if max_bytes is not None:
        table[0] += [f"later, cache of {human_size(max_bytes)}", *("" for _ in dollars)]
        table[1] += ["GET", *dollars]
    rows = [_row(reads, prices, max_bytes) for reads in ways]
    lines = _aligned([*table, *(cells for _, cells in rows)])
    if not chosen.json:
        print_line("\n" + "\n".join(lines[:2]))
    for (fields, _), line in zip(rows, lines[2:], strict=True):
        chosen.show(fields, line)
    if not prices.are_given:
        chosen.note("for dollars, set prices in the configuration file: prices = { get_per_1000 = 0.0004, ... }")


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row: the first column begins at the left, the others end at the right."""
    first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        f"{row[0]:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))
        for row in table
    ]


def _row(reads: Reads, prices: PriceOptions, max_bytes: int | None) -> tuple[dict[str, Any], list[str]]:
    """The fields and the cells of one way to read."""

    def cell(requests: Billed) -> str:
        return f"{'<= ' if reads.is_bound and requests.billed_gets else ''}{requests.billed_gets:,}"

    epoch = Billed(billed_gets=reads.gets, received_bytes=reads.bytes)
    fields: dict[str, Any] = {
        "reads": reads.name,
        "is_bound": reads.is_bound,
        "start_gets": reads.start_gets,
        "gets": reads.gets,
        "bytes": reads.bytes,
        **_dollars("dollars", epoch, prices),
    }
    cells = [reads.name, f"{reads.start_gets:,}", cell(epoch), human_size(reads.bytes), *_costs(epoch, prices)]
    if max_bytes is not None:
        later = reads.later(max_bytes)
        fields |= {"cached_gets": later.billed_gets, **_dollars("cached_dollars", later, prices)}
        cells += [cell(later), *_costs(later, prices)]
    return fields, cells


def _dollars(name: str, requests: Billed, prices: PriceOptions) -> dict[str, float]:
    return {name: requests.dollars(prices)} if prices.are_given else {}


def _costs(requests: Billed, prices: PriceOptions) -> list[str]:
    return [shown_dollars(requests.dollars(prices))] if prices.are_given else []
