"""`torchobj rm`: deletes objects after a question."""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import click

from torchobj.cli.errors import CommandError
from torchobj.cli.options import Command, Settings, settings
from torchobj.cli.output import escaped, human_size, print_json, print_line, shown
from torchobj.cli.targets import Target, check_bucket, check_wildcards, parse_target
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig
from torchobj.exceptions import ObjectNotFoundError
from torchobj.store import Store
from torchobj.store.object_info import ObjectInfo

__all__ = ["confirm", "delete_keys", "rm"]

#: S3 deletes at most 1000 keys per request (API reference, DeleteObjects).
_BATCH = 1000


@click.command(cls=Command, short_help="Delete objects.")
@click.argument("urls", nargs=-1, required=True, type=URL)
@click.option("-r", "--recursive", is_flag=True, help="Delete all objects of a folder: keys below URL and a slash.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask. Required without a terminal.")
@click.option("--whole-bucket", is_flag=True, help="Allow to delete all objects of a bucket.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted.")
@click.option("--raw", is_flag=True, help="Take wildcards in URLs as they are.")
def rm(urls: tuple[str, ...], *, recursive: bool, yes: bool, whole_bucket: bool, dry_run: bool, raw: bool) -> None:
    """Deletes the objects at URLS, after a question with their number. Local files are not deleted.

    With --recursive, s3://bucket/train deletes train/a, but not training/a and not an object train.
    """
    chosen = settings()
    config = chosen.config(*urls)
    targets = [parse_target(url, raw=raw) for url in urls]
    for target in targets:
        _check(target, recursive=recursive)
        if target.glob is not None:
            check_wildcards(target.text, target.child(target.glob), config)
    check_bucket(targets, "deletes all of its objects", whole_bucket=whole_bucket or dry_run)
    found = [_objects(target.folder() if recursive and target.glob is None else target, config) for target in targets]
    if not yes and not dry_run:
        confirm(f"delete {_summary(found)}?", "--yes deletes without a question")
    elif not dry_run:
        chosen.note(f"deleting {escaped(_summary(found))}")
    for each in found:
        keys = (key for key, _ in each.objects)
        for key in keys if dry_run else delete_keys(each.store, keys):
            _report(chosen, each, key, "would delete" if dry_run else "delete")


def _check(target: Target, *, recursive: bool) -> None:
    if target.is_local:
        raise CommandError(f"{target.text}: a local file; torchobj deletes objects of buckets only")
    if target.glob is None and not recursive and target.names_folder:
        raise CommandError(f"{target.text}: names a folder; --recursive deletes all objects in it")


class _Found(NamedTuple):
    """The objects that an argument names."""

    target: Target
    store: Store
    objects: list[tuple[str, int]]
    """Keys and sizes in bytes."""


def _objects(target: Target, config: StoreConfig) -> _Found:
    store, key = target.open(config)
    objects = [(info.key, info.size or 0) for info in _named(target, store, key)]
    if not objects:
        raise target.nothing()
    return _Found(target, store, objects)


def _summary(found: list[_Found]) -> str:
    sizes = [size for each in found for _, size in each.objects]
    if len(sizes) == 1:
        return found[0].target.url_of(found[0].store, found[0].objects[0][0])
    return f"{len(sizes)} objects, {human_size(sum(sizes))}, of {' '.join(each.target.text for each in found)}"


def _named(target: Target, store: Store, key: str) -> Iterator[ObjectInfo]:
    if target.glob is not None or target.names_folder:
        yield from target.objects(store, key)
        return
    try:
        yield store.head(key)
    except ObjectNotFoundError as error:
        raise CommandError(f"{target.text}: no such object; --recursive deletes a folder") from error


def confirm(question: str, without: str) -> None:
    """Asks on the terminal.

    Args:
        question: The question.
        without: How to call the command without a terminal.

    Raises:
        CommandError: There is no terminal.
        click.Abort: The answer is not yes.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CommandError(f"cannot ask without a terminal: {escaped(question)} {without}")
    if not click.confirm(escaped(question), err=True):
        raise CommandError("nothing was deleted")


def delete_keys(store: Store, keys: Iterator[str]) -> Iterator[str]:
    """Deletes objects in batches, and yields each key after its deletion."""
    batch: list[str] = []
    for key in keys:
        batch.append(key)
        if len(batch) == _BATCH:
            store.delete(batch)
            yield from batch
            batch = []
    if batch:
        store.delete(batch)
        yield from batch


def _report(chosen: Settings, found: _Found, key: str, action: str) -> None:
    url = found.target.url_of(found.store, key)
    if chosen.json:
        print_json({"action": action, "url": url})
    else:
        print_line(f"{action} {shown(url)}")
