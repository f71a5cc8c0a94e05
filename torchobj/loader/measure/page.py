"""Writes the report of a run to a file: a self-contained HTML page, or a picture. Measures nothing."""

import errno
import html
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path

from torchobj import _torchobj
from torchobj.config import StoreConfig, resolve
from torchobj.exceptions import ConfigError
from torchobj.loader.measure.timeline import Chart
from torchobj.store.file_objects import NO_ATTRIBUTES

#: Size of a chart in pixels, and its margins for the labels of the axes.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 190, 52, 24, 10

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --back: #ffffff; --text: #1f2328; --faint: #d0d7de;
--first: #0969da; --second: #bc4c00; }}
@media (prefers-color-scheme: dark) {{
:root {{ --back: #0d1117; --text: #e6edf3; --faint: #30363d; --first: #58a6ff; --second: #f0883e; }}
}}
body {{ background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
max-width: 1120px; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1rem; margin: 0; }}
p {{ margin: 0.2rem 0; }}
main {{ display: grid; gap: 1.5rem; margin-top: 1.5rem;
grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }}
svg {{ width: 100%; height: auto; }} svg text {{ fill: var(--text); font-size: 12px; }}
.axis {{ stroke: var(--faint); }} .line {{ fill: none; stroke-width: 2; }}
.line0 {{ stroke: var(--first); }} .line1 {{ stroke: var(--second); stroke-dasharray: 5 3; }}
.name0 {{ color: var(--first); }} .name1 {{ color: var(--second); }} .name {{ margin-right: 1rem; }}
</style>
<h1>{title}</h1>
{report}
<main>
{charts}
</main>
</html>
"""


def write(path: "str | os.PathLike[str]", title: str, report: str, charts: list[Chart]) -> None:
    """Writes the page or picture of a run. An existing file is replaced as a whole, or not at all, and keeps its
    permissions; a device or FIFO is written.

    Args:
        path: A local file: `.html`, or `.png`, which needs matplotlib.
        title: What was run.
        report: The text of the report.
        charts: The charts.

    Raises:
        ConfigError: Another ending, or matplotlib is not installed.
        OSError: The file cannot be written.
    """
    target = Path(path)
    if target.suffix == ".html":
        content = page(title, report, charts).encode()
    elif target.suffix == ".png":
        content = _picture(target, report, charts)
    else:
        raise ConfigError(f"path={str(target)!r}: must end in .html or .png")
    folder = target.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
    store = _torchobj.NativeStore("file", str(folder), resolve("file:///", StoreConfig()))
    store.put(target.name, content, NO_ATTRIBUTES, overwrite=True)


def page(title: str, report: str, charts: list[Chart]) -> str:
    """The HTML of a run, which loads nothing else."""
    return _PAGE.format(
        title=html.escape(title),
        report="\n".join(f"<p>{html.escape(line)}</p>" for line in report.splitlines()),
        charts="\n".join(map(_section, charts)),
    )


def _section(chart: Chart) -> str:
    names = "".join(
        f'<span class="name name{number}">{html.escape(name)}</span>' for number, name in enumerate(chart.lines)
    )
    unit = f" ({html.escape(chart.unit)})" if chart.unit else ""
    return f"<section><h2>{html.escape(chart.title)}{unit}</h2>\n<div>{names}</div>\n{_svg(chart)}</section>"


def _svg(chart: Chart) -> str:
    values = [value for line in chart.lines.values() for value in line if value is not None]
    if not values:
        return "<p>Nothing was measured.</p>"
    top, end_s = _ceiling(max(values)), max(chart.seconds)
    right, base = _WIDTH - 10, _HEIGHT - _BOTTOM
    lines = [
        f'<polyline class="line line{number}" points="{points}"/>'
        for number, line in enumerate(chart.lines.values())
        for points in _polylines(chart.seconds, line, end_s, top)
    ]
    labels = [
        f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{y:.0f}" y2="{y:.0f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{value:g}</text>'
        for value, y in ((0, base), (top / 2, (base + _TOP) / 2), (top, _TOP))
    ]
    times = (
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">0 s</text>'
        f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">{end_s:.1f} s</text>'
    )
    label = html.escape(chart.title)
    drawn = "".join([*labels, times, *lines])
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{drawn}</svg>'


def _polylines(seconds: list[float], line: list[float | None], end_s: float, top: float) -> Iterator[str]:
    """The points of a line, in pieces between values that are missing."""
    right, base = _WIDTH - 10, _HEIGHT - _BOTTOM
    points: list[str] = []
    for second, value in zip([*seconds, end_s], [*line, None], strict=True):
        if value is not None:
            x, y = _LEFT + (right - _LEFT) * second / end_s, base - (base - _TOP) * value / top
            points.append(f"{x:.1f},{y:.1f}")
        elif points:
            yield " ".join(points)
            points = []


def _ceiling(value: float) -> float:
    """The next number of 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def _picture(target: Path, report: str, charts: list[Chart]) -> bytes:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  not a dependency
    except ImportError as error:
        raise ConfigError(
            f"path={str(target)!r}: needs matplotlib ({error}): pip install matplotlib, or use .html"
        ) from error
    figure = Figure(figsize=(11, 10), layout="constrained")
    figure.suptitle(report, fontsize=9, ha="left", x=0.02)
    for chart, axes in zip(charts, figure.subplots(3, 2).flat, strict=True):
        for name, line in chart.lines.items():
            axes.plot(chart.seconds, [math.nan if value is None else value for value in line], label=name)
        axes.set(title=chart.title, xlabel="s", ylabel=chart.unit, ylim=(0, None))
        axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()
