"""Commands that delete: `torchobj rm`, objects after a question; `torchobj uploads`, unfinished uploads in parts.

The parts of such uploads are stored and billed, but not listed as objects.
"""

import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple

import click

from torchobj.cli.options import Command, CommandError, Settings, age_option, settings, shared_options, yes_option
from torchobj.cli.output import escaped, human_size, shown, time_shown
from torchobj.cli.targets import URL, Target, check_bucket, check_wildcards, parse_target, raw_option
from torchobj.config import StoreConfig
from torchobj.exceptions import ObjectNotFoundError
from torchobj.store import ObjectInfo, Store, UnfinishedUpload

#: S3 deletes at most 1000 keys per request (API reference, DeleteObjects).
_BATCH = 1000


@click.command(cls=Command, short_help="Delete objects.")
@click.argument("urls", nargs=-1, required=True, type=URL)
@click.option("-r", "--recursive", is_flag=True, help="Delete all objects of a folder: keys below URL and a slash.")
@yes_option
@click.option("--whole-bucket", is_flag=True, help="Allow to delete all objects of a bucket.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted.")
@raw_option
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
        action = "would delete" if dry_run else "delete"
        for key in keys if dry_run else delete_keys(each.store, keys):
            url = each.target.url_of(each.store, key)
            chosen.show({"action": action, "url": url}, f"{action} {shown(url)}")


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
    found: Iterable[ObjectInfo]
    if target.glob is not None or target.names_folder:
        found = target.objects(store, key)
    else:
        try:
            found = [store.head(key)]
        except ObjectNotFoundError as error:
            raise CommandError(f"{target.text}: no such object; --recursive deletes a folder") from error
    objects = [(info.key, info.size or 0) for info in found]
    if not objects:
        raise target.nothing()
    return _Found(target, store, objects)


def _summary(found: list[_Found]) -> str:
    sizes = [size for each in found for _, size in each.objects]
    if len(sizes) == 1:
        return found[0].target.url_of(found[0].store, found[0].objects[0][0])
    return f"{len(sizes)} objects, {human_size(sum(sizes))}, of {' '.join(each.target.text for each in found)}"


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
    while batch := list(islice(keys, _BATCH)):
        store.delete(batch)
        yield from batch


@click.group(params=shared_options(), short_help="Unfinished uploads: list, sweep.")
def uploads() -> None:
    """Lists and aborts uploads in parts of writers that were killed. Their parts are stored and billed.

    Resumable uploads to Google Cloud Storage are not listed; the store deletes them after a week.
    """


@uploads.command("list", cls=Command)
@click.argument("url", type=URL)
def list_uploads(url: str) -> None:
    """Lists unfinished uploads of keys that start with that of URL: start, upload id, and URL of the object."""
    store, found = _found(url)
    for upload in found:
        _report(settings(), store, upload, "unfinished")


@uploads.command(cls=Command)
@click.argument("url", type=URL)
@click.option(
    "--older-than",
    metavar="AGE",
    required=True,
    callback=age_option,
    help="Abort only uploads that began before, such as 12h or 7d: a recent one may belong to a running writer.",
)
@yes_option
@click.option("--dry-run", is_flag=True, help="Print what would be aborted.")
def sweep(url: str, *, older_than: float, yes: bool, dry_run: bool) -> None:
    """Aborts unfinished uploads of keys that start with that of URL, and deletes their parts.

    An upload whose start is unknown is kept.
    """
    chosen = settings()
    store, found = _found(url)
    limit = datetime.now(UTC) - timedelta(seconds=older_than)
    old = [upload for upload in found if upload.begun is not None and upload.begun <= limit]
    if dry_run:
        for upload in old:
            _report(chosen, store, upload, "would abort")
        return
    if old and not yes:
        confirm(f"abort {len(old)} of {len(found)} uploads below {url}?", "--yes aborts without a question")
    for upload in old:
        store.abort_upload(upload)
        _report(chosen, store, upload, "abort")
    chosen.note(f"{len(old)} of {len(found)} unfinished uploads aborted")


def _found(url: str) -> tuple[Store, list[UnfinishedUpload]]:
    store, prefix = parse_target(url, raw=True).open(settings().config(url))
    return store, list(store.unfinished_uploads(prefix))


def _report(chosen: Settings, store: Store, upload: UnfinishedUpload, action: str) -> None:
    url, begun = f"{store.url}/{upload.key}", None if upload.begun is None else upload.begun.isoformat()
    shown_action = "" if action == "unfinished" else f"{action}  "
    chosen.show(
        {"action": action, "url": url, "upload_id": upload.upload_id, "begun": begun},
        f"{shown_action}{time_shown(upload.begun)}  {shown(upload.upload_id)}  {shown(url)}",
    )
