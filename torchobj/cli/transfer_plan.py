"""Plans transfers: which arguments of `cp`, `mv` and `sync` name files, objects or trees, and where each goes."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchobj.cli.errors import CommandError
from torchobj.cli.targets import Target, parse_target
from torchobj.config import StoreConfig
from torchobj.files.patterns import Pattern, selects
from torchobj.store import Store

__all__ = ["STREAM", "Item", "PlannedTransfer", "check_destinations", "is_fifo", "is_temporary", "items", "plan"]

#: Standard input or output.
STREAM = "-"

_NAME_BYTES = 255


class Item(NamedTuple):
    """A file or object of a tree."""

    name: str
    """Path below the tree."""
    size: int | None
    version: str | None


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

    def __str__(self) -> str:
        return f"{self.source.shown} -> {self.destination.shown}"


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
        _check_distinct(name for transfer in transfers for name in _destinations(transfer, config))


def _destinations(transfer: PlannedTransfer, config: StoreConfig) -> Iterator[str]:
    if not transfer.is_tree:
        yield transfer.destination.shown
        return
    for item in items(transfer.source, config, transfer.glob, transfer.patterns):
        yield transfer.destination.child(item.name).shown


def _check_distinct(destinations: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in destinations:
        if name in seen:
            raise CommandError(f"{name}: two sources would be written to it; copy or move them to separate folders")
        seen.add(name)


def is_fifo(transfer: PlannedTransfer) -> bool:
    """Whether the source is a FIFO, such as that of `<(command)` in a shell. It has no size and is read once."""
    return not transfer.is_tree and transfer.source.is_local and transfer.source.path.is_fifo()


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
    if not transfer.is_tree and source.is_local and not (source.path.is_file() or is_fifo(transfer)):
        stream = f"`torchobj cp - {destination.shown} < {source.text}` reads it to its end"
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


def is_temporary(name: str) -> bool:
    """Whether `torchobj.files` uses the file for an interrupted download."""
    return name.rpartition("/")[2].startswith(".torchobj-")


def items(
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
