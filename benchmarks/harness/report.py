"""Compares the measurements of several rounds, and shows them in a table. Measures nothing."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lab.progress import progress

OURS = "torchobj"
LIMIT = "bare limit"

Cell = Callable[[str], str]
"""Returns the text of a column for a client."""


@dataclass(frozen=True)
class Spread:
    """A figure of several rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        return cls(statistics.median(figures), min(figures), max(figures))

    def text(self, digits: int) -> str:
        """Returns `12.3 (11.9-14.0)`, with thousands separators."""
        figures = (self.median, self.least, self.most)
        median, least, most = (f"{figure:,.{digits}f}".replace(",", " ") for figure in figures)
        return f"{median} ({least}-{most})"


@dataclass
class Rounds:
    """All rounds of one case, by client: round `i` of each client ran next to round `i` of the others.

    A figure is the name of an attribute of a measurement.
    """

    label: str
    runs: dict[str, list[Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Clients that were left out, and why."""

    def take(
        self, clients: Sequence[str], rounds: int, run: Callable[[str], Any], fewer: Mapping[str, int] | None = None
    ) -> None:
        """Runs all rounds: A B C, B C A, C A B, since the first process after another client's large object pays for
        memory that the machine took back. A client that fails is left out of later rounds.

        Args:
            clients: Their names.
            rounds: Number of rounds.
            run: Takes one measurement; a RuntimeError is a failure.
            fewer: The number of rounds of clients that take minutes, or that no target depends on.
        """
        for number in range(rounds):
            first = number % max(1, len(clients))
            for client in [*clients[first:], *clients[:first]]:
                if client in self.failed or number >= (fewer or {}).get(client, rounds):
                    continue
                with progress(f"{self.label}: {client}, round {number + 1} of {rounds}"):
                    try:
                        self.runs.setdefault(client, []).append(run(client))
                    except RuntimeError as error:
                        self.failed[client] = str(error)
                        del self.runs[client]

    def has(self, *clients: str) -> bool:
        """Whether all of these clients were measured."""
        return set(clients) <= self.runs.keys()

    def figures(self, figure: str, client: str) -> list[float]:
        """A figure of each round, where it is known."""
        found = (getattr(run, figure) for run in self.runs[client])
        return [each for each in found if each is not None]

    def spread(self, figure: str, client: str) -> Spread:
        return Spread.of(self.figures(figure, client))

    def ratio(self, figure: str, other: str, client: str = OURS) -> Spread:
        """Returns our figure divided by that of `other`, per round, so that the machine's state cancels out."""
        # A slow rival may have fewer rounds.
        pairs = zip(self.figures(figure, client), self.figures(figure, other), strict=False)
        return Spread.of([ours / theirs for ours, theirs in pairs])

    def difference(self, figure: str, other: str, client: str = OURS) -> Spread:
        """Returns our figure minus that of `other`, per round."""
        pairs = zip(self.figures(figure, client), self.figures(figure, other), strict=True)
        return Spread.of([ours - theirs for ours, theirs in pairs])

    def most(self, figure: str, client: str = OURS) -> float | None:
        """The maximum of a figure; None if it was not measured."""
        return max(self.figures(figure, client), default=None) if client in self.runs else None

    def count(self, client: str) -> str:
        """A column: the number of rounds."""
        return str(len(self.runs[client]))

    def spreads(self, figure: str, digits: int, unit: str = "") -> Cell:
        """A column: the median of a figure, with minimum and maximum."""
        return lambda client: (
            f"{self.spread(figure, client).text(digits)}{unit}" if self.figures(figure, client) else ""
        )

    def medians(self, figure: str, digits: int, sign: str = "") -> Cell:
        """A column: the median of a figure."""

        def cell(client: str) -> str:
            figures = self.figures(figure, client)
            return f"{statistics.median(figures):{sign}.{digits}f}" if figures else ""

        return cell

    def mosts(self, figure: str, digits: int) -> Cell:
        """A column: the maximum of a figure."""
        return lambda client: "" if (most := self.most(figure, client)) is None else f"{most:.{digits}f}"

    def times(self, figure: str, digits: int = 2, ours: str = OURS) -> Cell:
        """A column: the figure of `ours` as a multiple of that of each other client."""

        def cell(client: str) -> str:
            is_compared = client != ours and ours in self.runs
            return f"{self.ratio(figure, client, ours).text(digits)}x" if is_compared else ""

        return cell

    def table(self, what: str, columns: Mapping[str, Cell]) -> str:
        """Returns the lines of the case: a row of each client, without empty columns, and why others were left out."""
        rounds = max(map(len, self.runs.values()), default=0)
        title = f"{self.label}: {what.format(rounds=rounds) if rounds else 'not measured'}"
        cells = {name: list(map(cell, self.runs)) for name, cell in columns.items()}
        shown = [["", *self.runs], *([name, *column] for name, column in cells.items() if any(column))]
        rows = list(zip(*shown, strict=True))
        left_out = [f"  {client} is left out: {_last_error(text)}" for client, text in self.failed.items()]
        return "\n".join([aligned(title, rows), *left_out])

    def timed_table(
        self, figures: Mapping[str, tuple[str, int]], ours: str = OURS, more: Mapping[str, Cell] | None = None
    ) -> str:
        """Returns the lines of a case of `measure.Timed`.

        Args:
            figures: The attribute and number of digits of each figure; ratios of all of them are shown.
            ours: The client whose figures are divided by those of the others.
            more: Other columns.
        """
        columns = {"rounds": self.count}
        columns |= {name: self.spreads(figure, digits) for name, (figure, digits) in figures.items()}
        columns["RSS +MiB"] = self.mosts("grown_mib", 0)
        columns |= {f"our {name}": self.times(figure, 3, ours) for name, (figure, _) in figures.items()}
        return self.table("median (min-max) of the rounds, memory the most of them", columns | dict(more or {}))


def _last_error(text: str) -> str:
    """Returns the first line of the last exception in a traceback."""
    lines = text.strip().splitlines()
    ends = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith(" ")]
    scheme = " (BadScheme: it takes no plain HTTP)" if "BadScheme" in text else ""
    return (ends[-1] if ends else lines[-1]) + scheme


def aligned(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of equal length in columns under a title."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])
