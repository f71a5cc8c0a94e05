"""`torchobj head`, `torchobj cat` and `torchobj scan`."""

import sys
from typing import TYPE_CHECKING, BinaryIO

import click

from torchobj.checkpoint.files import open as open_object
from torchobj.cli.errors import CommandError
from torchobj.cli.options import Command, settings
from torchobj.cli.output import fields_of, human_size, print_json, rows, shown
from torchobj.cli.targets import Target, parse_target
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = ["cat", "head", "scan"]

_BLOCK_BYTES = 1 << 20


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
        if target.glob is None and target.names_folder:
            raise CommandError(f"{target.text}: names no object; add * for all objects of this folder")
        count = 0
        for count, url in enumerate(_urls(target, config), 1):  # noqa: B007  used after the loop
            write_object(url, out, config)
        if count == 0:
            raise target.nothing()


def _urls(target: Target, config: StoreConfig) -> "Iterator[str]":
    store, key = target.open(config)
    if target.glob is None:
        yield f"{store.url}/{key}"
        return
    for info in target.objects(store, key):
        yield f"{store.url}/{info.key}"


def write_object(url: str, out: BinaryIO, config: StoreConfig) -> int:
    """Writes an object to a stream, reading ahead. Returns its size in bytes."""
    size = 0
    with open_object(url, "rb", config=config) as reader:
        while block := reader.read(_BLOCK_BYTES):
            out.write(block)
            size += len(block)
    out.flush()
    return size


@click.command(cls=Command, short_help="Print metadata of all objects under a prefix, as JSON lines.")
@click.argument("url", type=URL)
@click.option("--has-metadata", metavar="NAME", help="Print only objects with this user-defined metadata.")
@click.option("--raw", is_flag=True, help="Take wildcards in the URL as they are.")
def scan(url: str, *, has_metadata: str | None, raw: bool) -> None:
    """Prints size, version, headers and metadata of all objects under URL, as JSON lines in any order.

    Sends a HEAD request for each object, while the prefix is being listed. Keys are compared as by `ls`.
    """
    target = parse_target(url, raw=raw)
    store, prefix = target.open(settings().config(url))
    found = store.scan(prefix, glob=target.glob, has_metadata=has_metadata)
    count = 0
    for count, info in enumerate(found, 1):  # noqa: B007  used after the loop
        print_json(fields_of(info, target.url_of(store, info.key)))
    if count == 0 and has_metadata is None:
        raise target.nothing()
