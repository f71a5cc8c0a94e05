"""Writes the tables of metrics.md from the table of metrics: `make metrics`."""

import re
from pathlib import Path

from torchobj.telemetry.table import OF_LOADER, OF_PROCESS, with_units

PAGE = Path(__file__).with_name("metrics.md")
#: Units that are not the plural of the noun in braces.
UNITS = {"By": "B", "By/s": "B/s", "s": "s", "1": "0 to 1", "{sample}/s": "samples/s"}


def unit_of(metric):
    """The unit in words: `objects` of `{object}`."""
    noun = metric.unit.strip("{}")
    return UNITS.get(metric.unit) or noun + ("es" if noun.endswith(("ch", "ss")) else "s")


def text_of(metric):
    """The text, with the names of metrics in place of fields of `LoaderStats`."""
    return re.sub(r"`(\w+)`", lambda name: f"`{with_units(name[1])}`", metric.text)


def of_loader():
    """Yields the lines of the table of a loader."""
    yield from ("| name | unit | meaning |", "|---|---|---|")
    for metric in OF_LOADER:
        yield f"| `torchobj.loader.{with_units(metric.key)}` | {unit_of(metric)} | {text_of(metric)} |"


def of_process():
    """Yields the lines of the table of a process."""
    yield from ("| name | unit | kind | meaning |", "|---|---|---|---|")
    for metric in OF_PROCESS:
        name = metric.name + "".join(f".<{attribute}>" for attribute in metric.attributes)
        yield f"| `{name}` | {unit_of(metric)} | {metric.kind} | {text_of(metric)} |"


def with_tables(page):
    """The page with its tables as they are now."""
    for heading, lines in (("Of a loader", of_loader()), ("Of a process", of_process())):
        before, found, after = re.split(rf"(?<=\n)(## {heading}\n.*?\n)(?=\| name )", page, maxsplit=1, flags=re.DOTALL)
        page = before + found + "\n".join(lines) + "\n" + after[after.index("\n\n") + 1 :]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
