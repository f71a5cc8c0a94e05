"""Does every operation end with the right bytes or a typed error, whatever the server does, and how much later?

    python benchmarks/faults.py                            # the table and the mixed runs, some minutes
    python benchmarks/faults.py --only stall --only DCP    # rows and columns whose names have one of these words
    python benchmarks/faults.py --skip table               # the mixed runs alone
    python benchmarks/faults.py --without "200 B/s"        # neither in the table nor in the mixed runs

The server is the strict one of the tests, under faults by script. Each cell is a process of its own with a deadline. In
the first table a fault meets one request in five, drawn by --seed, in the second every request. A cell shows how the
operation ended, and after how many seconds: `ok`; the class of torchobj's error, without `Error`; `WRONG BYTES` where
what it read or what a write left behind is wrong; `HANG` after the deadline; `UNTYPED` for an error that is not one of
torchobj's; `DIED`. Then many objects are read while 5 % of all requests meet a fault, the kinds drawn uniformly: that
must take at most 3x as long as without faults, plus two of the timeouts that end a stall for each kind of stall.

Ends with 1 where bytes are wrong, a cell hangs or fails in another way than by a typed error, or a bound is exceeded.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import fault_cells, report
from benchmarks.fault_cells import Cell, Outcome
from benchmarks.fault_kinds import Kind, kinds, rules
from benchmarks.fault_operations import OPERATIONS, Place, attempt, prepare
from tests.servers import launch
from torchobj import S3Options, StoreConfig

_MIB = 1 << 20
#: Servers, and so cells at a time: most of a cell's time is spent waiting.
_SERVERS = 4
_LIMIT_S, _MIXED_LIMIT_S = 40.0, 300.0
_SHARE, _MIXED_SHARE = 0.2, 0.05
_CLEAN = "no fault"
#: Few objects in a cell of the table: it has hundreds of cells.
_OBJECTS = 96
_TIMES_CLEAN, _TIMEOUTS = 3.0, 2.0
_MIXED = ("get_many", "loader map", "loader iter")
_ROUNDS = 3

#: Short, so that stalls take seconds; and the smallest parts that S3 allows.
_SETTINGS: dict[str, Any] = {
    "part_bytes": 5 * _MIB,
    "whole_below_bytes": 5 * _MIB,
    "connect_timeout_s": 1.0,
    "first_byte_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
    "retry_timeout_s": 20.0,
}
_EVERY_REQUEST = _SETTINGS | {"max_attempts": 3, "retry_timeout_s": 3.0}
_MIXED_SETTINGS: dict[str, Any] = {"first_byte_timeout_s": 2.0, "idle_timeout_s": 2.0, "retry_timeout_s": 60.0}

Work = Callable[[Place], dict[str, Any]]


def _work(name: str, folder: str, settings: dict[str, Any], script: Callable[[Place], Sequence[Any]]) -> Work:
    """What a cell does, once it has a server."""

    def work(place: Place) -> dict[str, Any]:
        config = dataclasses.replace(place.config, **settings)
        return attempt(OPERATIONS[name], dataclasses.replace(place, config=config, folder=folder), script(place))

    return work


def _no_faults(_: Place) -> Sequence[Any]:
    return ()


@contextlib.contextmanager
def _places(count: int, objects: int) -> Iterator[list[Place]]:
    """Servers with the objects that are read."""
    with contextlib.ExitStack() as stack:
        places = []
        for _ in range(count):
            server = stack.enter_context(launch.start("strict"))
            assert server.control is not None, "the strict server has one"
            config = StoreConfig(s3=S3Options(endpoint_url=server.endpoint, region=server.region))
            places.append(Place(server.endpoint, server.control, config, objects))
            os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        cells = [Cell("", str(number), _prepared) for number in range(count)]
        for cell, outcome in fault_cells.run(cells, places, _MIXED_LIMIT_S):
            if outcome.verdict != "ok":
                raise RuntimeError(f"server {cell.column} was not prepared: {outcome}")
        yield places


def _prepared(place: Place) -> dict[str, Any]:
    prepare(place)
    return {"verdict": "ok"}


class Table:
    """All cells of one share of requests."""

    def __init__(self, share: float, settings: dict[str, Any], seed: int) -> None:
        self._share, self._settings, self._seed = share, settings, seed
        self.outcomes: dict[tuple[str, str], Outcome] = {}

    def title(self) -> str:
        settings = ", ".join(
            f"{name}={value:g}" for name, value in self._settings.items() if not name.endswith("bytes")
        )
        which = "every request" if self._share == 1.0 else f"{self._share:.0%} of all requests"
        return f"{which} (seed {self._seed}; {settings}): how it ended, after how many seconds"

    def _script(self, number: int, place: Place) -> Sequence[Any]:
        # The kinds are made anew: a redirect names the server that a cell got.
        return list(rules(kinds(place.endpoint)[number : number + 1], self._share, self._seed))

    def run(self, wanted: Callable[[str, str], bool], places: Sequence[Place]) -> None:
        """Runs all cells that are wanted, and the operations of their columns without faults."""
        faulty = [
            Cell(
                kind.name,
                name,
                _work(name, f"{number}-{self._share:g}", self._settings, functools.partial(self._script, number)),
            )
            for number, kind in enumerate(kinds(""))
            for name in OPERATIONS
            if wanted(kind.name, name)
        ]
        columns = {cell.column for cell in faulty}
        clean = [
            Cell(_CLEAN, name, _work(name, "clean", self._settings, _no_faults))
            for name in OPERATIONS
            if name in columns
        ]
        for cell, outcome in fault_cells.run(clean + faulty, places, _LIMIT_S):
            self.outcomes[cell.row, cell.column] = outcome
            if sys.stderr.isatty():
                print(f"\r{len(self.outcomes)} of {len(clean + faulty)} cells ", end="", file=sys.stderr)

    def text(self) -> str:
        rows, columns = (list(dict.fromkeys(key[part] for key in self.outcomes)) for part in (0, 1))
        rows.sort(key=[_CLEAN, *(kind.name for kind in kinds(""))].index)
        columns.sort(key=list(OPERATIONS).index)
        cells = {key: outcome.word() for key, outcome in self.outcomes.items()}
        return report.aligned(
            self.title(),
            [["", *columns], *([row, *(cells.get((row, column), "") for column in columns)] for row in rows)],
        )

    def failures(self) -> list[str]:
        return [
            f"{row} / {column}: {outcome.word()}\n    {outcome.text.strip().replace(chr(10), chr(10) + '    ')}"
            for (row, column), outcome in self.outcomes.items()
            if outcome.failed or (row == _CLEAN and outcome.verdict != "ok")
        ]


@dataclasses.dataclass(frozen=True)
class Mixed:
    """An operation over many objects, with all kinds of faults at once."""

    operation: str
    clean_s: float
    outcome: Outcome
    bound_s: float
    seed: int

    @property
    def kept(self) -> bool:
        return self.outcome.verdict == "ok" and self.outcome.took_s <= self.bound_s

    def row(self) -> list[str]:
        ratio = f"{self.outcome.took_s / self.clean_s:.1f}x"
        word = "kept" if self.kept else "NOT KEPT"
        return [
            self.operation,
            str(self.seed),
            f"{self.clean_s:.1f}",
            self.outcome.word(),
            ratio,
            f"{self.bound_s:.1f}",
            word,
        ]


def _stalls(chosen: Sequence[Kind]) -> dict[str, float]:
    """The kinds of stalls, and the timeout that ends each."""
    return {kind.name: _MIXED_SETTINGS[kind.stall] for kind in chosen if kind.stall}


def _drawn(endpoint: str, without: Sequence[str]) -> list[Kind]:
    """The kinds of the mixed runs: after each of them the same request may succeed."""
    return [kind for kind in kinds(endpoint) if kind.transient and kind.name not in without]


def _mixed(place: Place, seed: int, without: Sequence[str]) -> Iterator[Mixed]:
    """Runs each operation without faults and with, in turn."""
    chosen = _drawn(place.endpoint, without)
    stalls = sum(_stalls(chosen).values())

    def once(name: str, script: Sequence[Any]) -> Outcome:
        cell = Cell("mixed", name, _work(name, "mixed", _MIXED_SETTINGS, lambda _: script))
        return next(fault_cells.run([cell], [place], _MIXED_LIMIT_S))[1]

    for name in _MIXED:
        clean = [once(name, ()) for _ in range(_ROUNDS)]
        if any(outcome.verdict != "ok" for outcome in clean):
            raise RuntimeError(f"{name} fails without faults: {clean}")
        clean_s = statistics.median(outcome.took_s for outcome in clean)
        bound_s = _TIMES_CLEAN * clean_s + _TIMEOUTS * stalls
        for drawn in range(seed, seed + _ROUNDS):
            outcome = once(name, list(rules(chosen, _MIXED_SHARE, drawn)))
            yield Mixed(name, clean_s, outcome, bound_s, drawn)


def mixed_text(runs: Sequence[Mixed], objects: int, without: Sequence[str]) -> str:
    chosen = _drawn("", without)
    ends = ", ".join(f"{name}: {timeout_s:g} s" for name, timeout_s in _stalls(chosen).items())
    settings = ", ".join(f"{name}={value:g}" for name, value in _MIXED_SETTINGS.items())
    title = (
        f"{_MIXED_SHARE:.0%} of all requests, {len(chosen)} kinds drawn uniformly, {objects} objects ({settings}).\n"
        f"Bound: {_TIMES_CLEAN:g}x the clean time + {_TIMEOUTS:g}x what ends each kind of stall ({ends})"
    )
    head = ["", "seed", "clean s", "with faults", "ratio", "bound s", ""]
    return report.aligned(title, [head, *(run.row() for run in runs)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="rows or columns whose name has this word; may be repeated")
    parser.add_argument("--without", action="append", default=[], help="leave out a kind of fault; may be repeated")
    parser.add_argument("--skip", choices=("table", "mixed"), help="leave out a part")
    parser.add_argument("--seed", type=int, default=1, help="of all drawings (default 1)")
    parser.add_argument("--objects", type=int, default=2000, help="objects of the mixed runs (default 2000)")
    return parser.parse_args()


def _wanted(words: Sequence[str] | None, without: Sequence[str], row: str, column: str) -> bool:
    """Rows named by a word, in the columns that are named; all where none is."""
    if row in without:
        return False
    columns = [word for word in words or () if any(word in name for name in OPERATIONS)]
    others = [word for word in words or () if word not in columns]
    return (not columns or any(word in column for word in columns)) and (
        not others or any(word in row for word in others)
    )


def main() -> int:
    given = arguments()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    about = report.machine()
    print(*(f"{name}: {value}" for name, value in about.items()), "", sep="\n", flush=True)
    began_s, failures = time.monotonic(), []
    content: dict[str, Any] = {}
    if given.skip != "table":
        with _places(_SERVERS, _OBJECTS) as places:
            for share, settings in ((_SHARE, _SETTINGS), (1.0, _EVERY_REQUEST)):
                table = Table(share, settings, given.seed)
                table.run(functools.partial(_wanted, given.only, given.without), places)
                print(table.text(), "", sep="\n", flush=True)
                failures += table.failures()
                content[f"{share:g}"] = {
                    " / ".join(key): dataclasses.asdict(one) for key, one in table.outcomes.items()
                }
    if given.skip != "mixed":
        with _places(1, given.objects) as places:
            runs = list(_mixed(places[0], given.seed, given.without))
        print(mixed_text(runs, given.objects, given.without), "", sep="\n", flush=True)
        failures += [f"mixed {run.row()}\n    {run.outcome.text}" for run in runs if not run.kept]
        content["mixed"] = [dataclasses.asdict(run) for run in runs]
    print(*failures, f"{len(failures)} failures in {time.monotonic() - began_s:.0f} s", sep="\n")
    print(report.write("faults", (__doc__ or "").splitlines()[0], about, content))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
