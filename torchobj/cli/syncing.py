"""`torchobj sync`: makes a folder equal to another one, by transferring what is new or changed."""

import time
from pathlib import Path

import click

from torchobj.checkpoint.keys import remove_empty_folders, without_links
from torchobj.cli.errors import CommandError
from torchobj.cli.options import Command, Settings, settings
from torchobj.cli.output import print_json, print_line
from torchobj.cli.progress import reporting
from torchobj.cli.removing import delete_keys
from torchobj.cli.targets import Target
from torchobj.cli.transfer_plan import STREAM, Item, Transfer, is_temporary, items, plan
from torchobj.cli.transfer_run import Options, is_unchanged, run_all
from torchobj.cli.transfers import print_action, print_outcome
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig
from torchobj.object_info import ObjectInfo
from torchobj.store import Store

__all__ = ["sync"]

#: Metadata of this many objects is held at a time.
_HEADS = 10_000


@click.command(cls=Command, short_help="Transfer what is new or changed; --delete removes the rest.")
@click.argument("source", type=URL)
@click.argument("destination", type=URL)
@click.option("--delete", is_flag=True, help="Delete what is below DESTINATION and not below SOURCE, at the end.")
@click.option("--force", is_flag=True, help="Allow a SOURCE without files; with --delete this deletes everything.")
@click.option("--dry-run", is_flag=True, help="Print what would be transferred and deleted.")
def sync(source: str, destination: str, *, delete: bool, force: bool, dry_run: bool) -> None:
    """Makes the folder DESTINATION contain what the folder SOURCE contains. One of them, or both, are in buckets.

    Files of equal size and checksum are not transferred; from bucket to bucket, objects of equal size and ETag, or with
    a copy that is newer. With --delete, only keys or files below DESTINATION are deleted, after all transfers have
    succeeded: none if one failed. Links in a local destination are not followed. A SOURCE without files is an error,
    because it is more often a typing error, unless --force is given.
    """
    chosen = settings()
    if STREAM in (source, destination):
        raise CommandError("-: a stream is not a folder; use cp")
    config = chosen.config(source, destination)
    [transfer] = plan([source], destination, recursive=True, raw=True)
    if not transfer.is_tree:
        raise CommandError(f"{source}: is a file, and must be a folder; use cp")
    here = {item.name: item for item in items(transfer.source, config)} if delete or dry_run else {}
    if delete and not here and not force:
        raise CommandError(f"{source}: has no files; --force deletes everything below {destination}")
    if dry_run:
        _print_plan(chosen, transfer, here, config, delete=delete)
        return
    started = time.monotonic()
    with reporting("sync", quiet=chosen.json) as report:
        outcome = run_all([transfer], Options(config, skip_unchanged=True), report)
    if not (outcome.files or outcome.skipped or outcome.failures or force):
        raise CommandError(f"{source}: has no files; `torchobj ls` shows what exists")
    print_outcome(chosen, outcome, "copied", time.monotonic() - started)
    if delete:
        # Listed again: what others wrote below the source meanwhile is kept.
        here |= {item.name: item for item in items(transfer.source, config)}
        extra = [item for item in items(transfer.destination, config) if _is_extra(item.name, here)]
        _delete(chosen, transfer.destination, extra, config)


def _print_plan(
    chosen: Settings, transfer: Transfer, here: dict[str, Item], config: StoreConfig, *, delete: bool
) -> None:
    there = {item.name: item for item in items(transfer.destination, config)}
    between = not (transfer.source.is_local or transfer.destination.is_local)

    def show(action: str, name: str) -> None:
        print_action(chosen, action, transfer.source.child(name).shown, transfer.destination.child(name).shown)

    equal = []
    for name, item in here.items():
        old = there.get(name)
        same_size = old is not None and old.size == item.size
        if same_size and not between:
            equal.append(name)
        elif not (same_size and is_unchanged(item, old)):
            show("would copy", name)
    different, unknown = _compared(transfer, equal, config)
    for name in different:
        show("would compare", name)
    if unknown and chosen.json:
        print_json({"action": "would compare", "files": unknown})
    elif unknown:
        print_line(f"would compare {unknown} {'file' if unknown == 1 else 'files'} of equal size by checksums")
    for name in there if delete else ():
        if _is_extra(name, here):
            print_action(chosen, "would delete", transfer.destination.child(name).shown)


def _compared(transfer: Transfer, names: list[str], config: StoreConfig) -> tuple[list[str], int]:
    """Names of files of equal size whose time differs from that in the metadata, and the number without such metadata.

    The transfer compares checksums, if the store has them; those of equal time are taken as equal here.
    """
    to_bucket = transfer.source.is_local
    local, bucket = (transfer.source, transfer.destination) if to_bucket else (transfer.destination, transfer.source)
    different, unknown = [], 0
    store = Store(bucket.url.base, config=config)
    for start in range(0, len(names), _HEADS):
        part = names[start : start + _HEADS]
        heads = store.head_many([f"{bucket.url.key}{name}" for name in part], return_errors=True)
        for name, head in zip(part, heads, strict=True):
            equal = None if isinstance(head, Exception) else _has_time_of(local.path / name, head, to_bucket=to_bucket)
            unknown += equal is None
            if equal is False:
                different.append(name)
    return different, unknown


def _has_time_of(path: Path, head: ObjectInfo, *, to_bucket: bool) -> bool | None:
    """Whether a file has the time that an upload has written, or a download has set; None if that is not known."""
    time_ns = path.stat().st_mtime_ns
    written = dict(head.metadata).get("mtime")
    if written is not None:
        return written == f"{time_ns // 10**9}.{time_ns % 10**9:09}".rstrip("0").rstrip(".")
    if not to_bucket and head.last_modified is not None:
        return round(head.last_modified.timestamp() * 1000) * 10**6 == time_ns or None
    return None


def _is_extra(name: str, here: dict[str, Item]) -> bool:
    """Whether a name is deleted: temporary files are not, because a listing of local files omits them."""
    return name not in here and not is_temporary(name)


def _delete(chosen: Settings, folder: Target, extra: list[Item], config: StoreConfig) -> None:
    if not folder.is_local:
        store, prefix = Store(folder.url.base, config=config), folder.url.key
        for key in delete_keys(store, (f"{prefix}{item.name}" for item in extra)):
            print_action(chosen, "delete", f"{store.url}/{key}")
        return
    names = without_links(folder.path, [item.name for item in extra])
    for name in names:
        (folder.path / name).unlink(missing_ok=True)
        print_action(chosen, "delete", str(folder.path / name))
    remove_empty_folders(folder.path, names)
