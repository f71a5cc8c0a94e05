"""Formats what `gcs.py` measures besides GETs: transfers of files, and the requests of uploads."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks import report
from benchmarks.report import OURS, Rounds

S3 = f"{OURS}, s3://"
"""Ours on the S3 paths of the same origin."""
FILE = f"{OURS}, a file"
"""Ours, which uploads a file as transfer_manager does."""


@dataclass(frozen=True)
class Moved:
    """One transfer of files. CPU time includes that of the processes that the client has started."""

    payload_bytes: int
    wall_s: float
    cpu_s: float
    kinds: dict[str, int]
    """Requests of each kind, if the origin counts them."""

    def rate(self) -> float:
        """MB per second."""
        return self.payload_bytes / self.wall_s / 1e6

    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.payload_bytes * 1e9


@dataclass
class Moves(Rounds):
    """All rounds of transferring files."""

    label: str
    runs: dict[str, list[Moved]] = field(default_factory=dict)


def requests(kinds: dict[str, int]) -> str:
    """Returns `131: 128 put, 3 compose`."""
    found = Counter(kinds)
    return f"{found.total()}: {', '.join(f'{number} {kind}' for kind, number in found.most_common())}" if kinds else ""


def moves_table(moves: Moves) -> str:
    """Returns the lines of one case, with the requests of the last round."""
    rounds = max(map(len, moves.runs.values()), default=0)
    rows = [["", "MB/s", "CPU-s per GB", "s", "our rate is", "our CPU is", "requests"]]
    for client, runs in moves.runs.items():
        row = [client, moves.spread(Moved.rate, client).text(0), moves.spread(Moved.cpu_s_per_gb, client).text(2)]
        row.append(f"{moves.spread(lambda run: run.wall_s, client).median:.2f}")
        if client != OURS and OURS in moves.runs:
            row += [f"{moves.ratio(figure, client).text(2)}x" for figure in (Moved.rate, Moved.cpu_s_per_gb)]
        else:
            row += ["", ""]
        rows.append([*row, requests(runs[-1].kinds)])
    return report.aligned(f"{moves.label}: median (min-max) of {rounds} rounds", rows)
