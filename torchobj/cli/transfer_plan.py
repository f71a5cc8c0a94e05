"""Plans transfers: what the arguments of `cp`, `mv` and `sync` name, where it goes, and which copies are unchanged.

A copy is unchanged if it has the same size, and the same version, checksum or time. Transfers between local files and a
bucket compare checksums themselves; from bucket to bucket, this module compares the ETags of S3, then the checksums of
all bytes if both are of the same algorithm, otherwise the `mtime` in the metadata, which uploads write and copies keep.
Where there is nothing to compare, a file is transferred.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from torchobj._torchobj import is_special_file
from torchobj.cli.options import CommandError
from torchobj.cli.targets import Target, parse_target
from torchobj.config import StoreConfig
from torchobj.exceptions import BucketNotFoundError, ObjectNotFoundError
from torchobj.files.patterns import Pattern, selects
from torchobj.store import ObjectInfo, Store

#: Standard input or output.
STREAM = "-"

_NAME_BYTES = 255

#: Metadata of this many objects is requested at a time.
_HEADS = 1000


class Item(NamedTuple):
    """A file or object of a tree, or a single one, whose name is empty."""

    name: str
    """Path below the tree."""
    size: int | None = None
    version: str | None = None


@dataclasses.dataclass(frozen=True)
class PlannedTransfer:
    """One transfer: of a file or object to another name, or of a tree into a folder."""

    source: Target
    """The file or object, or the folder of the tree."""
    destination: Target
    is_tree: bool
    glob: str | None = None
    """The part of a tree that is transferred."""
    patterns: tuple[Pattern, ...] = ()
    """Select files of a tree by their paths below it."""

    @property
    def is_fifo(self) -> bool:
        """Whether the source is a FIFO, such as that of `<(command)` in a shell. It has no size and is read once."""
        return not self.is_tree and self.source.is_local and self.source.path.is_fifo()

    @property
    def is_into_special(self) -> bool:
        """Whether the destination is a device, FIFO or descriptor, which is written and not replaced."""
        return not self.is_tree and self.destination.is_local and is_special_file(self.destination.path)

    @property
    def is_between_buckets(self) -> bool:
        """Whether both ends are in buckets."""
        return not (self.source.is_local or self.destination.is_local)

    @property
    def is_on_server(self) -> bool:
        """Whether the server makes the copy, because both ends are in buckets of the same provider."""
        return self.is_between_buckets and self.source.url.scheme == self.destination.url.scheme

    def sources(self, config: StoreConfig) -> Iterator[Item]:
        """The files or objects that are transferred.

        Raises:
            ObjectNotFoundError: The single object does not exist.
        """
        if not self.is_tree:
            return _single(self.source, config)
        found = _items(self.source, config, self.glob, self.patterns)
        # A download skips them with a warning.
        return (item for item in found if not is_temporary(item.name)) if self.destination.is_local else found

    def copies(self, config: StoreConfig) -> dict[str, Item]:
        """What is at the destination, by the names of `sources`."""
        if self.is_fifo or self.is_into_special:
            return {}
        if self.destination.is_local and not self.destination.path.exists():
            return {}
        if self.is_tree:
            return {item.name: item for item in _items(self.destination, config)}
        try:
            return {item.name: item for item in _single(self.destination, config)}
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            return {}


def plan(
    sources: Sequence[str], destination: str, *, recursive: bool, raw: bool, patterns: tuple[Pattern, ...] = ()
) -> list[PlannedTransfer]:
    """The transfers of a command.

    Args:
        sources: Files, objects, folders or globs.
        destination: A folder, or the new name of a single file or object.
        recursive: Whether folders are transferred.
        raw: Whether wildcards are taken as they are.
        patterns: Select files by their paths below a folder, and single ones by their last names.

    Raises:
        CommandError: The arguments do not fit together; the message names them.
    """
    into = parse_target(destination, raw=True)
    transfers = []
    for text in sources:
        source = parse_target(text, raw=raw)
        if source.is_local and into.is_local:
            raise CommandError(f"{text} and {destination} are both local; one of them must be s3:// or gs://")
        if source.glob is not None:
            folder, glob = source.split_glob()
            transfers.append(PlannedTransfer(folder, into.folder(), is_tree=True, glob=glob, patterns=patterns))
        elif recursive and not (source.is_local and source.path.is_file()):
            transfers.append(PlannedTransfer(source.folder(), into.folder(), is_tree=True, patterns=patterns))
        elif source.names_folder:
            raise CommandError(f"{text}: names a folder; --recursive transfers all that is in it")
        elif selects(patterns, source.url.key.rpartition("/")[2]):
            transfers.append(PlannedTransfer(source, _named(into, source, several=len(sources) > 1), is_tree=False))
    for transfer in transfers:
        _check(transfer)
    _check_distinct(transfer.destination.shown for transfer in transfers if not transfer.is_tree)
    return transfers


def check_destinations(transfers: list[PlannedTransfer], config: StoreConfig) -> None:
    """Checks that no two transfers write the same file or object. Lists trees if there are several transfers.

    Raises:
        CommandError: Two of them do; nothing has been transferred.
    """
    if len(transfers) > 1 and any(transfer.is_tree for transfer in transfers):
        _check_distinct(
            transfer.destination.child(item.name).shown
            for transfer in transfers
            for item in (transfer.sources(config) if transfer.is_tree else [Item("")])
        )


def _check_distinct(destinations: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in destinations:
        if name in seen:
            raise CommandError(f"{name}: two sources would be written to it; copy or move them to separate folders")
        seen.add(name)


def _named(into: Target, source: Target, *, several: bool) -> Target:
    """Where a single file or object goes."""
    if not into.names_folder:
        if several:
            raise CommandError(f"{into.text}: must be a folder for several sources; a slash at the end makes it one")
        return into
    name = source.url.key.rpartition("/")[2]
    if into.is_local and name in ("", ".", ".."):
        raise CommandError(f"{source.text}: its key does not end in a file name; name the file to write")
    return into.folder().child(name)


def _check(transfer: PlannedTransfer) -> None:
    source, destination = transfer.source, transfer.destination
    if source.is_local and not source.path.exists():
        raise CommandError(f"{source.text}: no such file or folder")
    if not transfer.is_tree and source.is_local and not (source.path.is_file() or transfer.is_fifo):
        stream = f"`torchobj cp - {quote(destination.shown)} < {quote(source.text)}` reads it to its end"
        raise CommandError(f"{source.text}: a device or socket, not a file; {stream}")
    if transfer.is_tree and source.is_local and not source.path.is_dir():
        raise CommandError(f"{source.text}: not a folder")
    if transfer.is_tree and destination.is_local and destination.path.exists() and not destination.path.is_dir():
        raise CommandError(f"{destination.text}: is a file, and must be a folder")
    if not transfer.is_tree and destination.is_local:
        name = destination.path.name
        if "\0" in str(destination.path) or len(name.encode(errors="surrogateescape")) > _NAME_BYTES:
            raise CommandError(f"{source.text}: its key is not a valid file name; name the file to write")
    if source.url == destination.url:
        raise CommandError(f"{source.text} and {destination.text} are the same")
    if transfer.is_tree and source.url.base == destination.url.base and not source.is_local:
        first, second = source.url.key, destination.url.key
        if first.startswith(second) or second.startswith(first):
            raise CommandError(f"{source.text} and {destination.text} contain each other; name separate folders")


def is_standard_output(text: str) -> bool:
    """Whether a path is that of the standard output, such as `/dev/stdout`."""
    if text == STREAM or ("://" in text and not text.startswith("file://")):
        return False
    try:
        return os.path.samestat(parse_target(text, raw=True).path.stat(), os.fstat(1))
    except OSError:
        return False


def is_temporary(name: str) -> bool:
    """Whether a path is that of a temporary file of `torchobj.files`, which transfers no files with such names."""
    return any(component.startswith(".torchobj-") for component in name.split("/"))


def _items(
    tree: Target, config: StoreConfig, glob: str | None = None, patterns: Sequence[Pattern] = ()
) -> Iterator[Item]:
    """The files or objects of a folder, in the order of their names, without empty objects that mark folders."""
    store = Store(f"file://{tree.path}") if tree.is_local else Store(tree.url.base, config=config)
    prefix = "" if tree.is_local else tree.url.key
    for info in store.list(prefix, glob=glob):
        name = info.key.removeprefix(prefix)
        is_marker = info.size == 0 and (not name or name.endswith("/"))
        if is_marker or (tree.is_local and is_temporary(name)):
            continue
        if selects(patterns, name):
            yield Item(name, info.size, info.version)


def _single(target: Target, config: StoreConfig) -> Iterator[Item]:
    if target.is_local:
        yield Item("", target.path.stat().st_size)
    else:
        head = Store(target.url.base, config=config).head(target.url.key)
        yield Item("", head.size, head.version)


def compared(
    transfer: PlannedTransfer, config: StoreConfig, *, skip_unchanged: bool
) -> Iterator[tuple[Item, Item | None, bool | None]]:
    """Yields each file or object to transfer with its copy, and whether this is unchanged.

    It is None if the sizes are equal and neither versions, checksums nor times can be compared. Without
    `skip_unchanged`, nothing is compared, and no request is sent for a single file or object.
    """
    if not skip_unchanged:
        for item in transfer.sources(config) if transfer.is_tree else [Item("")]:
            yield item, None, False
        return
    copies = transfer.copies(config)
    has_etags = transfer.source.url.scheme == transfer.destination.url.scheme == "s3"
    remaining = transfer.sources(config)
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
        yield from ((item, copies.get(item.name), known[item.name]) for item in part)


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
