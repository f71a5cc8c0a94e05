"""What the benchmarks share as programs: options, what is printed first and last, and the file of the results."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from benchmarks import report
from benchmarks.report import Verdict

_Case = TypeVar("_Case")


class Program:
    """A benchmark, whose first line of documentation is its question.

    Args:
        doc: The documentation of its module.
        rounds: Rounds of each case without `--rounds`.
        quick: What `--quick` does, with the number of rounds then; None if there is no such option.
    """

    def __init__(self, doc: str | None, rounds: int, quick: tuple[str, int] | None = None) -> None:
        self._question = (doc or "").splitlines()[0]
        self._rounds, self._quick_rounds = rounds, rounds if quick is None else quick[1]
        self.parser = argparse.ArgumentParser(description=self._question)
        if quick is not None:
            self.parser.add_argument("--quick", action="store_true", help=f"{quick[0]}: not for publication")
        default = f"default {rounds}" + (f", with --quick {quick[1]}" if quick is not None else "")
        self.parser.add_argument("--rounds", type=int, help=f"rounds of each case ({default})")
        self.parser.add_argument("--without", action="append", default=[], help="leave a client out; may be repeated")

    def has_cases(self) -> "Program":
        """Adds `--only`, for `selected`."""
        help_text = "only cases whose label has these words; may be repeated"
        self.parser.add_argument("--only", action="append", default=[], help=help_text)
        return self

    def start(self) -> argparse.Namespace:
        """Reads the options, and prints the machine and its versions."""
        given = self.parser.parse_args()
        given.rounds = given.rounds or (self._quick_rounds if getattr(given, "quick", False) else self._rounds)
        self._given, self.about = given, report.machine()
        print(*(f"{name}: {value}" for name, value in self.about.items()), "", sep="\n", flush=True)
        return given

    def selected(self, cases: Sequence[_Case], label: Callable[[_Case], str], words: Sequence[str] = ()) -> list[_Case]:
        """Returns the cases whose label has one of the words of `--only`, or without these of `words`; all if none."""
        words = self._given.only or words
        return [case for case in cases if not words or any(word in label(case) for word in words)]

    def finish(self, name: str, verdicts: Sequence[Verdict], content: dict[str, Any], *, part: bool = False) -> None:
        """Prints the verdicts and writes the results.

        Args:
            name: Of the file.
            verdicts: The targets.
            content: The other results.
            part: Whether less was measured than the benchmark has, for other reasons than these options.
        """
        if verdicts:
            print("against the targets", *(f"  {verdict.text()}" for verdict in verdicts), "", sep="\n")
        given = self._given
        part = part or bool(given.without or getattr(given, "only", [])) or given.rounds < min(self._rounds, 3)
        kind = "-quick" if getattr(given, "quick", False) else "-part" if part else ""
        content = {**content, "targets": [verdict.fields() for verdict in verdicts]}
        print(report.write(f"{name}{kind}", self._question, self.about, content))
