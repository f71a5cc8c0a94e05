"""`torchobj head`, `torchobj cat` and `torchobj scan`."""

import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

import click

from torchobj.cli.errors import CommandError
from torchobj.cli.options import Command, settings
from torchobj.cli.output import fields_of, human_size, print_json, rows, shown
from torchobj.cli.targets import Target, parse_target
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig
from torchobj.store import Store, reads
from torchobj.store.file_objects import open as open_object
from torchobj.store.object_info import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = ["cat", "head", "scan", "write_target"]

_BLOCK_BYTES = 1 << 20

#: Maximum number of objects that are read ahead, and of their bytes. Larger objects than the third are streamed: their
#: parts are requested concurrently.
_AHEAD_OBJECTS = 16
_AHEAD_BYTES = 64 << 20
_AHEAD_OBJECT_BYTES = 8 << 20


@click.command(cls=Command, short_help="Show size, version, headers and metadata of an object.")
@click.argument("url", type=URL)
def head(url: str) -> None:
    """Shows size, version, headers and metadata of the object at URL. Wildcards are taken as they are."""
    chosen = settings()
    target = parse_target(url, raw=True)
    if target.names_folder:
        raise CommandError(f"{url}: names no object; `torchobj ls {url}` lists those below it")
    store, key = target.open(chosen.config(url))
    info = store.head(key)
    fields = fields_of(info, target.url_of(store, key))
    if chosen.json:
        print_json(fields)
        return
    metadata = info.metadata.items()
    table = [(name, shown(str(value))) for name, value in fields.items() if name not in ("metadata", "key", "size")]
    size = ("size", f"{info.size} ({human_size(info.size)})")
    rows([table[0], size, *table[1:], *((f"metadata {shown(name)}", shown(value)) for name, value in metadata)])


@click.command(cls=Command, short_help="Write objects to the standard output.")
@click.argument("urls", nargs=-1, required=True, type=URL)
@click.option("--raw", is_flag=True, help="Take wildcards in URLs as they are.")
def cat(urls: tuple[str, ...], *, raw: bool) -> None:
    """Writes the objects at URLS to the standard output, one after the other; those of a glob in key order."""
    config = settings().config(*urls)
    out = sys.stdout.buffer
    for target in [parse_target(url, raw=raw) for url in urls]:
        write_target(target, out, config)


def write_target(target: Target, out: BinaryIO, config: StoreConfig) -> None:
    """Writes an object, or those that match a glob in key order, to a stream.

    Raises:
        CommandError: It names a folder, or no key matches.
    """
    if target.glob is None and target.names_folder:
        raise CommandError(f"{target.text}: names no object; add * for all objects of this folder")
    store, key = target.open(config)
    if target.glob is None:
        _write_object(f"{store.url}/{key}", out, config)
    elif not _write_objects(store, target.objects(store, key), out, config):
        raise target.nothing()


def _write_objects(store: Store, objects: "Iterable[ObjectInfo]", out: BinaryIO, config: StoreConfig) -> int:
    """Writes objects to a stream in order; the next small ones are read meanwhile. Returns their number."""

    def read(url: str) -> bytes:
        # Copied, so that what is read ahead takes none of the memory that other reads wait for.
        return bytes(reads.get_many([url], config=config)[0])

    remaining, count = iter(objects), 0
    ahead: deque[tuple[str, int, Future[bytes] | None]] = deque()
    ahead_bytes = 0
    pool = ThreadPoolExecutor(_AHEAD_OBJECTS, "torchobj-cat")
    try:
        while True:
            while len(ahead) < _AHEAD_OBJECTS and ahead_bytes <= _AHEAD_BYTES - _AHEAD_OBJECT_BYTES:
                info = next(remaining, None)
                if info is None:
                    break
                is_small = info.size is not None and info.size <= _AHEAD_OBJECT_BYTES
                url = f"{store.url}/{info.key}"
                ahead.append((url, info.size or 0, pool.submit(read, url) if is_small else None))
                ahead_bytes += (info.size or 0) if is_small else 0
            if not ahead:
                return count
            url, size, reading = ahead.popleft()
            if reading is None:
                _write_object(url, out, config)
            else:
                out.write(reading.result())
                out.flush()
                ahead_bytes -= size
            count += 1
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _write_object(url: str, out: BinaryIO, config: StoreConfig) -> None:
    """Writes an object to a stream, reading ahead."""
    with open_object(url, "rb", config=config) as reader:
        while block := reader.read(_BLOCK_BYTES):
            out.write(block)
    out.flush()


@click.command(cls=Command, short_help="Print metadata of all objects under a prefix, as JSON lines.")
@click.argument("url", type=URL)
@click.option("--has-metadata", metavar="NAME", help="Print only objects with this user-defined metadata.")
@click.option("--limit", metavar="N", type=click.IntRange(min=1), help="Print only this many objects.")
@click.option("--raw", is_flag=True, help="Take wildcards in the URL as they are.")
def scan(url: str, *, has_metadata: str | None, limit: int | None, raw: bool) -> None:
    """Prints size, version, headers and metadata of all objects under URL, as JSON lines in any order.

    Sends a HEAD request for each object, while the prefix is being listed. Keys are compared as by `ls`.
    """
    target = parse_target(url, raw=raw)
    store, prefix = target.open(settings().config(url))
    found = store.scan(prefix, glob=target.glob, has_metadata=has_metadata)
    count = 0
    for count, info in enumerate(islice(found, limit), 1):  # noqa: B007  used after the loop
        print_json(fields_of(info, target.url_of(store, info.key)))
    if count == 0 and has_metadata is None:
        raise target.nothing()
