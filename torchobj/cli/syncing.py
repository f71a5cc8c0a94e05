"""`torchobj sync`: makes a folder equal to another one, by transferring what is new or changed."""

import time

import click

from torchobj.checkpoint.checkpoint_dir import remove_empty_folders, without_links
from torchobj.cli.comparison import copies_of, sources_of
from torchobj.cli.errors import CommandError
from torchobj.cli.options import PatternCommand, Settings, settings
from torchobj.cli.output import counted, escaped
from torchobj.cli.progress import reporting
from torchobj.cli.removing import delete_keys
from torchobj.cli.targets import Target, check_bucket
from torchobj.cli.transfer_plan import STREAM, PlannedTransfer, is_temporary, plan
from torchobj.cli.transfer_run import Options, run_all
from torchobj.cli.transfers import check_attributes, print_action, print_outcome, print_plan
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig
from torchobj.files.patterns import Pattern, selects
from torchobj.store import Store

__all__ = ["sync"]


@click.command(cls=PatternCommand, short_help="Transfer what is new or changed; --delete removes the rest.")
@click.argument("source", type=URL)
@click.argument("destination", type=URL)
@click.option("--delete", is_flag=True, help="Delete what is below DESTINATION and not below SOURCE, at the end.")
@click.option("--force", is_flag=True, help="Allow a SOURCE without files; with --delete this deletes everything.")
@click.option("--whole-bucket", is_flag=True, help="Allow --delete if SOURCE or DESTINATION is a whole bucket.")
@click.option("--content-type", metavar="TYPE", help="Content type of uploads; otherwise guessed from their names.")
@click.option("--dry-run", is_flag=True, help="Print what would be transferred and deleted.")
def sync(
    source: str,
    destination: str,
    *,
    delete: bool,
    force: bool,
    whole_bucket: bool,
    content_type: str | None,
    dry_run: bool,
    patterns: tuple[Pattern, ...],
) -> None:
    """Makes the folder DESTINATION contain what the folder SOURCE contains. One of them, or both, are in buckets.

    A file is not transferred if its copy has the same size and checksum, or, where a store has no checksum, the time
    that the transfer kept. From bucket to bucket, the copy must have the same size, and the same ETag of S3, checksum
    or `mtime` in its metadata; objects with nothing to compare are copied, and --dry-run counts them. With --delete,
    only keys or files below DESTINATION are deleted, after all transfers have succeeded: none if one failed. Links in a
    local destination are not followed. A SOURCE without files is an error, because it is more often a typing error,
    unless --force is given.

    Patterns are compared with paths below SOURCE and DESTINATION, and * also matches slashes. What they exclude is
    neither transferred nor deleted.
    """
    chosen = settings()
    if STREAM in (source, destination):
        raise CommandError("-: a stream is not a folder; use cp")
    config = chosen.config(source, destination)
    transfers = plan([source], destination, recursive=True, raw=True, patterns=patterns)
    if not (transfers and transfers[0].is_tree):
        raise CommandError(f"{source}: is a file, and must be a folder; use cp")
    [transfer] = transfers
    attributes = {} if content_type is None else {"content_type": content_type}
    check_attributes(transfers, attributes)
    if delete:
        action = "deletes what is not in the source"
        check_bucket((transfer.destination, transfer.source), action, whole_bucket=whole_bucket or dry_run)
    names = {item.name for item in sources_of(transfer, config)} if delete else set()
    if delete and not names and not force:
        raise CommandError(f"{source}: has no files; --force deletes everything below {destination}")
    options = Options(config, skip_unchanged=True, attributes=attributes)
    if dry_run:
        extra = _extra(transfer, names, config) if delete else []
        print_plan(chosen, [transfer], options, "would copy", nothing=_nothing(extra))
        _note_count(chosen, "would delete", extra, transfer.destination)
        for name in extra:
            print_action(chosen, "would delete", transfer.destination.child(name).shown)
        return
    started = time.monotonic()
    with reporting("sync", quiet=chosen.json) as report:
        outcome = run_all([transfer], options, report)
    if not (outcome.files or outcome.skipped or outcome.failures or force):
        raise CommandError(f"{source}: has no files; `torchobj ls` shows what exists")
    elapsed_s, extra = time.monotonic() - started, []
    if delete and not outcome.failures:
        # Listed again: what others wrote below the source meanwhile is kept.
        names |= {item.name for item in sources_of(transfer, config)}
        extra = _extra(transfer, names, config)
    # Ends the command after a failure.
    print_outcome(chosen, outcome, "copied", elapsed_s, nothing=_nothing(extra))
    _note_count(chosen, "deleting", extra, transfer.destination)
    if delete:
        _delete(chosen, transfer.destination, extra, config)


def _nothing(extra: list[str]) -> str:
    return "nothing to transfer" if extra else "nothing to do"


def _note_count(chosen: Settings, action: str, extra: list[str], folder: Target) -> None:
    if extra:
        chosen.note(f"{action} {counted(len(extra), 'file')} below {escaped(folder.shown)}")


def _extra(transfer: PlannedTransfer, names: set[str], config: StoreConfig) -> list[str]:
    """Names below the destination that are not below the source, and not excluded.

    Temporary files are not deleted, because a listing of local files omits them.
    """
    copies = (name for name in copies_of(transfer, config) if selects(transfer.patterns, name))
    return [name for name in copies if name not in names and not is_temporary(name)]


def _delete(chosen: Settings, folder: Target, extra: list[str], config: StoreConfig) -> None:
    if not folder.is_local:
        store, prefix = Store(folder.url.base, config=config), folder.url.key
        for key in delete_keys(store, (f"{prefix}{name}" for name in extra)):
            print_action(chosen, "delete", f"{store.url}/{key}")
        return
    names = without_links(folder.path, extra)
    for name in names:
        (folder.path / name).unlink(missing_ok=True)
        print_action(chosen, "delete", str(folder.path / name))
    remove_empty_folders(folder.path, names)
