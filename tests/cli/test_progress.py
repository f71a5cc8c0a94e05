"""The progress of transfers: bars on a terminal, lines otherwise."""

import io
import itertools
import logging
import re

import pytest
from rich.console import Console

from torchobj.cli import progress
from torchobj.cli.bars import Bar
from torchobj.cli.options import start_logging
from torchobj.files import Progress

STATE = Progress(21, 300, 259 << 20, 2 << 30, 1)


def running(*states, width=120):
    """A bar after these states, at intervals of a second."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    bar = Bar("cp", console, itertools.count().__next__)
    for state in states:
        bar.show(state)
    return bar


def frame(bar):
    """The lines of the bar now."""
    bar.console.file = io.StringIO()
    bar.console.print(bar.get_renderable())
    return bar.console.file.getvalue().splitlines()


def shown_at(width, *states):
    """The lines of a bar on a console of this width."""
    return frame(running(*states, width=width))


def test_a_bar_has_files_bytes_and_share():
    [line] = shown_at(120, STATE)
    assert line.startswith("cp ━") and " 13% 21/300 files  259 MiB of 2.00 GiB" in line


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_bar_takes_one_line_of_any_width(width):
    assert len(shown_at(width, STATE)) == 1


@pytest.mark.parametrize(("width", "has_bar"), [(120, True), (80, True), (70, False), (60, False), (50, False)])
def test_a_narrow_console_shows_rate_and_remaining_time_rather_than_the_bar(width, has_bar):
    [line] = shown_at(width, Progress(0, 300, 13 << 20, 2 << 30, 0), STATE)
    assert "MiB/s  0:00:" in line and line.rstrip().endswith(" left") and ("━" in line) == has_bar


def test_each_frame_has_the_width_of_the_console():
    bar = running(Progress(0, 300, 13 << 20, 2 << 30, 0), STATE)
    assert "━" in frame(bar)[0]
    bar.console.width = 60
    [line] = frame(bar)
    assert "━" not in line and line.rstrip().endswith(" left")


def test_a_log_line_is_printed_above_the_bar():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    start_logging("warning")
    with Bar("cp", console) as bar:
        bar.show(STATE)
        logging.getLogger("torchobj").warning("attempt 3 failed")
        bar.refresh()
    lines = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n").splitlines()
    assert "torchobj: warning: attempt 3 failed" in [line.rstrip() for line in lines]
    assert [line for line in lines if line.startswith("cp ")][-1].startswith("cp ━")


def test_a_stream_shows_no_number_of_files():
    [line] = shown_at(120, _streamed(Progress(0, None, 1 << 20, None, 0)))
    assert line.split() == ["cp", "━" * 24, "1.00", "MiB"]
    assert progress.line("cp", _streamed(Progress(0, None, 1 << 20, None, 0)), 1.0) == "cp: 1.00 MiB, 1.00 MiB/s"


def _streamed(state):
    states = []
    progress.of_stream(states.append)(state)
    return states[0]


def test_the_bar_of_one_file_shows_no_number_of_files():
    [line] = shown_at(120, Progress(0, 1, 1 << 20, 4 << 20, 0))
    assert "files" not in line and "1.00 MiB of 4.00 MiB" in line


def test_a_bar_without_totals_shows_what_is_done():
    [line] = shown_at(120, Progress(12, None, 77 << 20, None, 0))
    assert "12 files  77.0 MiB" in line


def test_lines_are_printed_at_intervals(capsys):
    clock = itertools.count(0, 4).__next__
    report = progress._Lines("cp", clock)
    for _ in range(8):
        report(STATE)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("cp: 21 of 300 files, 259 MiB of 2.00 GiB, ")
