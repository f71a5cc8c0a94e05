"""`torchobj bench --estimate`: the requests of an epoch and their price, from one listing. Reads no samples.

Parquet files also need their footers, and tar shards in any order their indexes: those of some files are read.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

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

#: Maximum number of files whose footers or indexes are read: the others are assumed to be alike.
_SOME = 64

#: Names of Parquet files.
_TABLES = (".parquet", ".pq")

#: Minimum size of the parts of a large object, and the concurrent requests that `max_in_flight="auto"` begins with:
#: those of `read/plan.rs` and `policy/settings.rs`.
_MIN_PART_BYTES, _IN_FLIGHT = 4 << 20, 64

#: A file of the disk cache fills whole blocks, and has a trailer.
_BLOCK_BYTES, _TRAILER_BYTES = 4096, 256

_ROW = "{:<28}  {:>12}  {:>14}  {:>10}  {:>12}  {:>14}  {:>12}"


class Reads(NamedTuple):
    """What one rank requests to read all that was listed, in one way."""

    name: str
    start_gets: int
    """Requests at the start of a job, for footers or indexes."""
    gets: int
    """Requests of an epoch without a cache."""
    bytes: int
    """Bytes of an epoch."""
    disk_bytes: int
    """Bytes of the disk cache that they fill."""
    is_bound: bool
    """Whether an epoch may need fewer requests, because neighbours are read together."""

    def missed(self, max_bytes: int) -> float:
        """The share of an epoch that a disk cache of this size does not have after the first one."""
        return 1 - min(1.0, max_bytes / max(1, self.disk_bytes))


def gets_of(length: int, config: StoreConfig) -> int:
    """Number of requests of one read of this many bytes, whose size is known."""
    if length < config.advanced.whole_below_bytes:
        return 1
    rest = length - config.part_bytes
    in_flight = _IN_FLIGHT if config.max_in_flight == "auto" else config.max_in_flight
    part_bytes = min(max(_divided(rest, in_flight), min(_MIN_PART_BYTES, config.part_bytes)), config.part_bytes)
    return 1 + _divided(max(0, rest), part_bytes)


def _divided(length: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-length // by)


def _reads(
    name: str, lengths: Sequence[int], config: StoreConfig, *, scale: float = 1, starts: int = 0, is_bound: bool = False
) -> Reads:
    """Reads of these lengths, a share of all that `scale` multiplies, after `starts` other requests."""
    disk = sum(_divided(length + _TRAILER_BYTES, _BLOCK_BYTES) * _BLOCK_BYTES for length in lengths)
    gets = sum(gets_of(length, config) for length in lengths)
    counts = [round(scale * count) for count in (starts, gets, sum(lengths), disk)]
    return Reads(name, counts[0], counts[1], counts[2], counts[3], is_bound)


class Listed(NamedTuple):
    """The objects of a listing, by what reads them."""

    sizes: "array[int]"
    """Of objects that are samples; no more of them is kept, because there may be many."""
    shards: list[ObjectRef]
    tables: list[ObjectRef]
    indexed: set[str]
    """URLs of shards with an index beside them."""


def listed(target: Target, store: Store, prefix: str) -> Listed:
    """Lists the target, without markers of folders. Names that begin with `_` or `.` are no shards and no tables."""
    found = Listed(array("q"), [], [], set())
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


def estimates(found: Listed, store: Store, config: StoreConfig, columns: Sequence[str] | None) -> Iterator[Reads]:
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
        samples = len(TarIndex.load(f"{ref.url}{SUFFIX}", config=config))
        lengths += [(ref.size or 0) // samples] * samples if samples else []
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


def estimate(target: Target, config: StoreConfig, columns: Sequence[str] | None, chosen: Settings) -> None:
    """Lists the target, and prints the requests and the price of an epoch, without and with a disk cache.

    Raises:
        CommandError: There are no objects.
        ConfigError, ParquetError, TarIndexError, StoreError: As `estimates` raises.
    """
    store, prefix = target.open(config)
    config = resolve(str(target.url), config)
    before = metrics()["torchobj.billed_lists"]
    found = listed(target, store, prefix)
    files = [*found.shards, *found.tables]
    count, total = len(found.sizes) + len(files), sum(found.sizes) + sum(ref.size or 0 for ref in files)
    if not count:
        raise target.nothing()
    lists, prices = Billed(billed_lists=int(metrics()["torchobj.billed_lists"] - before)), config.prices
    fields = {"objects": count, "bytes": total, "lists": lists.billed_lists, **_dollars("dollars", lists, prices)}
    requests = f"{counted(lists.billed_lists, 'request')} ({_shown(lists, prices)})"
    what = f"{counted(count, 'object')}, {human_size(total)}, listed with {requests}"
    chosen.show(fields, f"{shown(target.text)}: {what}")
    max_bytes = config.cache.max_bytes
    if not chosen.json:
        later = f"later, cache of {human_size(max_bytes)}"
        print_line(f"\n{'':<28}  {'once per job':>12}  {'each epoch':^40}  {later:^28}")
        print_line(_ROW.format("reads", "GET", "GET", "bytes", "dollars", "GET", "dollars"))
    for reads in estimates(found, store, config, columns):
        _show(reads, prices, max_bytes, chosen)
    if prices == PriceOptions():
        chosen.note("for dollars, set prices in the configuration file: prices = { get_per_1000 = 0.0004, ... }")


def _show(reads: Reads, prices: PriceOptions, max_bytes: int, chosen: Settings) -> None:
    missed = reads.missed(max_bytes)
    epoch = Billed(billed_gets=reads.gets, received_bytes=reads.bytes)
    later = Billed(billed_gets=round(missed * reads.gets), received_bytes=round(missed * reads.bytes))
    fields = {
        "reads": reads.name,
        "is_bound": reads.is_bound,
        "start_gets": reads.start_gets,
        "gets": reads.gets,
        "bytes": reads.bytes,
        "cached_gets": later.billed_gets,
        **_dollars("dollars", epoch, prices),
        **_dollars("cached_dollars", later, prices),
    }
    numbers = [f"{'<= ' if reads.is_bound and each.billed_gets else ''}{each.billed_gets:,}" for each in (epoch, later)]
    costs = [_shown(each, prices) for each in (epoch, later)]
    row = _ROW.format(
        reads.name, f"{reads.start_gets:,}", numbers[0], human_size(reads.bytes), costs[0], numbers[1], costs[1]
    )
    chosen.show(fields, row)


def _dollars(name: str, requests: Billed, prices: PriceOptions) -> dict[str, float]:
    return {} if prices == PriceOptions() else {name: requests.dollars(prices)}


def _shown(requests: Billed, prices: PriceOptions) -> str:
    return "no prices" if prices == PriceOptions() else shown_dollars(requests.dollars(prices))
