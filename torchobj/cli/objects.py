"""Commands that list and read objects: `torchobj ls`, `du`, `head`, `cat` and `scan`."""

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import BinaryIO

import click

from torchobj.cli.options import Command, CommandError, Settings, settings
from torchobj.cli.output import (
    command,
    counted,
    fields_of,
    human_size,
    print_json,
    print_line,
    rows,
    shown,
    time_shown,
)
from torchobj.cli.targets import URL, Target, parse_target, raw_option
from torchobj.config import StoreConfig, resolve
from torchobj.store import ObjectInfo, Store, list_buckets, reads
from torchobj.store.file_objects import open as open_object
from torchobj.urls import canonical_url

_ROW = "{:>20}  {:>10}  {}"

_BLOCK_BYTES = 1 << 20

#: Maximum number of objects that are read ahead, and of their bytes. Larger objects than the third are streamed: their
#: parts are requested concurrently.
_AHEAD_OBJECTS = 16
_AHEAD_BYTES = 64 << 20
_AHEAD_OBJECT_BYTES = 8 << 20


@click.command(cls=Command, short_help="List objects and folders.")
@click.argument("urls", nargs=-1, required=True, type=URL)
@click.option("-r", "--recursive", is_flag=True, help="List all objects below, with their whole keys.")
@click.option("--bytes", "exact", is_flag=True, help="Print sizes in bytes.")
@raw_option
@click.option("--project", metavar="NAME", help="Project whose buckets gs:// lists.  [GOOGLE_CLOUD_PROJECT]")
def ls(urls: tuple[str, ...], *, recursive: bool, exact: bool, raw: bool, project: str | None) -> None:
    """Lists the objects and folders at URLS: time of the last write, size, and name.

    A prefix is compared as a string, as the store does: s3://bucket/train also lists training/. With a slash at the end
    it names a folder. With wildcards, objects that match are listed with their whole keys. s3:// and gs:// alone list
    buckets.
    """
    chosen = settings()
    config = chosen.config(*urls)
    targets = [None if _names_account(url) else parse_target(url, raw=raw) for url in urls]
    _check_accounts([url for url in urls if _names_account(url)], recursive=recursive, project=project)
    for url, target in zip(urls, targets, strict=True):
        if target is None:
            _list_buckets(chosen, canonical_url(url), config, project)
            continue
        store, prefix = target.open(config)
        found: Iterator[tuple[str, ObjectInfo | None]]
        if recursive or target.glob is not None:
            found = ((info.key, info) for info in target.objects(store, prefix))
        else:
            found = _level(store, prefix)
        count = 0
        for count, item in enumerate(found, 1):  # noqa: B007  used after the loop
            if chosen.json:
                print_json(_fields(target, store, item))
            else:
                print_line(_row(item, exact=exact))
        if count == 0 and not target.is_root:
            raise target.nothing()


def _names_account(url: str) -> bool:
    return canonical_url(url) in ("s3://", "gs://")


def _check_accounts(urls: list[str], *, recursive: bool, project: str | None) -> None:
    if recursive and urls:
        raise CommandError(f"{urls[0]}: lists buckets; --recursive lists the objects of a bucket that is named")
    if project is not None and "gs://" not in map(canonical_url, urls):
        raise CommandError("--project: applies to gs:// without a bucket")


def _list_buckets(chosen: Settings, url: str, config: StoreConfig, project: str | None) -> None:
    if url == "gs://":
        project = project or os.environ.get("GOOGLE_CLOUD_PROJECT")
        endpoint = resolve(url, config).gcs.endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST")
        if not (project or endpoint):
            raise CommandError("gs://: buckets are listed by project; --project or GOOGLE_CLOUD_PROJECT names it")
    for name, created in list_buckets("gs" if url == "gs://" else "s3", config=config, project=project):
        fields = {"url": f"{url}{name}/", "bucket": name}
        fields |= {} if created is None else {"created": created.isoformat()}
        chosen.show(fields, _ROW.format(time_shown(created), "BUCKET", shown(name)))


def _level(store: Store, prefix: str) -> Iterator[tuple[str, ObjectInfo | None]]:
    """Objects and common prefixes of a level, in key order within each page."""
    above = prefix.rpartition("/")[0]
    start = len(above) + 1 if above or prefix.startswith("/") else 0
    for page in store.list(prefix, "/").pages():
        items: list[tuple[str, ObjectInfo | None]] = [(info.key, info) for info in page.objects]
        items += [(name, None) for name in page.prefixes]
        for key, info in sorted(items, key=lambda item: item[0]):
            yield key[start:] or key.rpartition("/")[0].rpartition("/")[2] + "/", info


def _row(item: tuple[str, ObjectInfo | None], *, exact: bool) -> str:
    name, info = item
    if info is None:
        return _ROW.format("", "DIR", shown(name))
    return _ROW.format(time_shown(info.last_modified), human_size(info.size, exact=exact), shown(name))


def _fields(target: Target, store: Store, item: tuple[str, ObjectInfo | None]) -> dict[str, object]:
    name, info = item
    if info is not None:
        return fields_of(info, target.url_of(store, info.key))
    above = target.url.key.rpartition("/")[0] if not target.is_local else ""
    key = f"{above}/{name}" if above else name
    return {"url": target.url_of(store, key), "prefix": key}


@click.command(cls=Command, short_help="Add up the sizes of objects.")
@click.argument("urls", nargs=-1, required=True, type=URL)
@click.option("--bytes", "exact", is_flag=True, help="Print sizes in bytes.")
@raw_option
def du(urls: tuple[str, ...], *, exact: bool, raw: bool) -> None:
    """Adds up the sizes of the objects under URLS, whose keys are compared as by `ls`.

    Only current objects count: noncurrent versions and unfinished uploads, which are billed too, are not included.
    """
    chosen = settings()
    config = chosen.config(*urls)
    for target in [parse_target(url, raw=raw) for url in urls]:
        store, prefix = target.open(config)
        count, total = 0, 0
        for info in target.objects(store, prefix, ordered=False):
            count, total = count + 1, total + (info.size or 0)
        if count == 0 and not target.is_root:
            raise target.nothing()
        fields = {"url": target.text, "objects": count, "bytes": total}
        chosen.show(fields, f"{human_size(total, exact=exact):>10}  {counted(count, 'object')}  {shown(target.text)}")


@click.command(cls=Command, short_help="Show size, version, headers and metadata of an object.")
@click.argument("url", type=URL)
def head(url: str) -> None:
    """Shows size, version, headers and metadata of the object at URL. Wildcards are taken as they are."""
    chosen = settings()
    target = parse_target(url, raw=True)
    if target.names_folder:
        raise CommandError(f"{url}: names no object; {command('ls', url)} lists those below it")
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
@raw_option
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


def _write_objects(store: Store, objects: Iterable[ObjectInfo], out: BinaryIO, config: StoreConfig) -> int:
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
@raw_option
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
