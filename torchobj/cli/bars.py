"""Progress bars on a terminal. Imports rich, and is therefore imported for terminals only."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import Progress as Bars
from rich.progress import Task
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from torchobj.cli.output import duration, escaped, human_size
from torchobj.store.transfers import Progress

#: Width of a bar, and the least width with which it is shown.
_WIDTH, _LEAST_WIDTH = 24, 6
#: Width of the numbers of most transfers, with and without files; it keeps the bar from moving with their digits.
_NUMBERS_WIDTH, _FILES_WIDTH = 54, 14


class _Line:
    """The line of a task: name, bar, percentage, files, bytes, rate and remaining time, with the width of the frame."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line for a console, without what its width has no space for: first the bar, then the totals."""
        task, width = self._task, options.max_width
        state: Progress | None = task.fields["state"]
        texts = _texts(task, state)
        has_files = state is not None and state.files_total != 1
        reserved = max(cell_len(texts[0]), _NUMBERS_WIDTH + (_FILES_WIDTH if has_files else 0))
        bar_width = min(_WIDTH, width - cell_len(task.description) - 2 - reserved)
        yield Segment(f"{task.description} ")
        if bar_width >= _LEAST_WIDTH:
            shown = ProgressBar(task.total, task.completed, bar_width, animation_time=task.get_time())
            yield from console.render(shown, options.update(width=bar_width))
            yield Segment(" ")
        space = width - cell_len(task.description) - 1
        text = next((text for text in texts if cell_len(text) <= space), texts[-1])
        yield Text(text, no_wrap=True, overflow="crop")


def _texts(task: Task, state: Progress | None) -> list[str]:
    """The numbers, from all to the shortest: the rate and the remaining time are kept longest."""
    share = [] if task.total is None else [f"{task.percentage:>3.0f}%"]
    end = []
    if task.speed is not None and not task.finished:
        end.append(f"{human_size(int(task.speed))}/s")
    if task.finished:
        end.append(duration(task.finished_time or 0.0))
    elif task.time_remaining is not None:
        end.append(f"{timedelta(seconds=round(task.time_remaining))} left")
    counts = [["0 B"]] if state is None else [numbers(state), numbers(state, totals=False), numbers(state)[-1:], []]
    return [" ".join([*share, "  ".join([*parts, *end])]) for parts in counts]


def numbers(state: Progress, *, totals: bool = True) -> list[str]:
    """Files and bytes of a transfer; no files if there is only one."""
    parts = []
    if state.files_total is None:
        parts.append(f"{state.files_done} files")
    elif state.files_total > 1:
        parts.append(f"{state.files_done}/{state.files_total} files")
    total = "" if state.bytes_total is None or not totals else f" of {human_size(state.bytes_total)}"
    return [*parts, f"{human_size(state.bytes_done)}{total}"]


class _Bars(Bars):
    """Bars that fit the console in each frame. Lines that are written to `sys.stderr` appear above them."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines of the tasks."""
        return [_Line(task) for task in self.tasks]


def bars(console: Console) -> Bars:
    """Bars on a console."""
    return _Bars(console=console, refresh_per_second=8)


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
