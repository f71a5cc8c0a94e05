"""The progress and the result of the transfer of a file between a path and a store."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from torchobj.exceptions import ConfigError

__all__ = ["FilePath", "Progress", "ProgressCallback", "Transfer", "counters_to"]

#: Path of a file or folder.
FilePath = str | os.PathLike[str]


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


#: Receives the state of a transfer. The method `update` of a bar of tqdm receives bytes.
ProgressCallback: TypeAlias = Callable[[Progress], object]


def counters_to(progress: ProgressCallback | None) -> Callable[..., None] | None:
    """Converts a `progress` callable to one that receives the counters of a native transfer."""
    if progress is None:
        return None
    if not callable(progress):
        raise ConfigError(f"progress={progress!r}: must be a callable that receives a Progress, or None")

    callback = _callback_of(progress)

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
