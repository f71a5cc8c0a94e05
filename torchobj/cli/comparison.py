"""Compares files and objects with their copies: which of them a transfer skips as unchanged. Does not transfer.

A copy is unchanged if it has the same size, and the same version, checksum or time. Transfers between local files and a
bucket compare checksums themselves; from bucket to bucket, this module compares the ETags of S3, then the checksums of
all bytes if both are of the same algorithm, otherwise the `mtime` in the metadata, which uploads write and copies keep.
Where there is nothing to compare, a file is transferred.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from torchobj.cli.targets import Target
from torchobj.cli.transfer_plan import Item, PlannedTransfer, is_fifo, items
from torchobj.config import StoreConfig
from torchobj.exceptions import BucketNotFoundError, ObjectNotFoundError
from torchobj.store import Store
from torchobj.store.object_info import ObjectInfo

__all__ = ["compared", "copies_of", "sources_of"]

#: Metadata of this many objects is requested at a time.
_HEADS = 1000


def sources_of(transfer: PlannedTransfer, config: StoreConfig) -> Iterator[Item]:
    """The files or objects that are transferred; a single one has the name "".

    Raises:
        ObjectNotFoundError: The single object does not exist.
    """
    if transfer.is_tree:
        return items(transfer.source, config, transfer.glob, transfer.patterns)
    return _single(transfer.source, config)


def copies_of(transfer: PlannedTransfer, config: StoreConfig) -> dict[str, Item]:
    """What is at the destination, by the names of `sources_of`."""
    destination = transfer.destination
    if is_fifo(transfer) or (destination.is_local and not destination.path.exists()):
        return {}
    if transfer.is_tree:
        return {item.name: item for item in items(destination, config)}
    try:
        return {item.name: item for item in _single(destination, config)}
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return {}


def _single(target: Target, config: StoreConfig) -> Iterator[Item]:
    if target.is_local:
        yield Item("", target.path.stat().st_size, None)
    else:
        head = Store(target.url.base, config=config).head(target.url.key)
        yield Item("", head.size, head.version)


def compared(
    transfer: PlannedTransfer, found: Iterable[Item], copies: Mapping[str, Item], config: StoreConfig
) -> Iterator[tuple[Item, bool | None]]:
    """Yields each item with whether its copy is unchanged; None if it has the same size, and nothing else to compare.

    Args:
        transfer: The transfer.
        found: Its files or objects.
        copies: What is at the destination.
        config: The configuration of both stores.
    """
    has_etags = transfer.source.url.scheme == transfer.destination.url.scheme == "s3"
    remaining = iter(found)
    while part := list(islice(remaining, _HEADS)):
        known: dict[str, bool | None] = {}
        for item in part:
            copy = copies.get(item.name)
            if copy is None or copy.size is None or copy.size != item.size:
                known[item.name] = False
            elif has_etags and item.version is not None and item.version == copy.version:
                known[item.name] = True
        unknown = [item.name for item in part if item.name not in known]
        known |= zip(unknown, _are_unchanged(transfer, unknown, config), strict=True)
        yield from ((item, known[item.name]) for item in part)


def _are_unchanged(transfer: PlannedTransfer, names: list[str], config: StoreConfig) -> Iterator[bool | None]:
    """Whether files or objects equal their copies, by the metadata of both; None if that is not known."""
    source, destination = transfer.source, transfer.destination
    if source.is_local or destination.is_local:
        local, bucket = (source, destination) if source.is_local else (destination, source)
        for name, head in zip(names, _heads(bucket, names, config), strict=True):
            path = local.path / name
            yield None if head is None else _has_time_of(path, head, to_bucket=source.is_local)
        return
    heads = (_heads(end, names, config, checksum=True) for end in (source, destination))
    yield from map(_is_equal, *heads)


def _is_equal(one: ObjectInfo | None, other: ObjectInfo | None) -> bool | None:
    """Whether two objects of the same size are equal by their checksums or times; None if that is not known."""
    if one is None or other is None:
        return None
    if one.checksum and other.checksum and _algorithm(one.checksum) == _algorithm(other.checksum):
        return one.checksum == other.checksum
    times = one.metadata.get("mtime"), other.metadata.get("mtime")
    return None if None in times else times[0] == times[1]


def _algorithm(checksum: str) -> str:
    return checksum.partition(":")[0]


def _heads(bucket: Target, names: list[str], config: StoreConfig, *, checksum: bool = False) -> list[ObjectInfo | None]:
    """Metadata of objects; None where the request fails: the transfer raises its error."""
    keys = [f"{bucket.url.key}{name}" for name in names]
    heads = Store(bucket.url.base, config=config).head_many(keys, checksum=checksum, return_errors=True)
    return [None if isinstance(head, Exception) else head for head in heads]


def _has_time_of(path: Path, head: ObjectInfo, *, to_bucket: bool) -> bool | None:
    """Whether a file has the time that an upload has written, or a download has set; None if that is not known."""
    time_ns = path.stat().st_mtime_ns
    written = head.metadata.get("mtime")
    if written is not None:
        return written == f"{time_ns // 10**9}.{time_ns % 10**9:09}".rstrip("0").rstrip(".")
    if not to_bucket and head.last_modified is not None:
        return round(head.last_modified.timestamp() * 1000) * 10**6 == time_ns or None
    return None
