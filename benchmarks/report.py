"""Turns measurements into a table, ratios and a JSON file that describes the machine. Measures nothing."""

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.objects import MIB, size_text
from benchmarks.measure import Measured

OURS = "torchobj"
LIMIT = "bare limit"
_REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "boto3",
    "botocore",
    "gcsfs",
    "google-cloud-storage",
    "litdata",
    "multi-storage-client",
    "obstore",
    "pyarrow",
    "s3fs",
    "s3torchconnector",
    "s3torchconnectorclient",
    "s3transfer",
    "torch",
    "numpy",
)


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


@dataclass(frozen=True)
class Verdict:
    """A target and the measured value."""

    target: str
    measured: str
    met: bool
    beyond: bool = False
    """Beyond the targets: a rival configured better than its documentation shows."""

    def text(self) -> str:
        word = "met" if self.met else "NOT MET"
        return f"{word:8}{self.target}: {self.measured}{' (beyond the targets)' if self.beyond else ''}"

    def fields(self) -> dict[str, Any]:
        return {"target": self.target, "measured": self.measured, "met": self.met, "beyond": self.beyond}


class Rounds:
    """All rounds of one case, by client: round `i` of each client ran next to round `i` of the others."""

    label: str
    runs: dict[str, list[Any]]

    def spread(self, figure: Callable[[Any], float], client: str) -> Spread:
        return Spread.of([figure(run) for run in self.runs[client]])

    def ratio(self, figure: Callable[[Any], float], other: str, client: str = OURS) -> Spread:
        """Returns our figure divided by that of `other`, per round, so that the machine's state cancels out."""
        # A slow rival may have fewer rounds.
        pairs = zip(self.runs[client], self.runs[other], strict=False)
        return Spread.of([figure(ours) / figure(theirs) for ours, theirs in pairs])


@dataclass
class Outcome(Rounds):
    """All rounds of reading objects, many per call or one."""

    label: str
    size: int
    batch: int
    """Objects per call; 0 if a call reads one object."""
    runs: dict[str, list[Measured]] = field(default_factory=dict)

    def rate(self, run: Measured) -> float:
        """Objects per second; for one object MB/s of the median call."""
        return run.objects_per_s if self.batch else self.size / statistics.median(run.call_s) / 1e6

    def cpu_us(self, run: Measured) -> float:
        """CPU microseconds per object; for one object those of the median call."""
        return run.cpu_us if self.batch else statistics.median(run.call_cpu_s) * 1e6

    def grown_mib(self, client: str) -> float | None:
        grown = [run.grown_bytes / MIB for run in self.runs[client] if run.grown_bytes is not None]
        return statistics.median(grown) if grown else None

    def best_rival(self) -> str:
        """The client, other than ours and the limit, with the highest rate."""
        rivals = [name for name in self.runs if name not in (OURS, LIMIT)]
        return max(rivals, key=lambda name: self.spread(self.rate, name).median)


def aligned(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of equal length in columns under a title."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def table(outcome: Outcome) -> str:
    """Returns the lines of one case."""
    unit = "objects/s" if outcome.batch else "MB/s"
    rounds = max(len(runs) for runs in outcome.runs.values())
    head = ["", unit, "CPU µs an object", "RSS +MiB", "our CPU is", "our rate is"]
    rows = [head]
    for client in outcome.runs:
        rate = outcome.spread(outcome.rate, client)
        grown = outcome.grown_mib(client)
        row = [
            client,
            rate.text(0),
            outcome.spread(outcome.cpu_us, client).text(1 if outcome.batch else 0),
            "" if grown is None else f"{grown:.0f}",
        ]
        if client != OURS and OURS in outcome.runs:
            row += [f"{outcome.ratio(figure, client).text(2)}x" for figure in (outcome.cpu_us, outcome.rate)]
        rows.append(row + [""] * (len(head) - len(row)))
    return aligned(f"{outcome.label}: median (min-max) of {rounds} rounds", rows)


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


def write(name: str, question: str, about: dict[str, Any], content: dict[str, Any]) -> Path:
    """Writes `benchmarks/results/NAME.json` and returns its path."""
    path = _REPOSITORY / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"benchmark": name, "question": question, **about, **content}, indent=1) + "\n")
    return path


def fields(outcome: Outcome) -> dict[str, Any]:
    """Returns a case as it is written to the file."""
    clients = {
        client: {
            "rate": asdict(outcome.spread(outcome.rate, client)),
            "cpu_us": asdict(outcome.spread(outcome.cpu_us, client)),
            "grown_mib": outcome.grown_mib(client),
            "rounds": [asdict(run) for run in runs],
        }
        for client, runs in outcome.runs.items()
    }
    unit = "objects/s" if outcome.batch else "MB/s"
    case = {"label": outcome.label, "object": size_text(outcome.size), "batch": outcome.batch, "rate_unit": unit}
    return case | {"clients": clients}
