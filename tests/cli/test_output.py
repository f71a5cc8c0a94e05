"""How the command line shows progress, sizes and errors, and parses its arguments."""

import io
import itertools
import logging
import re

import pytest
from rich.console import Console

from torchobj import exceptions
from torchobj.cli import progress
from torchobj.cli.bars import bars, updates
from torchobj.cli.options import CommandError, described, start_logging
from torchobj.cli.output import age_s, duration, escaped, human_size
from torchobj.cli.targets import parse_target
from torchobj.files import Progress

STATE = Progress(21, 300, 259 << 20, 2 << 30, 1)


def running(*states, width=120):
    """A bar after these states, at intervals of a second."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    shown = bars(console)
    shown.get_time = itertools.count().__next__
    update = updates(shown, "cp")
    for state in states:
        update(state)
    return shown


def frame(shown):
    """The lines of the bar now."""
    shown.console.file = io.StringIO()
    shown.console.print(shown.get_renderable())
    return shown.console.file.getvalue().splitlines()


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
    shown = running(Progress(0, 300, 13 << 20, 2 << 30, 0), STATE)
    assert "━" in frame(shown)[0]
    shown.console.width = 60
    [line] = frame(shown)
    assert "━" not in line and line.rstrip().endswith(" left")


def test_a_log_line_is_printed_above_the_bar():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    start_logging("warning")
    with bars(console) as shown:
        updates(shown, "cp")(STATE)
        logging.getLogger("torchobj").warning("attempt 3 failed")
        shown.refresh()
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


@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b2J", "\r", "\u202e", "\u2066", "\ud800", "\x00"])
def test_characters_that_control_a_terminal_are_escaped(text):
    assert escaped(text).isascii() and escaped(text).isprintable()
    assert escaped(f"é {text} 日本").startswith("é \\") and escaped(f"é {text} 日本").endswith(" 日本")


def test_sizes_have_three_digits():
    sizes = [0, 999, 1000, 1023, 1024, 10_239, 10_240, 102_349, 1 << 20, (1 << 30) - 1, 1 << 62]
    assert [human_size(size) for size in sizes] == [
        "0 B", "999 B", "0.98 KiB", "1.00 KiB", "1.00 KiB", "10.0 KiB", "10.0 KiB", "100 KiB", "1.00 MiB", "1.00 GiB",
        "4.00 EiB",
    ]  # fmt: skip


def test_ages_have_a_unit():
    assert [age_s(text) for text in ("90", "2m", "1.5h", "7d", "1w")] == [90, 120, 5400, 604_800, 604_800]
    for text in ("", "h", "-1h", "1y", "1h30m"):
        with pytest.raises(ValueError, match="12h"):
            age_s(text)


def test_durations_grow_with_their_unit():
    assert [duration(seconds) for seconds in (0.0004, 0.5, 59.94, 61, 90_000)] == [
        "0.4 ms",
        "500.0 ms",
        "59.9 s",
        "0:01:01",
        "1 day, 1:00:00",
    ]


def test_errors_are_one_line_with_the_next_step():
    error = exceptions.CredentialsError("get s3://b/k: no credentials\nfound")
    assert described(error).startswith("get s3://b/k: no credentials found; `torchobj doctor URL`")
    error.url = "s3://b/k"
    assert "; `torchobj doctor s3://b/k` shows" in described(error)
    error = exceptions.CredentialsError("no credentials; S3Options(anonymous=True) for a public bucket")
    assert described(error).startswith("no credentials; --no-sign-request for a public bucket; ")
    denied = exceptions.AccessDeniedError("get file:///d/x: permission denied")
    denied.url = "file:///d/x"
    assert described(denied) == f"{denied}; check the permissions of the file and of the folders above it"
    missing = exceptions.ObjectNotFoundError("get file:///d/x: no such file")
    missing.url = "file:///d/x"
    assert described(missing) == str(missing)
    assert described(CommandError("s3://b/\x1b[31m: no")) == "s3://b/\\x1b[31m: no"
    assert described(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"
    assert described(ZeroDivisionError("division")).startswith("unexpected ZeroDivisionError: division; --log-level")


@pytest.mark.parametrize(
    ("text", "key", "glob"),
    [
        ("s3://b/x/img*.jpg", "x/img", "*.jpg"),
        ("s3://b/x/**/a", "x/", "**/a"),
        ("s3://b/x/img**", "x/", "img**"),
        ("s3://b/{a,b}/c", "", "{a,b}/c"),
        ("s3://b/x", "x", None),
    ],
)
def test_a_glob_begins_at_its_first_wildcard(text, key, glob):
    target = parse_target(text)
    assert (target.url.key, target.glob) == (key, glob)
    if glob is not None:
        folder, below = target.split_glob()
        assert (
            folder.url.key.endswith(("/", ""))
            and folder.url.key + below == key + glob
            and "/" not in folder.url.key[:-1]
        )


def test_a_local_path_is_absolute_and_keeps_its_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_target("x/../y/").url.key == f"{tmp_path}/y/".lstrip("/")
    assert parse_target("y").path == tmp_path / "y"
    (tmp_path / "a[1]").touch()
    assert parse_target("a[1]").glob is None


def test_an_empty_path_is_refused():
    with pytest.raises(CommandError, match="names nothing"):
        parse_target("")
