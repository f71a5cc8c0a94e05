"""Progress bars on a terminal. Imports rich, and is therefore imported for terminals only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from torchobj.cli.output import duration, escaped, human_size
from torchobj.files.results import Progress

__all__ = ["bar", "bars", "updates"]

#: Width of a bar, unless a narrow console needs the space for the numbers.
_WIDTH, _LEAST_WIDTH, _NUMBERS_WIDTH = 24, 4, 70


class _Numbers(ProgressColumn):
    """Files, bytes, rate and remaining time."""

    def render(self, task: Task) -> Text:
        """The column of a task."""
        state: Progress | None = task.fields["state"]
        parts = [] if state is None else numbers(state)
        if task.speed is not None and not task.finished:
            parts.append(f"{human_size(int(task.speed))}/s")
        if task.finished:
            parts.append(duration(task.finished_time or 0.0))
        elif task.time_remaining is not None:
            parts.append(f"{timedelta(seconds=round(task.time_remaining))} left")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


def numbers(state: Progress) -> list[str]:
    """Files and bytes of a transfer; no files if there is only one."""
    parts = []
    if state.files_total is None:
        parts.append(f"{state.files_done} files")
    elif state.files_total > 1:
        parts.append(f"{state.files_done}/{state.files_total} files")
    total = "" if state.bytes_total is None else f" of {human_size(state.bytes_total)}"
    return [*parts, f"{human_size(state.bytes_done)}{total}"]


def bars(console: Console) -> Bars:
    """Bars on a console."""
    name = TextColumn("{task.description}", markup=False)
    width = max(_LEAST_WIDTH, min(_WIDTH, console.width - _NUMBERS_WIDTH))
    columns = (name, BarColumn(bar_width=width), TaskProgressColumn(), _Numbers())
    return Bars(*columns, console=console, refresh_per_second=8)


@contextmanager
def bar(name: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr, during a block. Yields a function that receives the progress."""
    with bars(Console(file=sys.stderr)) as shown:
        yield updates(shown, name)


def updates(shown: Bars, name: str) -> Callable[[Progress], None]:
    """Adds a bar. Returns a function that receives the progress."""
    task = shown.add_task(escaped(name), total=None, state=None)

    def update(state: Progress) -> None:
        shown.update(task, completed=state.bytes_done, total=state.bytes_total, state=state)

    return update
