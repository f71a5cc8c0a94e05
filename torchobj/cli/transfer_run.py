"""Runs planned transfers: by `torchobj.files`, or from bucket to bucket. Several of them run at the same time.

Copies from bucket to bucket are made by the server within a provider, and are a stream between providers. A move
verifies all copies when all transfers are done, and then deletes each source that has one, and that did not change.
"""

import dataclasses
import mimetypes
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchobj.cli.options import CommandError, described
from torchobj.cli.output import escaped
from torchobj.cli.progress import Report
from torchobj.cli.transfer_plan import Item, PlannedTransfer, compared
from torchobj.config import StoreConfig
from torchobj.exceptions import TransferError
from torchobj.files import download, download_file, upload, upload_file
from torchobj.files.links import without_links
from torchobj.store import Store
from torchobj.store.attributes import ObjectAttributes
from torchobj.store.concurrency import concurrently
from torchobj.store.copies import Copy, delete_unchanged, unverified
from torchobj.store.file_objects import ObjectWriter
from torchobj.store.file_objects import open as open_object
from torchobj.store.transfers import FileState, Progress

#: Transfers of single files and copies that run at the same time; each uses several connections.
_CALLS = 32

_BLOCK_BYTES = 8 << 20

#: Why a source is kept.
_CHANGED = "because it changed while it was copied"
_WITHOUT_SIZE = "because its size is not known before it is read, as of files of /proc: it cannot be moved; use cp"

_FIELDS = tuple(field.name for field in dataclasses.fields(Progress))


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the transfers."""

    config: StoreConfig
    skip_unchanged: bool = False
    #: Arguments of uploads: headers, metadata and storage class. Without a content type, it is guessed from names.
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Whether the outcome contains what was transferred.
    lists_copies: bool = False


@dataclasses.dataclass(frozen=True)
class FailedTransfer:
    """A file or object that was not transferred."""

    name: str
    """URL or path of the source."""
    error: BaseException

    def __str__(self) -> str:
        """One line, with the name of the source if its error lacks it."""
        text = described(self.error)
        return text if self.name in text else f"{escaped(self.name)}: {text}"


class CopyMade(NamedTuple):
    """The result of the transfer of a file or object."""

    version: str | None
    """The version of the object that was written, or that was read to a file."""
    file: FileState | None = None
    """The local file as it was read or written."""


@dataclasses.dataclass
class Outcome:
    """What was transferred."""

    files: int = 0
    bytes: int = 0
    skipped: int = 0
    failures: list[FailedTransfer] = dataclasses.field(default_factory=list)
    #: Names that were not transferred, of each transfer that ran to its end.
    missing: dict[PlannedTransfer, set[str]] = dataclasses.field(default_factory=dict)
    #: Names that were transferred, of each transfer, with `lists_copies`.
    copies: dict[PlannedTransfer, dict[str, CopyMade]] = dataclasses.field(default_factory=dict)

    def add(self, other: "Outcome") -> None:
        """Adds the outcome of other transfers."""
        self.files, self.bytes = self.files + other.files, self.bytes + other.bytes
        self.skipped += other.skipped
        self.failures += other.failures
        self.missing |= other.missing
        self.copies |= other.copies


class _Total:
    """Adds up the progress of transfers that run at the same time."""

    def __init__(self, report: Report) -> None:
        self._report, self._lock = report, threading.Lock()
        #: Of each field of a progress, the sum of the known values, and the number of transfers whose value is None.
        self._sums, self._unknown = Counter[str](), Counter[str]()

    def part(self) -> Report:
        """Receives the progress of one transfer."""
        before = Progress(0, 0, 0, 0, 0)

        def update(state: Progress) -> None:
            nonlocal before
            with self._lock:
                # The sums are changed, and not computed anew: there may be a part for each of many thousand files.
                for name in _FIELDS:
                    old, new = getattr(before, name), getattr(state, name)
                    self._sums[name] += (new or 0) - (old or 0)
                    self._unknown[name] += (new is None) - (old is None)
                before = state
                totals: dict[str, Any] = {name: None if self._unknown[name] else self._sums[name] for name in _FIELDS}
                self._report(Progress(**totals))

        return update


def run_all(transfers: list[PlannedTransfer], options: Options, report: Report) -> Outcome:
    """Runs transfers. A failure does not end the others.

    Raises:
        Exception: The only transfer is of a single file or object, and failed.
    """
    outcome, total = Outcome(), _Total(report)
    if len(transfers) == 1:
        _run(transfers[0], options, report, outcome)
        return outcome

    def run(transfer: PlannedTransfer) -> None:
        alone = Outcome()
        try:
            _run(transfer, options, total.part(), alone)
        except Exception as error:  # noqa: BLE001  a failure does not end the others
            alone.failures.append(FailedTransfer(transfer.source.shown, error))
        outcomes.append(alone)

    outcomes: list[Outcome] = []
    for are_trees, calls in ((False, _CALLS), (True, 1)):
        some = [transfer for transfer in transfers if transfer.is_tree == are_trees]
        for _ in concurrently(run, some, calls, waits=False):
            outcome.add(outcomes.pop())
    return outcome


def _run(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    if transfer.is_between_buckets:
        _copy(transfer, options, report, outcome)
    elif transfer.is_tree:
        _transfer_tree(transfer, options, report, outcome)
    else:
        _transfer_file(transfer, options, report, outcome)


def _transfer_file(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    source, url = transfer.source, str(transfer.destination.url)
    attributes = {"content_type": guessed_type(source.path.name, url), **options.attributes}
    shared: dict[str, Any] = {"config": options.config, "skip_unchanged": options.skip_unchanged, "progress": report}
    if source.is_local:
        done = upload_file(source.path, url, **shared, **attributes)
    else:
        done = download_file(str(source.url), transfer.destination.path, **shared)
    outcome.files, outcome.skipped = int(not done.skipped), int(done.skipped)
    outcome.bytes = 0 if done.skipped else done.size
    outcome.missing[transfer] = set()
    outcome.copies[transfer] = {"": CopyMade(done.version, done._file_state)}


def _transfer_tree(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    shared: dict[str, Any] = {
        "config": options.config,
        "glob": transfer.glob,
        "patterns": transfer.patterns,
        "skip_unchanged": options.skip_unchanged,
        "progress": report,
    }
    if options.lists_copies:
        shared["_lists_files"] = True
    failed: list[tuple[str, Exception]] = []
    try:
        if transfer.source.is_local:
            shared |= {"content_types": types_by_end(), **options.attributes}
            done = upload(transfer.source.path, str(transfer.destination.url), **shared)
        else:
            done = download(str(transfer.source.url), transfer.destination.path, **shared)
    except TransferError as error:
        done, failed = error.result, error.failures
    outcome.failures += [FailedTransfer(transfer.source.child(name).shown, error) for name, error in failed]
    outcome.missing[transfer] = {name for name, _ in failed}
    outcome.copies[transfer] = {name: CopyMade(*each) for name, each in done._files.items()}
    outcome.files, outcome.bytes, outcome.skipped = done.transferred, done.bytes, done.skipped


def _copy(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    """Copies an object, or a tree, from bucket to bucket. Raises the error of a single object."""
    missing: set[str] = set()
    copies = outcome.copies.setdefault(transfer, {})

    def changed() -> Iterator[Item]:
        for item, _, is_unchanged in compared(transfer, options.config, skip_unchanged=options.skip_unchanged):
            if is_unchanged:
                outcome.skipped += 1
            else:
                yield item

    def copy(item: Item) -> tuple[int, str | None]:
        return _copy_object(transfer, item, options.config)

    for item, done in concurrently(copy, changed(), _CALLS, waits=False):
        if isinstance(done, Exception):
            if not transfer.is_tree:
                raise done
            outcome.failures.append(FailedTransfer(transfer.source.child(item.name).shown, done))
            missing.add(item.name)
            continue
        size, version = done
        if options.lists_copies:
            copies[item.name] = CopyMade(version)
        outcome.files, outcome.bytes = outcome.files + 1, outcome.bytes + size
        totals = (None, None) if transfer.is_tree else (1, size)
        report(Progress(outcome.files + outcome.skipped, totals[0], outcome.bytes, totals[1], outcome.skipped))
    outcome.missing[transfer] = missing


def _copy_object(transfer: PlannedTransfer, item: Item, config: StoreConfig) -> tuple[int, str | None]:
    """Copies an object with its headers and metadata. Returns its size in bytes, and the version of the copy if known.

    A copy on the server takes no request for metadata if a listing returned the size.

    Raises:
        StoreError: The object cannot be read or written; the destination is unchanged.
    """
    old, new = transfer.source.child(item.name).url, transfer.destination.child(item.name).url
    is_known = transfer.is_on_server and item.size is not None
    info = item if is_known else Store(old.base, config=config).head(old.key)
    if transfer.is_on_server:
        return info.size or 0, Store(new.base, config=config).copy(str(old), new.key)
    # The storage classes of providers differ.
    attributes = {name: getattr(info, name) for name in ObjectAttributes.__annotations__ if name != "storage_class"}
    with (
        open_object(str(old), "rb", config=config) as reader,
        ObjectWriter(str(new), config=config, **attributes) as writer,
    ):
        while block := reader.read(_BLOCK_BYTES):
            writer.write(block)
    return info.size or 0, writer.version


def guessed_type(*names: str) -> str | None:
    """The content type of the first name or path that has one; that of a compressed file is the type of its content.

    Example:
        >>> guessed_type("a/b.json"), guessed_type("part-1", "x.png"), guessed_type("Makefile")
        ('application/json', 'image/png', None)
    """
    # With `./` a name is not taken as a URL such as `data:`.
    return next((kind for name in names if (kind := mimetypes.guess_type(f"./{name}")[0])), None)


def types_by_end() -> dict[str, str]:
    """The content types of names by their ends, such as `.txt` and `.txt.gz`."""
    mimetypes.init()
    compressed = (f"{end}{encoding}" for end in mimetypes.types_map for encoding in mimetypes.encodings_map)
    ends = (*mimetypes.types_map, *mimetypes.suffix_map, *compressed)
    return {end: kind for end in ends if (kind := guessed_type(f"x{end}"))}


def sources_to_move(transfer: PlannedTransfer, config: StoreConfig) -> list[Item]:
    """The files or objects of a transfer before it; the version of a file is its state."""
    found = list(transfer.sources(config))
    source = transfer.source
    if not source.is_local:
        return found
    names = [item.name for item in found]
    if transfer.is_tree:
        # A file behind a link is outside of the tree, and is kept.
        names = without_links(source.path, names)
    states = {name: _state(source.path / name) for name in names}
    return [Item(name, state[2], str(state)) for name, state in states.items()]


def _state(path: Path) -> FileState:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def move_all(sources: dict[PlannedTransfer, list[Item]], options: Options, report: Report) -> Outcome:
    """Moves files and objects, given what `sources_to_move` returns for each transfer.

    When all transfers are done, all copies are verified, and then each source is deleted whose transfer succeeded,
    whose copy is right, and which has not changed.
    """
    outcome = run_all(list(sources), dataclasses.replace(options, lists_copies=True), report)
    safe: list[tuple[PlannedTransfer, Item]] = []
    for transfer, items in sources.items():
        copied = [item for item in items if _is_copied(transfer, item, outcome)]
        reasons = _reasons_to_keep(transfer, copied, outcome.copies.get(transfer, {}), options.config)
        for item in copied:
            if item.name in reasons:
                shown = transfer.source.child(item.name).shown
                outcome.failures.append(FailedTransfer(shown, CommandError(f"{shown}: kept, {reasons[item.name]}")))
            else:
                safe.append((transfer, item))

    def delete(source: tuple[PlannedTransfer, Item]) -> None:
        _delete(*source, options.config)

    for (transfer, item), error in concurrently(delete, safe, _CALLS, waits=False):
        if error is not None:
            outcome.failures.append(FailedTransfer(transfer.source.child(item.name).shown, error))
    return outcome


def _is_copied(transfer: PlannedTransfer, item: Item, outcome: Outcome) -> bool:
    missing = outcome.missing.get(transfer)
    if missing is None:
        return False
    if transfer.source.is_local and any(item.name.startswith(f"{name}/") for name in missing):
        # In a folder that could not be read.
        return False
    return item.name not in missing


def _reasons_to_keep(
    transfer: PlannedTransfer, items: list[Item], copies: dict[str, CopyMade], config: StoreConfig
) -> dict[str, str]:
    """Why sources are kept, by their names: the wrong bytes were copied, or their copies are not right."""
    source, into = transfer.source, transfer.destination
    reasons = {item.name: "because it was not copied" for item in items if item.name not in copies}
    for item in items:
        made = copies.get(item.name)
        if made is None:
            continue
        read = str(made.file) if source.is_local else made.version if into.is_local else item.version
        if source.is_local and made.file is None:
            reasons[item.name] = _WITHOUT_SIZE
        elif item.version is not None and read != item.version:
            reasons[item.name] = _CHANGED
        elif into.is_local and (path := into.child(item.name).path) and _state_or_none(path) != made.file:
            reasons[item.name] = f"because {path} is not the file that was written"
        elif into.is_local and made.file is not None and made.file[2] != item.size:
            reasons[item.name] = f"because {path} has {made.file[2]} bytes instead of {item.size}"
    if into.is_local:
        return reasons
    of_names = {item.name: item for item in items if item.name not in reasons}
    made_copies = {
        name: Copy(
            f"{source.url.key}{name}", item.size, item.version, f"{into.url.key}{name}", copies[name].version or None
        )
        for name, item in of_names.items()
    }
    origin = Store(source.url.base, config=config) if transfer.is_on_server else None
    wrong = unverified(Store(into.url.base, config=config), list(made_copies.values()), origin)
    for name, copy in made_copies.items():
        if copy.key in wrong:
            reasons[name] = f"because {wrong[copy.key]}"
    return reasons


def _state_or_none(path: Path) -> FileState | None:
    try:
        return _state(path)
    except OSError:
        return None


def _delete(transfer: PlannedTransfer, item: Item, config: StoreConfig) -> None:
    """Deletes a source whose copy was verified.

    Raises:
        CommandError: It changed; it is kept.
    """
    source = transfer.source.child(item.name)
    changed = CommandError(f"{source.shown}: kept, {_CHANGED}")
    if source.is_local:
        try:
            is_same = str(_state(source.path)) == item.version
        except FileNotFoundError:
            # A link whose file was moved before it.
            is_same = source.path.is_symlink()
        if not is_same:
            raise changed
        source.path.unlink()
        return
    if not delete_unchanged(Store(source.url.base, config=config), source.url.key, item.version):
        raise changed
