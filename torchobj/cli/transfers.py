"""`torchobj cp`, also by the names `upload` and `download`, `torchobj mv` and `torchobj sync`."""

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from torchobj.cli.objects import write_target
from torchobj.cli.options import Command, CommandError, PatternCommand, Settings, settings
from torchobj.cli.output import counted, escaped, human_size, rate_shown, shown
from torchobj.cli.progress import Report, of_stream, reporting
from torchobj.cli.removing import delete_keys
from torchobj.cli.targets import URL, Target, check_bucket, check_wildcards, parse_target, raw_option
from torchobj.cli.transfer_plan import (
    STREAM,
    PlannedTransfer,
    check_destinations,
    compared,
    is_standard_output,
    is_temporary,
    plan,
)
from torchobj.cli.transfer_run import Options, Outcome, guessed_type, move_all, run_all, sources_to_move
from torchobj.config import StoreConfig
from torchobj.files import upload_stream
from torchobj.files.links import remove_empty_folders, without_links
from torchobj.files.patterns import Pattern, selects
from torchobj.store import Store

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _arguments(function: _Function) -> _Function:
    """The arguments and options of `cp` and `mv`."""
    for add in (
        raw_option,
        click.option("--dry-run", is_flag=True, help="Print what would be transferred."),
        click.option("--storage-class", metavar="NAME", help="Storage class of uploads."),
        click.option("--metadata", metavar="NAME=VALUE", multiple=True, help="Metadata of uploads; repeatable."),
        click.option("--content-type", metavar="TYPE", help="Content type of uploads; otherwise guessed from names."),
        click.option("-r", "--recursive", is_flag=True, help="Transfer all that is in a folder, into DESTINATION."),
        click.argument("destination", type=URL),
        click.argument("sources", nargs=-1, required=True, type=URL),
    ):
        function = add(function)
    return function


@click.command(cls=PatternCommand, short_help="Copy files and objects; upload and download are other names.")
@_arguments
@click.option("--skip-unchanged", is_flag=True, help="Skip files whose copy is unchanged, as `sync` does.")
def cp(
    sources: tuple[str, ...],
    destination: str,
    *,
    recursive: bool,
    dry_run: bool,
    raw: bool,
    skip_unchanged: bool,
    patterns: tuple[Pattern, ...],
    **attributes: Any,
) -> None:
    """Copies SOURCES to DESTINATION: from local files to a bucket, back, or from bucket to bucket.

    A folder, whose name ends in a slash or exists locally, receives sources by their last names, and those of a tree or
    glob by their paths in it. A - is the standard input or output, and a FIFO is read to its end. Objects and files
    appear whole or not at all; an interrupted download continues where it ended. A device, a FIFO and /dev/fd/N are
    written as the object arrives.

    Patterns are compared with paths below a folder or the folder above the wildcards of a glob, and * also matches
    slashes. A single source is compared by its last name.
    """
    chosen = settings()
    if is_standard_output(destination):
        destination = STREAM
    config = chosen.config(*(text for text in (*sources, destination) if text != STREAM))
    given = _given(attributes)
    if STREAM in (*sources, destination):
        if patterns:
            if destination == STREAM:
                reason = "do not apply to the standard output, which receives all objects of a glob; narrow the glob"
            else:
                reason = "select files, and a stream has no name"
            raise CommandError(f"--exclude and --include: {reason}")
        _stream(chosen, sources, destination, config, given, raw=raw)
        return
    transfers = plan(sources, destination, recursive=recursive, raw=raw, patterns=patterns)
    if not transfers:
        raise CommandError(f"{' '.join(sources)}: --exclude and --include select none of them")
    _check_attributes(transfers, given)
    check_destinations(transfers, config)
    options = Options(config, skip_unchanged=skip_unchanged, attributes=given)
    if not dry_run:
        _transfer(chosen, transfers, "cp", "copied", lambda report: run_all(transfers, options, report))
    elif not _print_plan(chosen, transfers, options, "would copy"):
        raise _no_files(transfers)


@click.command(cls=Command, short_help="Move files and objects: copy, verify, delete.")
@_arguments
@click.option("--whole-bucket", is_flag=True, help="Allow to move a whole bucket, or a folder onto one.")
def mv(
    sources: tuple[str, ...],
    destination: str,
    *,
    recursive: bool,
    dry_run: bool,
    raw: bool,
    whole_bucket: bool,
    **attributes: Any,
) -> None:
    """Moves SOURCES to DESTINATION, as `cp` copies them. Each source is deleted after its copy was verified.

    A source whose transfer fails, or which changes meanwhile, is kept. Local folders are kept, too.
    """
    chosen = settings()
    config = chosen.config(*sources, destination)
    if STREAM in (*sources, destination):
        raise CommandError("-: a stream cannot be moved; use cp")
    given = _given(attributes)
    transfers = plan(sources, destination, recursive=recursive, raw=raw)
    for transfer in transfers:
        if transfer.is_fifo:
            raise CommandError(f"{transfer.source.text}: a FIFO cannot be moved; use cp")
        if transfer.is_into_special:
            raise CommandError(
                f"{transfer.destination.text}: a device, FIFO or descriptor, whose bytes cannot be verified; use cp"
            )
    _check_attributes(transfers, given)
    for transfer in transfers:
        if transfer.glob is not None and not transfer.source.is_local:
            check_wildcards(transfer.source.text, transfer.source.child(transfer.glob), config)
    check_destinations(transfers, config)
    trees = [transfer for transfer in transfers if transfer.is_tree]
    from_all = [dataclasses.replace(tree.source, glob=tree.glob) for tree in trees]
    into_root = [dataclasses.replace(tree.destination, glob=tree.glob) for tree in trees]
    check_bucket(from_all, "moves all of its objects", whole_bucket=whole_bucket or dry_run)
    check_bucket(into_root, "moves files into its root", whole_bucket=whole_bucket or dry_run)
    options = Options(config, attributes=given)
    if dry_run:
        if not _print_plan(chosen, transfers, options, "would move"):
            raise _no_files(transfers)
        return
    moved = {transfer: sources_to_move(transfer, config) for transfer in transfers}
    if any(end.names_bucket for end in (*from_all, *into_root)):
        sizes = [item.size or 0 for items in moved.values() for item in items]
        size = human_size(sum(sizes))
        chosen.note(f"moving {counted(len(sizes), 'file')}, {size}; each is deleted when its copy was verified")
    _transfer(chosen, transfers, "mv", "moved", lambda report: move_all(moved, options, report))


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
    _check_attributes(transfers, attributes)
    if delete:
        action = "deletes what is not in the source"
        check_bucket((transfer.destination, transfer.source), action, whole_bucket=whole_bucket or dry_run)
    names = {item.name for item in transfer.sources(config)} if delete else set()
    if delete and not names and not force:
        raise CommandError(f"{source}: has no files; --force deletes everything below {destination}")
    options = Options(config, skip_unchanged=True, attributes=attributes)
    if dry_run:
        extra = _extra(transfer, names, config) if delete else []
        _print_plan(chosen, transfers, options, "would copy", nothing=_nothing(extra))
        _note_count(chosen, "would delete", extra, transfer.destination)
        for name in extra:
            _print_action(chosen, "would delete", transfer.destination.child(name).shown)
        return
    started = time.monotonic()
    with reporting("sync", quiet=chosen.json) as report:
        outcome = run_all(transfers, options, report)
    if not (outcome.files or outcome.skipped or outcome.failures or force):
        raise CommandError(f"{source}: has no files; `torchobj ls` shows what exists")
    elapsed_s, extra = time.monotonic() - started, []
    if delete and not outcome.failures:
        # Listed again: what others wrote below the source meanwhile is kept.
        names |= {item.name for item in transfer.sources(config)}
        extra = _extra(transfer, names, config)
    # Ends the command after a failure.
    _print_outcome(chosen, outcome, "copied", elapsed_s, nothing=_nothing(extra))
    _note_count(chosen, "deleting", extra, transfer.destination)
    if delete:
        _delete(chosen, transfer.destination, extra, config)


def _transfer(
    chosen: Settings,
    transfers: list[PlannedTransfer],
    name: str,
    action: str,
    run: Callable[[Report], Outcome],
) -> None:
    """Runs the transfers of a command, and prints their progress and outcome.

    Raises:
        CommandError: There was nothing to transfer.
    """
    started = time.monotonic()
    with reporting(name, quiet=chosen.json) as report:
        outcome = run(report)
    if not (outcome.files or outcome.skipped or outcome.failures):
        raise _no_files(transfers)
    _print_outcome(chosen, outcome, action, time.monotonic() - started)


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of uploads for headers and metadata that were given."""
    pairs = [text.partition("=") for text in attributes.pop("metadata")]
    for name, separator, _ in pairs:
        if not name or not separator:
            raise CommandError(f"--metadata {name}: must be NAME=VALUE")
    given = {name: value for name, value in attributes.items() if value is not None}
    return given | ({"metadata": {name: value for name, _, value in pairs}} if pairs else {})


def _check_attributes(transfers: list[PlannedTransfer], given: dict[str, Any]) -> None:
    """Checks that arguments of uploads are given for uploads only.

    Raises:
        CommandError: A source is in a bucket.
    """
    for transfer in transfers if given else ():
        if not transfer.source.is_local:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise CommandError(f"{names}: for uploads, not for {transfer.source.text}")


def _stream(
    chosen: Settings,
    sources: tuple[str, ...],
    destination: str,
    config: StoreConfig,
    given: dict[str, Any],
    *,
    raw: bool,
) -> None:
    """Copies from the standard input, or to the standard output."""
    if len(sources) != 1 or sources[0] == destination:
        raise CommandError("-: the standard input or output is the only source, or the destination of one source")
    target = parse_target(destination, raw=True) if sources[0] == STREAM else parse_target(sources[0], raw=raw)
    if target.is_local or (target.names_folder and target.glob is None):
        raise CommandError(f"{target.text}: must name an object of s3:// or gs:// to copy it as a stream")
    if destination == STREAM:
        if given:
            raise CommandError("--content-type, --metadata and --storage-class are for uploads")
        write_target(target, sys.stdout.buffer, config)
        return
    started = time.monotonic()
    if sys.stdin.isatty():
        chosen.note("reading the standard input")
    with reporting("cp", quiet=chosen.json) as report:
        attributes = {"content_type": guessed_type(target.url.key), **given}
        done = upload_stream(sys.stdin.buffer, str(target.url), config=config, progress=of_stream(report), **attributes)
    _print_outcome(chosen, Outcome(1, done.size), "copied", time.monotonic() - started)


def _print_plan(
    chosen: Settings, transfers: list[PlannedTransfer], options: Options, action: str, *, nothing: str = "nothing to do"
) -> int:
    """Prints what would be transferred, and counts what has nothing to compare. Returns the number of sources."""
    found, printed, by_checksum, without = 0, 0, 0, 0
    for transfer in transfers:
        for item, copy, is_unchanged in compared(transfer, options.config, skip_unchanged=options.skip_unchanged):
            found += 1
            compares = copy is not None and copy.size == item.size and not transfer.is_between_buckets
            if is_unchanged is None and compares:
                by_checksum += 1
            elif not is_unchanged:
                printed += 1
                without += is_unchanged is None
                source, destination = transfer.source.child(item.name), transfer.destination.child(item.name)
                _print_action(chosen, "would compare" if compares else action, source.shown, destination.shown)
    for name, count, text in (
        ("would compare", by_checksum, "would compare {} of equal size by checksums"),
        ("nothing to compare", without, "{} of equal size with nothing else to compare"),
    ):
        if count:
            chosen.show({"action": name, "files": count}, text.format(counted(count, "file")))
    if found and not printed + by_checksum:
        chosen.note(f"{nothing}: {counted(found, 'file')} unchanged")
    return found


def _print_action(chosen: Settings, action: str, source: str, destination: str | None = None) -> None:
    """Prints what is done, or would be, with a file or object."""
    names = {"url": source} if destination is None else {"source": source, "destination": destination}
    text = f"{action} {shown(source)}" + ("" if destination is None else f" -> {shown(destination)}")
    chosen.show({"action": action, **names}, text)


def _print_outcome(
    chosen: Settings, outcome: Outcome, action: str, elapsed_s: float, *, nothing: str = "nothing to do"
) -> None:
    """Prints the failures and a summary. Ends the command with exit code 1 if something failed."""
    for failure in outcome.failures:
        chosen.error(str(failure), failure.error)
    fields = {
        "action": action,
        "files": outcome.files,
        "bytes": outcome.bytes,
        "unchanged": outcome.skipped,
        "failed": len(outcome.failures),
        "seconds": round(elapsed_s, 3),
    }
    if outcome.skipped and not (outcome.files or outcome.failures):
        chosen.show(fields, f"{nothing}: {counted(outcome.skipped, 'file')} unchanged")
    else:
        text = f"{action} {counted(outcome.files, 'file')}, {rate_shown(outcome.bytes, elapsed_s)}"
        text += f"; {outcome.skipped} unchanged" if outcome.skipped else ""
        chosen.show(fields, text + (f"; {len(outcome.failures)} failed" if outcome.failures else ""))
    if outcome.failures:
        raise click.exceptions.Exit(1)


def _no_files(transfers: list[PlannedTransfer]) -> CommandError:
    names = " ".join(transfer.source.text for transfer in transfers)
    if any(transfer.patterns for transfer in transfers):
        return CommandError(f"{names}: no file or key is selected by --exclude and --include")
    if any(transfer.glob for transfer in transfers):
        return CommandError(
            f"{names}: no file or key matches; --raw takes wildcards as they are, and `torchobj ls` shows what exists"
        )
    return CommandError(f"{names}: has no files or objects; `torchobj ls` shows what exists")


def _nothing(extra: list[str]) -> str:
    return "nothing to transfer" if extra else "nothing to do"


def _note_count(chosen: Settings, action: str, extra: list[str], folder: Target) -> None:
    if extra:
        chosen.note(f"{action} {counted(len(extra), 'file')} below {escaped(folder.shown)}")


def _extra(transfer: PlannedTransfer, names: set[str], config: StoreConfig) -> list[str]:
    """Names below the destination that are not below the source, and not excluded.

    Temporary files are not deleted, because a listing of local files omits them.
    """
    copies = (name for name in transfer.copies(config) if selects(transfer.patterns, name))
    return [name for name in copies if name not in names and not is_temporary(name)]


def _delete(chosen: Settings, folder: Target, extra: list[str], config: StoreConfig) -> None:
    if not folder.is_local:
        store, prefix = Store(folder.url.base, config=config), folder.url.key
        for key in delete_keys(store, (f"{prefix}{name}" for name in extra)):
            _print_action(chosen, "delete", f"{store.url}/{key}")
        return
    names = without_links(folder.path, extra)
    for name in names:
        (folder.path / name).unlink(missing_ok=True)
        _print_action(chosen, "delete", str(folder.path / name))
    remove_empty_folders(folder.path, names)
