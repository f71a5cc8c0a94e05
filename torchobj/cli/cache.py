"""`torchobj cache`: the files of a disk cache. Imports no torch."""

import time
from datetime import UTC, datetime
from pathlib import Path

import click

from torchobj import _torchobj
from torchobj.cli.options import CommandError, LocalCommand, output_options, settings, yes_option
from torchobj.cli.output import counted, human_size, print_line, shown, time_shown
from torchobj.cli.removing import confirm

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))


@click.group(params=output_options(), short_help="The disk cache: ls, du, clear, verify.")
def cache() -> None:
    """Shows, checks and deletes the files of a disk cache: FOLDER is that of `CacheOptions`."""


@cache.command(cls=LocalCommand)
@_FOLDER
def ls(folder: Path) -> None:
    """Lists the files of the cache in FOLDER: time of the last read, size on the disk, URL, and range of a part."""
    chosen, files = settings(), _torchobj.CacheFiles(folder)
    for found, size, read_s, _ in files:
        read = datetime.fromtimestamp(read_s, UTC)
        fields = {"read": read.isoformat(), "disk_bytes": size}
        name = "damaged"
        if found is not None:
            url, start, end, object_bytes = found
            fields |= {"url": url, "start": start, "end": end, "size": object_bytes}
            name = shown(url) if end - start == object_bytes else f"{shown(url)} {start}..{end}"
        chosen.show(fields, f"{time_shown(read)}  {human_size(size):>10}  {name}")
    _show_others(files)


def _show_others(files: _torchobj.CacheFiles) -> None:
    """Names what is in the folder of the cache and is not of the cache."""
    for path in files.others():
        settings().show(
            {"action": "keep", "path": str(path)}, f"{shown(str(path))} is not a file of the cache and is kept"
        )


@cache.command(cls=LocalCommand)
@_FOLDER
def du(folder: Path) -> None:
    """Prints the number of files of the cache in FOLDER, their size and age, and the size that processes count."""
    files = _torchobj.CacheFiles(folder)
    accounted, now = files.used_bytes(), time.time()
    found = [(size, read_s) for _, size, read_s, _ in files]
    total, oldest = sum(size for size, _ in found), min((read_s for _, read_s in found), default=now)
    fields = {"files": len(found), "disk_bytes": total, "accounted_bytes": accounted, "oldest_s": round(now - oldest)}
    text = f"{counted(len(found), 'file')}, {human_size(total)}"
    if found:
        text += f"; the oldest was read {time_shown(datetime.fromtimestamp(oldest, UTC))}"
    if accounted is not None and accounted != total:
        text += f"; {human_size(accounted)} are accounted, with files that are being written"
    settings().show(fields, text)


@cache.command(cls=LocalCommand)
@_FOLDER
@click.option(
    "--max-bytes",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Delete those that were read longest ago, until at most N bytes are left.",
)
@yes_option
def clear(folder: Path, *, max_bytes: int, yes: bool) -> None:
    """Deletes the files of the cache in FOLDER. Jobs that use it read from the store."""
    files = _torchobj.CacheFiles(folder)
    sizes = [size for _, size, _, _ in files]
    if not yes:
        found = f"{counted(len(sizes), 'file')}, {human_size(sum(sizes))}"
        least = f"of {found}, delete all but {human_size(max_bytes)}" if max_bytes else f"delete {found},"
        confirm(f"{least} of the cache in {folder}?", "--yes deletes without a question")
    number, total = files.evict(max_bytes)
    _show_others(files)
    text = f"deleted {counted(number, 'file')}, {human_size(total)}"
    settings().show({"files": number, "disk_bytes": total}, text)


@cache.command(cls=LocalCommand)
@_FOLDER
def verify(folder: Path) -> None:
    """Compares all bytes of the cache in FOLDER with their checksums, deletes damaged files, and counts the others."""
    chosen, files = settings(), _torchobj.CacheFiles(folder, verify=True)
    number, damaged = 0, 0
    for found, size, _, intact in files:
        number += 1
        if not intact:
            damaged += 1
            files.remove()
            url = None if found is None else found[0]
            name = "a damaged file" if url is None else f"the damaged file of {shown(url)}"
            chosen.show({"action": "delete", "url": url, "disk_bytes": size}, f"deleted {name}")
    files.correct()
    _show_others(files)
    if damaged:
        raise CommandError(f"{damaged} of {counted(number, 'file')} were damaged and are deleted; check the disk")
    if not chosen.json:
        print_line(f"{counted(number, 'file')}: no damage")
