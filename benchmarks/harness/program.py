"""A benchmark as a program: options, what is printed first and last, and the file of the results."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.report import OURS, Cell, Rounds
from benchmarks.harness.targets import Verdict

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = (
    *("boto3", "botocore", "fastsafetensors", "flashpack", "gcsfs", "google-cloud-storage", "litdata"),
    *("multi-storage-client", "obstore", "pyarrow", "runai-model-streamer", "s3fs", "s3torchconnector"),
    *("s3torchconnectorclient", "s3transfer", "safetensors", "torch", "numpy"),
)

_Case = TypeVar("_Case")


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Describes the machine and the versions."""
    import torchobj

    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _output_of("git", "rev-parse", "HEAD"),
        "changed_since": bool(_output_of("git", "status", "--porcelain", "--", "torchobj", "rust", "benchmarks")),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torchobj": torchobj.__version__,
        "packages": {package: _version(package) for package in _PACKAGES},
    }


class Program:
    """A benchmark, whose first line of documentation is its question.

    Args:
        name: Of the file of the results.
        doc: The documentation of its module.
        rounds: Rounds of each case without `--rounds`; None if there is no such option.
        quick: What `--quick` does, with the number of rounds then; None if there is no such option.
        without: What `--without` does; "" if there is no such option.
        only: What `--only` does; "" if there is no such option.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        rounds: int | None = None,
        quick: tuple[str, int] | None = None,
        *,
        without: str = "leave a client out",
        only: str = "only cases whose label has these words",
    ) -> None:
        self.name, self._question = name, (doc or "").splitlines()[0]
        self._cases: list[dict[str, Any]] = []
        self._verdicts: list[Verdict] = []
        self._rounds, self._quick_rounds = rounds, rounds if quick is None else quick[1]
        self.parser = argparse.ArgumentParser(description=self._question)
        self.parser.set_defaults(quick=False, only=[], without=[], rounds=None)
        if quick is not None:
            self.parser.add_argument("--quick", action="store_true", help=f"{quick[0]}: not for publication")
        if rounds is not None:
            default = f"default {rounds}" + (f", with --quick {quick[1]}" if quick is not None else "")
            self.parser.add_argument("--rounds", type=int, help=f"rounds of each case ({default})")
        for option, text in (("--without", without), ("--only", only)):
            if text:
                self.parser.add_argument(option, action="append", default=[], help=f"{text}; may be repeated")

    def start(self) -> argparse.Namespace:
        """Reads the options, and prints the machine and its versions."""
        given = self.parser.parse_args()
        given.rounds = given.rounds or (self._quick_rounds if given.quick else self._rounds)
        self.given, self.about = given, machine()
        print(*(f"{name}: {value}" for name, value in self.about.items()), "", sep="\n", flush=True)
        return given

    def selected(
        self, cases: Sequence[_Case], label: Callable[[_Case], str] = str, words: Sequence[str] = ()
    ) -> list[_Case]:
        """Returns the cases whose label has one of the words of `--only`, or without these of `words`; all if none."""
        words = self.given.only or words
        return [case for case in cases if not words or any(word in label(case) for word in words)]

    def measure(
        self,
        case: Rounds,
        clients: Iterable[str],
        run: Callable[[str], Any],
        figures: Mapping[str, tuple[str, int]],
        verdicts: Callable[[Rounds], Iterable[Verdict]] = lambda _: (),
        *,
        ours: str = OURS,
        more: Mapping[str, Cell] | None = None,
        fewer: Mapping[str, int] | None = None,
    ) -> None:
        """Runs all rounds of a case of `measure.Timed`, without the clients of `--without`, and shows it.

        Args:
            case: Its rounds, which are empty.
            clients: Their names.
            run: Takes one measurement.
            figures, ours, more: As for `Rounds.timed_table`.
            verdicts: Returns the verdicts on the targets.
            fewer: As for `Rounds.take`.
        """
        chosen = [client for client in clients if client not in self.given.without]
        case.take(chosen, self.given.rounds, run, fewer)
        self.show(case, case.timed_table(figures, ours, more), verdicts(case))

    def show(self, case: Rounds, text: str, verdicts: Iterable[Verdict] = ()) -> None:
        """Prints a case, and keeps its rounds and the verdicts on its targets for `finish`."""
        print(text, "", sep="\n", flush=True)
        self._cases.append(dataclasses.asdict(case))
        self.judge(verdicts)

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """Keeps verdicts for `finish`."""
        self._verdicts += verdicts

    def finish(self, content: dict[str, Any] | None = None, *, part: bool = False) -> None:
        """Prints the verdicts and writes `benchmarks/results/NAME.json`.

        Args:
            content: The results; by default those that were shown.
            part: Whether less was measured than the benchmark has, for other reasons than these options.
        """
        if self._verdicts:
            print("against the targets", *(f"  {verdict.text()}" for verdict in self._verdicts), "", sep="\n")
        given = self.given
        part = part or bool(given.without or given.only) or (given.rounds or 3) < min(self._rounds or 3, 3)
        path = _REPOSITORY / "benchmarks" / "results"
        path.mkdir(exist_ok=True)
        path /= f"{self.name}{'-quick' if given.quick else '-part' if part else ''}.json"
        head = {"benchmark": path.stem, "question": self._question, **self.about}
        content = {"cases": self._cases} | (content or {})
        content["targets"] = [dataclasses.asdict(verdict) for verdict in self._verdicts]
        path.write_text(json.dumps({**head, **content}, indent=1) + "\n")
        print(path)
