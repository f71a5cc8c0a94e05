"""The progress of a transfer, as a callable receives it or a bar shows it, and the result of that of a file."""

import contextlib
import dataclasses
import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from torchobj.exceptions import ConfigError

__all__ = [
    "ByteProgress",
    "FilePath",
    "FileState",
    "Progress",
    "ProgressCallback",
    "ProgressOption",
    "Transfer",
    "counters_to",
    "make_folders",
]

#: Time between two updates of the bar.
_BAR_INTERVAL_S = 0.1

#: Path of a file or folder.
FilePath = str | os.PathLike[str]


#: Errors of file systems that cannot make the names in a folder durable.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)

#: A file as it was read or written: device, inode, size in bytes, and time of modification in nanoseconds since 1970.
FileState = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """The state of a transfer, as its `progress` callable receives it."""

    files_done: int
    """Number of files that are done, including the skipped ones."""
    files_total: int | None
    """Number of files; None until all are found."""
    bytes_done: int
    """Number of bytes that are done, including those of skipped files."""
    bytes_total: int | None
    """Number of bytes; None until all files are found."""
    skipped: int
    """Number of files that were skipped because they are unchanged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """The result of the transfer of one file."""

    url: str
    """URL of the object."""
    path: Path | None
    """The file; None for a stream."""
    size: int
    """Size in bytes."""
    version: str | None
    """The version of the object; None if the store has no versions."""
    skipped: bool
    """Whether nothing was transferred, because file and object are the same."""
    _file_state: FileState | None = dataclasses.field(default=None, repr=False, compare=False)


#: Receives the state of a transfer. The method `update` of a bar of tqdm receives bytes.
ProgressCallback: TypeAlias = Callable[[Progress], object]

#: The argument `progress` of transfers: True shows a bar on stderr.
ProgressOption: TypeAlias = ProgressCallback | bool | None


def make_folders(folder: Path) -> None:
    """Creates a folder and those above it, and makes their names durable where the file system can."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        try:
            above = os.open(each.parent, os.O_RDONLY | os.O_DIRECTORY)
        except PermissionError:
            # A folder in which files can be created need not be readable.
            continue
        try:
            os.fsync(above)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(above)


def counters_to(progress: ProgressOption) -> Callable[..., None] | None:
    """Converts the argument `progress` to a callable that receives the counters of a native transfer."""
    if progress is None or progress is False:
        return None
    if progress is not True and not callable(progress):
        raise ConfigError(f"progress={progress!r}: must be True, or a callable that receives a Progress, or None")

    callback = _bar() if progress is True else _callback_of(progress)

    def report(*counters: Any) -> None:
        callback(Progress(*counters))

    return report


def _callback_of(progress: ProgressCallback) -> Callable[[Progress], object]:
    """Converts the method `update` of a bar of tqdm, which takes an increment; returns any other callable itself."""
    bar: Any = getattr(progress, "__self__", None)
    if getattr(progress, "__name__", "") != "update" or not (hasattr(bar, "n") and hasattr(bar, "total")):
        return progress
    update: Any = progress
    before = 0

    def advance(state: Progress) -> None:
        nonlocal before
        if bar.total is None and state.bytes_total is not None:
            bar.total = bar.n - before + state.bytes_total
        update(state.bytes_done - before)
        before = state.bytes_done

    return advance


def _bar() -> ProgressCallback:
    """A callable that shows the state in a line of stderr; without a terminal, once at the end."""
    began = shown = time.monotonic()

    def show(state: Progress) -> None:
        nonlocal shown
        now, is_done = time.monotonic(), state.files_done == state.files_total
        # A program without a standard error has none.
        if sys.stderr is None or (not is_done and (now - shown < _BAR_INTERVAL_S or not sys.stderr.isatty())):
            return
        shown = now
        of_bytes = "" if state.bytes_total is None else f" of {state.bytes_total / 1e6:,.1f}"
        of_files = "" if state.files_total is None else f" of {state.files_total:,}"
        rate = state.bytes_done / 1e6 / max(now - began, 1e-3)
        line = f"{state.bytes_done / 1e6:,.1f}{of_bytes} MB, {state.files_done:,}{of_files} files, {rate:,.0f} MB/s"
        # A full disk must not end the transfer.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"\r{line:<78}" + ("\n" if is_done else ""))
            sys.stderr.flush()

    return show


class ByteProgress:
    """The progress of one object, or of a state shard, that several calls transfer. Pickled as its argument.

    Args:
        progress: The argument `progress` of the transfer. Without it nothing is reported.
    """

    def __init__(self, progress: ProgressOption) -> None:
        self._progress = progress
        self.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._progress,)

    def begin(self) -> None:
        """Begins with a transfer of which nothing is done."""
        self._report = counters_to(self._progress)
        self._done = self._total = 0

    @property
    def arrived(self) -> Callable[[int], None] | None:
        """Reports bytes of a call that is running, besides those that are done; None if nothing is reported."""
        return None if self._report is None else self._arrived

    def _arrived(self, size: int) -> None:
        if self._report is not None:
            # Headers of records arrive with the tensors.
            self._report(0, 1, min(self._done + size, self._total), self._total, 0)

    def expect(self, size: int) -> None:
        """Adds bytes to those that will be transferred."""
        self._total += size

    def add(self, size: int) -> None:
        """Reports bytes that are done."""
        self._done += size
        self._arrived(0)

    def finish(self) -> None:
        """Reports the end."""
        if self._report is not None:
            self._report(1, 1, self._done, self._done, 0)
