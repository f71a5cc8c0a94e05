"""`torchobj cp`, also by the names `upload` and `download`, and `torchobj mv`."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from torchobj.cli.comparison import compared, copies_of, sources_of
from torchobj.cli.content_types import guessed_type
from torchobj.cli.errors import CommandError
from torchobj.cli.moving import move_all, sources_to_move
from torchobj.cli.objects import write_target
from torchobj.cli.options import Command, PatternCommand, Settings, fail_with, settings
from torchobj.cli.output import counted, duration, human_size, print_json, print_line, shown
from torchobj.cli.progress import of_stream, reporting
from torchobj.cli.targets import check_bucket, check_wildcards, parse_target
from torchobj.cli.transfer_plan import STREAM, Item, PlannedTransfer, check_destinations, is_fifo, plan
from torchobj.cli.transfer_run import Options, Outcome, failure_line, run_all
from torchobj.cli.url_argument import URL
from torchobj.config import StoreConfig
from torchobj.files.patterns import Pattern
from torchobj.files.streams import upload_stream

__all__ = ["check_attributes", "cp", "mv", "print_action", "print_outcome", "print_plan"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _arguments(function: _Function) -> _Function:
    """The arguments and options of `cp` and `mv`."""
    for add in (
        click.option("--raw", is_flag=True, help="Take wildcards in sources as they are."),
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
    appear whole or not at all; an interrupted download continues where it ended.

    Patterns are compared with paths below a folder or the folder above the wildcards of a glob, and * also matches
    slashes. A single source is compared by its last name.
    """
    chosen = settings()
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
    check_attributes(transfers, given)
    check_destinations(transfers, config)
    options = Options(config, skip_unchanged=skip_unchanged, attributes=given)
    if dry_run:
        if not print_plan(chosen, transfers, options, "would copy"):
            raise _nothing(transfers)
        return
    started = time.monotonic()
    with reporting("cp", quiet=chosen.json) as report:
        outcome = run_all(transfers, options, report)
    _check_found(transfers, outcome)
    print_outcome(chosen, outcome, "copied", time.monotonic() - started)


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
        if is_fifo(transfer):
            raise CommandError(f"{transfer.source.text}: a FIFO cannot be moved; use cp")
    check_attributes(transfers, given)
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
        if not print_plan(chosen, transfers, options, "would move"):
            raise _nothing(transfers)
        return
    started = time.monotonic()
    moved = [source for transfer in transfers for source in sources_to_move(transfer, config)]
    if any(end.names_bucket for end in (*from_all, *into_root)):
        size = human_size(sum(source.size or 0 for source in moved))
        chosen.note(f"moving {counted(len(moved), 'file')}, {size}; each is deleted when its copy was verified")
    with reporting("mv", quiet=chosen.json) as report:
        outcome = move_all(transfers, moved, options, report)
    _check_found(transfers, outcome)
    print_outcome(chosen, outcome, "moved", time.monotonic() - started)


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of uploads for headers and metadata that were given."""
    pairs = [text.partition("=") for text in attributes.pop("metadata")]
    for name, separator, _ in pairs:
        if not name or not separator:
            raise CommandError(f"--metadata {name}: must be NAME=VALUE")
    given = {name: value for name, value in attributes.items() if value is not None}
    return given | ({"metadata": {name: value for name, _, value in pairs}} if pairs else {})


def check_attributes(transfers: list[PlannedTransfer], given: dict[str, Any]) -> None:
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
    print_outcome(chosen, Outcome(1, done.size), "copied", time.monotonic() - started)


def print_plan(
    chosen: Settings, transfers: list[PlannedTransfer], options: Options, action: str, *, nothing: str = "nothing to do"
) -> int:
    """Prints what would be transferred, and counts what has nothing to compare. Returns the number of sources."""
    found, printed, by_checksum, without = 0, 0, 0, 0
    for transfer in transfers:
        between = not (transfer.source.is_local or transfer.destination.is_local)
        copies: dict[str, Item] = {}
        states: Iterable[tuple[Item, bool | None]]
        if options.skip_unchanged:
            copies = copies_of(transfer, options.config)
            states = compared(transfer, sources_of(transfer, options.config), copies, options.config)
        elif transfer.is_tree:
            states = ((item, False) for item in sources_of(transfer, options.config))
        else:
            states = [(Item("", None, None), False)]
        for item, is_unchanged in states:
            found += 1
            copy = copies.get(item.name)
            compares = copy is not None and copy.size == item.size and not between
            if is_unchanged is None and compares:
                by_checksum += 1
            elif not is_unchanged:
                printed += 1
                without += is_unchanged is None
                source, destination = transfer.source.child(item.name), transfer.destination.child(item.name)
                print_action(chosen, "would compare" if compares else action, source.shown, destination.shown)
    _print_count(chosen, "would compare", by_checksum, "would compare {} of equal size by checksums")
    _print_count(chosen, "nothing to compare", without, "{} of equal size with nothing else to compare")
    if found and not printed + by_checksum:
        chosen.note(f"{nothing}: {counted(found, 'file')} unchanged")
    return found


def _print_count(chosen: Settings, action: str, count: int, text: str) -> None:
    if count and chosen.json:
        print_json({"action": action, "files": count})
    elif count:
        print_line(text.format(counted(count, "file")))


def print_action(chosen: Settings, action: str, source: str, destination: str | None = None) -> None:
    """Prints what is done, or would be, with a file or object."""
    if chosen.json:
        names = {"url": source} if destination is None else {"source": source, "destination": destination}
        print_json({"action": action, **names})
    else:
        print_line(f"{action} {shown(source)}" + ("" if destination is None else f" -> {shown(destination)}"))


def print_outcome(
    chosen: Settings, outcome: Outcome, action: str, elapsed_s: float, *, nothing: str = "nothing to do"
) -> None:
    """Prints the failures and a summary. Ends the command with exit code 1 if something failed."""
    for failure in outcome.failures:
        chosen.error(failure_line(failure), failure.error)
    if chosen.json:
        print_json(
            {
                "action": action,
                "files": outcome.files,
                "bytes": outcome.bytes,
                "unchanged": outcome.skipped,
                "failed": len(outcome.failures),
                "seconds": round(elapsed_s, 3),
            }
        )
    elif outcome.skipped and not (outcome.files or outcome.failures):
        print_line(f"{nothing}: {counted(outcome.skipped, 'file')} unchanged")
    else:
        rate = human_size(int(outcome.bytes / elapsed_s)) if elapsed_s > 0 else "?"
        text = f"{action} {counted(outcome.files, 'file')}, {human_size(outcome.bytes)}"
        text += f", in {duration(elapsed_s)}, {rate}/s"
        text += f"; {outcome.skipped} unchanged" if outcome.skipped else ""
        print_line(text + (f"; {len(outcome.failures)} failed" if outcome.failures else ""))
    if outcome.failures:
        fail_with()


def _check_found(transfers: list[PlannedTransfer], outcome: Outcome) -> None:
    if not (outcome.files or outcome.skipped or outcome.failures):
        raise _nothing(transfers)


def _nothing(transfers: list[PlannedTransfer]) -> CommandError:
    names = " ".join(transfer.source.text for transfer in transfers)
    if any(transfer.patterns for transfer in transfers):
        return CommandError(f"{names}: no file or key is selected by --exclude and --include")
    if any(transfer.glob for transfer in transfers):
        return CommandError(
            f"{names}: no file or key matches; --raw takes wildcards as they are, and `torchobj ls` shows what exists"
        )
    return CommandError(f"{names}: has no files or objects; `torchobj ls` shows what exists")
