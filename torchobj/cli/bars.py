"""A progress bar on a terminal. Imports rich, and is therefore imported for terminals only."""

import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn
from rich.progress import Progress as RichProgress
from typing_extensions import override

from torchobj.cli.output import counts, duration, human_size
from torchobj.store.transfers import Progress

_NAME, _SHARE = "{task.description}", TaskProgressColumn("{task.percentage:>3.0f}%")
_COUNTS, _WITHOUT_TOTALS = "{task.fields[counts]}", "{task.fields[without_totals]}"
_BYTES = "{task.fields[bytes]}"
#: Rate and remaining time; beside a bar with a width of their own, which keeps that of the bar the same.
_END, _WIDE_END = "{task.fields[end]}", "{task.fields[end]:<25}"

#: The columns, from all to the fewest: a console without space for them has no bar, then no totals, then no
#: counts of files, then none at all.
_COLUMNS: tuple[tuple[str | ProgressColumn, ...], ...] = (
    (_NAME, BarColumn(24), _SHARE, _COUNTS, _WIDE_END),
    (_NAME, BarColumn(8), _SHARE, _COUNTS, _WIDE_END),
    (_NAME, _SHARE, _COUNTS, _END),
    (_NAME, _SHARE, _WITHOUT_TOTALS, _END),
    (_NAME, _SHARE, _BYTES, _END),
    (_NAME, _SHARE, _END),
)


class Bar(RichProgress):
    """A bar that fits the console in each frame. Lines that are written to `sys.stderr` appear above it.

    Args:
        name: What is transferred.
        console: The console; None for that of `sys.stderr`.
        clock: Returns seconds.
    """

    def __init__(self, name: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        # rich makes a frame before it sets its `console`.
        self._console = console or Console(file=sys.stderr)
        super().__init__(console=self._console, refresh_per_second=8, get_time=clock)
        self._shown = self.add_task(name, total=None, state=None)

    def show(self, state: Progress) -> None:
        """Receives the progress."""
        self.update(self._shown, completed=state.bytes_done, total=state.bytes_total, state=state)

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        """The line, with the columns that the console has space for."""
        # Made for each frame: rich adds up hundreds of samples for a rate.
        for task in self.tasks:
            task.fields |= {"end": _end(task), "counts": _counts(task), "without_totals": _counts(task, totals=False)}
            task.fields["bytes"] = task.fields["without_totals"].rpartition("  ")[2]
        unlimited = self._console.options.update(width=1 << 16)
        for self.columns in _COLUMNS:
            line = self.make_tasks_table(self.tasks)
            if self._console.measure(line, options=unlimited).maximum <= self._console.width:
                break
        yield line


def _counts(task: Task, *, totals: bool = True) -> str:
    state: Progress | None = task.fields["state"]
    return "0 B" if state is None else "  ".join(counts(state, "/", totals=totals))


def _end(task: Task) -> str:
    """Rate and remaining time, or the time that was taken."""
    if task.finished:
        return f" {duration(task.finished_time or 0.0)}"
    rate = "" if task.speed is None else f" {human_size(int(task.speed))}/s"
    left = task.time_remaining
    return rate if left is None else f"{rate}  {timedelta(seconds=round(left))} left"
