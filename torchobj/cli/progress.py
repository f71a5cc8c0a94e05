"""Shows the progress of transfers: a bar with rate and ETA on a terminal, lines otherwise. Does not transfer."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator

import click

from torchobj.cli.output import counts, duration, human_size
from torchobj.store.transfers import Progress

#: Interval of lines, if there is no terminal.
_LINE_INTERVAL_S = 10.0

#: Receives the progress of a transfer.
Report = Callable[[Progress], None]


@contextlib.contextmanager
def reporting(name: str, *, quiet: bool = False) -> Iterator[Report]:
    """Shows the progress of a transfer on stderr, during a block.

    Args:
        name: What is transferred.
        quiet: Whether nothing is shown.

    Yields:
        A function that receives the progress.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        from torchobj.cli.bars import Bar  # noqa: PLC0415  rich is slow to import

        with Bar(name) as bar:
            yield bar.show
    else:
        yield _Lines(name)


def of_stream(report: Report) -> Report:
    """Receives the progress of a stream, which is one file before its end is known."""
    return lambda state: report(dataclasses.replace(state, files_total=1))


class _Lines:
    """Prints a line at intervals."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._started = self._printed = clock()

    def __call__(self, state: Progress) -> None:
        """Receives the progress."""
        now = self._clock()
        if now - self._printed >= _LINE_INTERVAL_S:
            self._printed = now
            click.echo(line(self._name, state, now - self._started), err=True)


def line(name: str, state: Progress, elapsed_s: float) -> str:
    """The progress as a line.

    Example:
        >>> line("cp", Progress(3, 4, 1 << 20, 4 << 20, 1), elapsed_s=2.0)
        'cp: 3 of 4 files, 1.00 MiB of 4.00 MiB, 512 KiB/s, 6.0 s left'
    """
    rate = state.bytes_done / elapsed_s if elapsed_s > 0 else 0.0
    parts = [*counts(state, " of "), f"{human_size(int(rate))}/s"]
    if state.bytes_total is not None and rate > 0:
        parts.append(f"{duration((state.bytes_total - state.bytes_done) / rate)} left")
    return f"{name}: {', '.join(parts)}"
