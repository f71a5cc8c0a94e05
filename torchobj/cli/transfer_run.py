"""Runs planned transfers: by `torchobj.files`, or from bucket to bucket. Several of them run at the same time."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, TypeVar

from torchobj.cli.bucket_copy import copy_object, is_on_server
from torchobj.cli.comparison import compared, copies_of, sources_of
from torchobj.cli.content_types import guessed_type, types_by_end
from torchobj.cli.errors import described
from torchobj.cli.output import escaped
from torchobj.cli.progress import Report, of_stream
from torchobj.cli.transfer_plan import Item, PlannedTransfer, is_fifo
from torchobj.config import StoreConfig
from torchobj.exceptions import TransferError
from torchobj.files.streams import upload_stream
from torchobj.files.transfers import TreeTransfer, download, download_file, upload, upload_file
from torchobj.store.transfers import Progress

__all__ = ["Failure", "Options", "Outcome", "concurrently", "failure_line", "run_all"]

#: Transfers of single files and copies that run at the same time; each uses several connections.
_THREADS = 32

_Job = TypeVar("_Job")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the transfers."""

    config: StoreConfig
    skip_unchanged: bool = False
    #: Arguments of uploads: headers, metadata and storage class. Without a content type, it is guessed from names.
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Whether the outcome contains the names of objects that the server copied.
    names_copies: bool = False


@dataclasses.dataclass(frozen=True)
class Failure:
    """A file or object that was not transferred."""

    name: str
    """URL or path of the source."""
    error: BaseException


@dataclasses.dataclass
class Outcome:
    """What was transferred."""

    files: int = 0
    bytes: int = 0
    skipped: int = 0
    failures: list[Failure] = dataclasses.field(default_factory=list)
    #: Version of the copy of each single file or object; None if it has none or is a file.
    versions: dict[PlannedTransfer, str | None] = dataclasses.field(default_factory=dict)
    #: Trees that were listed to the end, and the names in them that were not transferred.
    trees: dict[PlannedTransfer, set[str]] = dataclasses.field(default_factory=dict)
    #: Names in trees that the server copied within a provider, with `names_copies`.
    copies: dict[PlannedTransfer, set[str]] = dataclasses.field(default_factory=dict)

    def add(self, result: TreeTransfer) -> None:
        """Adds the result of the transfer of a tree."""
        self.files, self.bytes = self.files + result.transferred, self.bytes + result.bytes
        self.skipped += result.skipped


class _Total:
    """Adds up the progress of transfers that run at the same time."""

    def __init__(self, report: Report) -> None:
        self._report, self._lock = report, threading.Lock()
        self._parts: dict[int, Progress] = {}

    def part(self, number: int) -> Report:
        """Receives the progress of one transfer."""

        def update(state: Progress) -> None:
            with self._lock:
                self._parts[number] = state
                parts = self._parts.values()
                done = [
                    sum(values)
                    for values in zip(*((p.files_done, p.bytes_done, p.skipped) for p in parts), strict=True)
                ]
                total = [_sum(p.files_total for p in parts), _sum(p.bytes_total for p in parts)]
                self._report(Progress(done[0], total[0], done[1], total[1], done[2]))

        return update


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number or 0 for number in known)


def concurrently(
    jobs: Iterable[_Job], work: Callable[[_Job], Any], name: Callable[[_Job], str]
) -> Iterator[tuple[_Job, Any, Failure | None]]:
    """Calls `work` with each job, at most 32 at the same time, and yields results and failures as they come.

    Ctrl-C is raised within a tenth of a second; running calls are abandoned.
    """
    source = iter(jobs)
    pool = ThreadPoolExecutor(_THREADS)
    running: dict[Future[Any], _Job] = {}
    try:
        while True:
            for job in islice(source, 2 * _THREADS - len(running)):
                running[pool.submit(work, job)] = job
            if not running:
                return
            for future in wait(running, 0.1, FIRST_COMPLETED).done:
                job, error = running.pop(future), future.exception()
                yield job, None if error else future.result(), Failure(name(job), error) if error else None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_all(transfers: list[PlannedTransfer], options: Options, report: Report) -> Outcome:
    """Runs transfers. A failure does not end the others.

    Raises:
        Exception: The only transfer is of a single file or object, and failed.
    """
    outcome, total = Outcome(), _Total(report)
    if len(transfers) == 1:
        _run(transfers[0], options, report, outcome)
        return outcome
    singles = [(number, transfer) for number, transfer in enumerate(transfers) if not transfer.is_tree]

    def single(job: tuple[int, PlannedTransfer]) -> Outcome:
        alone = Outcome()
        _run(job[1], options, total.part(job[0]), alone)
        return alone

    for _, done, failure in concurrently(singles, single, lambda job: job[1].source.shown):
        if failure is not None:
            outcome.failures.append(failure)
            continue
        outcome.files, outcome.bytes = outcome.files + done.files, outcome.bytes + done.bytes
        outcome.skipped += done.skipped
        outcome.versions |= done.versions
    for number, transfer in enumerate(transfers):
        if transfer.is_tree:
            try:
                _run(transfer, options, total.part(number), outcome)
            except Exception as error:  # noqa: BLE001  a failure does not end the others
                outcome.failures.append(Failure(transfer.source.shown, error))
    return outcome


def _run(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    if not (transfer.source.is_local or transfer.destination.is_local):
        _copy(transfer, options, report, outcome)
    elif transfer.is_tree:
        _tree(transfer, options, report, outcome)
    else:
        _single(transfer, options, report, outcome)


def _single(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    source, url = transfer.source, str(transfer.destination.url)
    attributes = {"content_type": guessed_type(source.path.name, url), **options.attributes}
    if is_fifo(transfer):
        with source.path.open("rb") as stream:
            size = upload_stream(stream, url, config=options.config, progress=of_stream(report), **attributes).size
        outcome.files, outcome.bytes = outcome.files + 1, outcome.bytes + size
        return
    shared: dict[str, Any] = {"config": options.config, "skip_unchanged": options.skip_unchanged, "progress": report}
    if source.is_local:
        done = upload_file(source.path, url, **shared, **attributes)
    else:
        done = download_file(str(source.url), transfer.destination.path, **shared)
    outcome.files, outcome.skipped = outcome.files + (not done.skipped), outcome.skipped + done.skipped
    outcome.bytes += 0 if done.skipped else done.size
    outcome.versions[transfer] = done.version if source.is_local else None


def _tree(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    shared: dict[str, Any] = {
        "config": options.config,
        "glob": transfer.glob,
        "patterns": transfer.patterns,
        "skip_unchanged": options.skip_unchanged,
        "progress": report,
    }
    missing: set[str] = set()
    try:
        if transfer.source.is_local:
            shared |= {"content_types": types_by_end(), **options.attributes}
            result = upload(transfer.source.path, str(transfer.destination.url), **shared)
        else:
            result = download(str(transfer.source.url), transfer.destination.path, **shared)
    except TransferError as error:
        result, missing = error.result, {name for name, _ in error.failures}
        outcome.failures += [Failure(transfer.source.child(name).shown, failed) for name, failed in error.failures]
    outcome.trees[transfer] = missing
    outcome.add(result)


def _copy(transfer: PlannedTransfer, options: Options, report: Report, outcome: Outcome) -> None:
    """Copies an object, or a tree, from bucket to bucket."""
    source, destination, config = transfer.source, transfer.destination, options.config
    if not transfer.is_tree:
        if options.skip_unchanged and not list(_changed(transfer, options, outcome)):
            return
        size, outcome.versions[transfer] = copy_object(str(source.url), str(destination.url), config)
        outcome.files, outcome.bytes = outcome.files + 1, outcome.bytes + size
        report(Progress(1, 1, size, size, 0))
        return

    def copy(item: Item) -> int:
        return copy_object(f"{source.url}{item.name}", f"{destination.url}{item.name}", config, item.size)[0]

    before = Outcome(outcome.files, outcome.bytes, outcome.skipped)
    missing: set[str] = set()
    names = outcome.copies.setdefault(transfer, set())
    is_named = options.names_copies and is_on_server(source.url, destination.url)
    for item, size, failure in concurrently(
        _changed(transfer, options, outcome), copy, lambda item: f"{source.url}{item.name}"
    ):
        if failure is not None:
            outcome.failures.append(failure)
            missing.add(item.name)
            continue
        if is_named:
            names.add(item.name)
        outcome.files, outcome.bytes = outcome.files + 1, outcome.bytes + size
        skipped = outcome.skipped - before.skipped
        done = outcome.files - before.files + skipped
        report(Progress(done, None, outcome.bytes - before.bytes, None, skipped))
    outcome.trees[transfer] = missing


def _changed(transfer: PlannedTransfer, options: Options, outcome: Outcome) -> Iterator[Item]:
    """The objects to copy from bucket to bucket. Counts the unchanged ones, if they are skipped."""
    found = sources_of(transfer, options.config)
    if not options.skip_unchanged:
        yield from found
        return
    for item, is_unchanged in compared(transfer, found, copies_of(transfer, options.config), options.config):
        if is_unchanged:
            outcome.skipped += 1
        else:
            yield item


def failure_line(failure: Failure) -> str:
    """A failure on one line, with the name of the source if its error lacks it."""
    text = described(failure.error)
    return text if failure.name in text else f"{escaped(failure.name)}: {text}"
