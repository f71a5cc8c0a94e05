"""`torchobj manifest`: builds a manifest file of a prefix, and shows one."""

from typing import Any

import click

from torchobj.cli.options import Command, settings, shared_options
from torchobj.cli.output import human_size, print_json, print_line, rows, shown
from torchobj.cli.targets import parse_target
from torchobj.cli.url_argument import URL
from torchobj.manifest import Manifest

__all__ = ["manifest"]


@click.group(params=shared_options(), short_help="Manifest files: build, show.")
def manifest() -> None:
    """Builds and shows manifest files: the objects of a dataset with their sizes and versions, as Parquet."""


@manifest.command(cls=Command)
@click.argument("url", type=URL)
@click.argument("file", type=URL)
@click.option("--suffix", "suffixes", metavar="TEXT", multiple=True, help="Only keys that end with it; repeatable.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of objects, the first in key order.")
@click.option("--raw", is_flag=True, help="Take wildcards in URL as they are.")
def build(url: str, file: str, *, suffixes: tuple[str, ...], limit: int | None, raw: bool) -> None:
    """Lists the objects under URL, whose keys are compared as by `ls`, and writes the manifest FILE, a path or URL.

    `ObjectMapDataset.from_manifest` reads its objects without a listing.
    """
    chosen, target = settings(), parse_target(url, raw=raw)
    config = chosen.config(url, file)
    whole = target.folder() if target.is_local and target.names_folder else target
    built = Manifest.from_prefix(str(whole.url), glob=target.glob, suffixes=list(suffixes), limit=limit, config=config)
    if len(built) == 0:
        raise target.nothing()
    built.save(str(parse_target(file, raw=True).url), config=config)
    _summary(built, file)


@manifest.command(cls=Command)
@click.argument("file", type=URL)
@click.option("--list", "is_listed", is_flag=True, help="Print its objects: size and URL.")
def show(file: str, *, is_listed: bool) -> None:
    """Shows the number of objects, their size and the digest of the manifest FILE, a path or URL."""
    loaded = Manifest.load(str(parse_target(file, raw=True).url), config=settings().config(file))
    if not is_listed:
        _summary(loaded, file)
        return
    for index in range(len(loaded)):
        _, _, size, version = loaded.entry(index)
        if settings().json:
            fields = {"url": loaded.url(index), "size": size, "version": version}
            print_json({name: value for name, value in fields.items() if value is not None})
        else:
            print_line(f"{human_size(size):>10}  {shown(loaded.url(index))}")


def _summary(found: Manifest, file: str) -> None:
    sizes = [found.entry(index)[2] for index in range(len(found))]
    known = [size for size in sizes if size is not None]
    fields: dict[str, Any] = {"file": file, "objects": len(found), "bytes": sum(known)}
    fields |= {"unknown_sizes": len(sizes) - len(known), "stores": found.bases(), "digest": found.digest()}
    if settings().json:
        print_json(fields)
        return
    size = f"{fields['bytes']} ({human_size(fields['bytes'])})"
    size += f", {fields['unknown_sizes']} objects of unknown size" if fields["unknown_sizes"] else ""
    stores = " ".join(map(shown, found.bases()))
    table = [("file", shown(file)), ("objects", str(len(found))), ("bytes", size)]
    rows([*table, ("stores", stores), ("digest", found.digest())])
