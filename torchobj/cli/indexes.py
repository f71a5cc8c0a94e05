"""`torchobj index`: writes the indexes of tar shards. `torchobj.shards.index` reads the headers."""

import time

import click

from torchobj.cli.options import Command, settings
from torchobj.cli.output import duration, print_json, print_line, shown
from torchobj.cli.progress import reporting
from torchobj.cli.targets import parse_target
from torchobj.cli.url_argument import URL
from torchobj.shards import index_file
from torchobj.shards.index import TarIndex
from torchobj.shards.shard_urls import shard_manifest

__all__ = ["index"]


@click.command(cls=Command, short_help="Index tar shards for random access.")
@click.argument("shards", nargs=-1, required=True, type=URL)
@click.option("-o", "--output", "file", metavar="FILE", type=URL, help="One index of all shards, a path or URL.")
def index(shards: tuple[str, ...], *, file: str | None) -> None:
    """Writes an index beside each of SHARDS that has none, or one for another size or version.

    SHARDS are URLs, patterns with braces or wildcards, or prefixes that end with a slash. Only headers are read.
    `TarMapDataset` reads the samples in any order by their index.
    """
    chosen = settings()
    index_file.check_installed()
    urls = [str(parse_target(text, raw=True).url) for text in shards]
    config = chosen.config(*shards, *([] if file is None else [file]))
    started = time.monotonic()
    manifest = shard_manifest(urls, config)
    with reporting("index", quiet=chosen.json) as report:
        if file is None:
            written = TarIndex.update_per_shard(manifest, config=config, progress=report)
        else:
            target = str(parse_target(file, raw=True).url)
            TarIndex.load_or_build(manifest, config=config, progress=report).save(target, config=config)
            written = [target]
    if chosen.json:
        print_json({"shards": len(manifest), "written": written})
        return
    files = f"{len(written)} files" if len(written) != 1 else shown(written[0])
    print_line(f"{len(manifest)} shards: wrote {files} in {duration(time.monotonic() - started)}")
