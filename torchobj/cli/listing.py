"""`torchobj ls` and `torchobj du`."""

import os
from collections.abc import Iterator

import click

from torchobj.cli.errors import CommandError
from torchobj.cli.options import Command, Settings, settings
from torchobj.cli.output import counted, exact_size, fields_of, human_size, print_json, print_line, shown, time_shown
from torchobj.cli.targets import Target, parse_target
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig, resolved
from torchobj.store import Store, list_buckets
from torchobj.store.object_info import ObjectInfo
from torchobj.urls import canonical_url

__all__ = ["du", "ls"]

_ROW = "{:>20}  {:>10}  {}"


@click.command(cls=Command, short_help="List objects and folders.")
@click.argument("urls", nargs=-1, required=True, type=URL)
@click.option("-r", "--recursive", is_flag=True, help="List all objects below, with their whole keys.")
@click.option("--bytes", "exact", is_flag=True, help="Print sizes in bytes.")
@click.option("--raw", is_flag=True, help="Take wildcards in URLs as they are.")
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
        found = _all(target, store, prefix) if recursive or target.glob is not None else _level(store, prefix)
        count = 0
        for count, item in enumerate(found, 1):  # noqa: B007  used after the loop
            if chosen.json:
                print_json(_fields(target, store, item))
            else:
                print_line(_row(item, exact=exact))
        if count == 0 and not (target.url.key == "" and target.glob is None):
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
        endpoint = resolved(url, config).gcs.endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST")
        if not (project or endpoint):
            raise CommandError("gs://: buckets are listed by project; --project or GOOGLE_CLOUD_PROJECT names it")
    for name, created in list_buckets("gs" if url == "gs://" else "s3", config=config, project=project):
        if chosen.json:
            fields = {"url": f"{url}{name}/", "bucket": name}
            print_json(fields if created is None else fields | {"created": created.isoformat()})
        else:
            print_line(_ROW.format(time_shown(created), "BUCKET", shown(name)))


def _all(target: Target, store: Store, prefix: str) -> Iterator[tuple[str, ObjectInfo | None]]:
    return ((info.key, info) for info in target.objects(store, prefix))


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
    size = exact_size(info.size) if exact else human_size(info.size)
    return _ROW.format(time_shown(info.last_modified), size, shown(name))


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
@click.option("--raw", is_flag=True, help="Take wildcards in URLs as they are.")
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
        if count == 0 and not (target.url.key == "" and target.glob is None):
            raise target.nothing()
        if chosen.json:
            print_json({"url": target.text, "objects": count, "bytes": total})
        else:
            size = exact_size(total) if exact else human_size(total)
            print_line(f"{size:>10}  {counted(count, 'object')}  {shown(target.text)}")
