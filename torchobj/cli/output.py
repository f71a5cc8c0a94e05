"""Prints rows and JSON lines, and formats sizes, times and keys for them."""

import json
import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from typing import Any, TextIO

from torchobj.store.object_info import ObjectInfo
from torchobj.store.transfers import Progress

#: Control characters, also those that change the direction of text, line separators and lone surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d|w)?")
_AGE_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def escaped(text: str) -> str:
    r"""Replaces control characters, so that a key cannot send commands to a terminal.

    Example:
        >>> print(escaped("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(text: str) -> str:
    """A key or URL for the output: escaped on a terminal, as it is in a file or pipe."""
    return escaped(text) if sys.stdout.isatty() else text


def command(*words: str) -> str:
    """A command of this program to copy into a shell: a key in it stays one word.

    Example:
        >>> print(command("ls", "s3://bucket/$(id)"))
        `torchobj ls 's3://bucket/$(id)'`
    """
    return f"`{shlex.join(['torchobj', *words])}`"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "file"), counted(0, "file")
        ('1 file', '0 files')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def human_size(size: int | None, *, exact: bool = False) -> str:
    """A size in bytes: with a binary unit and three digits, or `exact`, without a unit.

    Example:
        >>> human_size(512), human_size(1536), human_size(20 << 20), human_size(None)
        ('512 B', '1.50 KiB', '20.0 MiB', '?')
    """
    if size is None or exact:
        return "?" if size is None else str(size)
    value, unit = float(size), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def time_shown(time: datetime | None) -> str:
    """A time in UTC, to the second."""
    return "-" if time is None else time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(seconds: float) -> str:
    """A duration for people.

    Example:
        >>> duration(0.0123), duration(3.21), duration(3725)
        ('12.3 ms', '3.2 s', '1:02:05')
    """
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def rate_shown(size: int, elapsed_s: float) -> str:
    """Bytes that were transferred, the time, and the rate.

    Example:
        >>> rate_shown(1 << 20, 2.0)
        '1.00 MiB, in 2.0 s, 512 KiB/s'
    """
    rate = human_size(int(size / elapsed_s)) if elapsed_s > 0 else "?"
    return f"{human_size(size)}, in {duration(elapsed_s)}, {rate}/s"


def counts(state: Progress, of: str, *, totals: bool = True) -> list[str]:
    """Files and bytes of a transfer; no files if there is only one.

    Args:
        state: The progress.
        of: Stands between the files that are done and all.
        totals: Whether all bytes are named, if they are known.

    Example:
        >>> counts(Progress(3, 4, 1 << 20, 4 << 20, 1), "/")
        ['3/4 files', '1.00 MiB of 4.00 MiB']
    """
    files = state.files_done if state.files_total is None else f"{state.files_done}{of}{state.files_total}"
    total = f" of {human_size(state.bytes_total)}" if totals and state.bytes_total is not None else ""
    size = f"{human_size(state.bytes_done)}{total}"
    return [size] if state.files_total == 1 else [f"{files} files", size]


def age_s(text: str) -> float:
    """Seconds of an age such as `90`, `30m`, `12h` or `7d`.

    Raises:
        ValueError: It has another form.

    Example:
        >>> age_s("90"), age_s("1.5h")
        (90.0, 5400.0)
    """
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r}: must be a number and s, m, h, d or w, such as 12h")
    return float(found[1]) * _AGE_UNITS[found[2] or "s"]


def fields_of(info: ObjectInfo, url: str) -> dict[str, Any]:
    """The fields of an object for JSON, without those that are unknown."""
    fields: dict[str, Any] = {"url": url, "key": info.key, "size": info.size, "version": info.version}
    fields["last_modified"] = None if info.last_modified is None else info.last_modified.isoformat()
    names = ("storage_class", "content_type", "content_encoding", "content_disposition", "content_language")
    fields |= {name: getattr(info, name) for name in (*names, "cache_control")}
    fields["metadata"] = dict(info.metadata) or None
    return {name: value for name, value in fields.items() if value is not None}


def print_json(value: Any, file: TextIO | None = None) -> None:
    """Prints a value as one line of JSON. Control characters and characters above ASCII are escaped."""
    print_line(json.dumps(value, default=str), file)


def print_line(text: str, file: TextIO | None = None) -> None:
    """Prints a line. `click.echo` would remove ANSI sequences from keys, and flush after each line."""
    (file or sys.stdout).write(f"{text}\n")


def rows(table: list[tuple[str, str]]) -> None:
    """Prints names and values in two columns."""
    width = max((len(name) for name, _ in table), default=0)
    for name, value in table:
        print_line(f"{name:<{width}}  {value}")
