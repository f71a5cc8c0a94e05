"""Does every operation end with the right bytes or a typed error under any server fault, and how much later?

    python benchmarks/faults.py                            # the table and the mixed runs, some minutes
    python benchmarks/faults.py --only stall --only DCP    # rows and columns whose names have one of these words
    python benchmarks/faults.py --skip table               # the mixed runs alone
    python benchmarks/faults.py --without "200 B/s"        # leave a kind out of the table and the mixed runs

The server is the strict server of the tests, with scripted faults. Each cell is its own process with a deadline. In
the first table a fault affects one request in five, drawn by --seed, in the second every request. A cell shows how the
operation ended, and after how many seconds: `ok`; the class of torchobj's error, without `Error`; `WRONG BYTES` where
what it read or wrote is wrong; `HANG` after the deadline; `UNTYPED` for an error that is not one of
torchobj's; `DIED`. Then many objects are read while 5 % of all requests have a fault, the kinds drawn uniformly: that
must take at most 3x as long as without faults, plus two of the timeouts that end a stall for each kind of stall.

Exits with 1 if bytes are wrong, a cell hangs or fails without a typed error, or a bound is exceeded.
"""

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

from benchmarks.harness import Program, fault_cells
from benchmarks.harness.fault_cells import Cell, Outcome
from benchmarks.harness.fault_kinds import Kind, kinds, rules
from benchmarks.harness.fault_operations import OPERATIONS, Location, attempt, prepare
from benchmarks.harness.report import aligned
from benchmarks.lab.objects import MIB
from tests.servers import launch
from torchobj import AdvancedOptions, S3Options, StoreConfig

#: Number of servers, and of concurrent cells: most of a cell's time is spent waiting.
_SERVERS = 4
_LIMIT_S, _MIXED_LIMIT_S = 40.0, 300.0
_SHARE, _MIXED_SHARE = 0.2, 0.05
_CLEAN = "no fault"
#: Few objects per cell: the table has hundreds of cells.
_OBJECTS = 96
_TIMES_CLEAN, _TIMEOUTS = 3.0, 2.0
_MIXED = ("get_many", "loader map", "loader iter")
_ROUNDS = 3

#: Short timeouts, so that stalls take seconds; and the smallest parts that S3 allows.
_SETTINGS: dict[str, Any] = {
    "part_bytes": 5 * MIB,
    "advanced": AdvancedOptions(whole_below_bytes=5 * MIB, connect_timeout_s=1.0),
    "first_byte_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
    "retry_timeout_s": 20.0,
}
_EVERY_REQUEST = _SETTINGS | {"max_attempts": 3, "retry_timeout_s": 3.0}
_MIXED_SETTINGS: dict[str, Any] = {"first_byte_timeout_s": 2.0, "idle_timeout_s": 2.0, "retry_timeout_s": 60.0}

Work = Callable[[Location], dict[str, Any]]


def _work(name: str, folder: str, settings: dict[str, Any], script: Callable[[Location], Sequence[Any]]) -> Work:
    """Returns the work of a cell, which runs once it has a server."""

    def work(location: Location) -> dict[str, Any]:
        config = dataclasses.replace(location.config, **settings)
        return attempt(OPERATIONS[name], dataclasses.replace(location, config=config, folder=folder), script(location))

    return work


@contextlib.contextmanager
def _locations(count: int, objects: int) -> Iterator[list[Location]]:
    """Starts servers with the objects to read."""
    with contextlib.ExitStack() as stack:
        locations = []
        for _ in range(count):
            server = stack.enter_context(launch.start("strict"))
            assert server.control is not None, "the strict server has one"
            config = StoreConfig(s3=S3Options(endpoint_url=server.endpoint, region=server.region))
            locations.append(Location(server.endpoint, server.control, config, objects))
            os.environ |= {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        cells = [Cell("", str(number), _prepared) for number in range(count)]
        for cell, outcome in fault_cells.run(cells, locations, _MIXED_LIMIT_S):
            if outcome.verdict != "ok":
                raise RuntimeError(f"server {cell.column} was not prepared: {outcome}")
        yield locations


def _prepared(location: Location) -> dict[str, Any]:
    prepare(location)
    return {"verdict": "ok"}


class Table:
    """All cells of one share of requests."""

    def __init__(self, share: float, settings: dict[str, Any], seed: int) -> None:
        self._share, self._settings, self._seed = share, settings, seed
        self.outcomes: dict[tuple[str, str], Outcome] = {}

    def title(self) -> str:
        limits = {**self._settings, "connect_timeout_s": self._settings["advanced"].connect_timeout_s}
        settings = ", ".join(f"{name}={limits[name]:g}" for name in limits if name.endswith(("_s", "attempts")))
        which = "every request" if self._share == 1.0 else f"{self._share:.0%} of all requests"
        return f"{which} (seed {self._seed}; {settings}): how it ended, after how many seconds"

    def _script(self, number: int, location: Location) -> Sequence[Any]:
        # Created again for the endpoint of the cell's server, which a redirect names.
        return list(rules(kinds(location.endpoint)[number : number + 1], self._share, self._seed))

    def run(self, wanted: Callable[[str, str], bool], locations: Sequence[Location]) -> None:
        """Runs the wanted cells, and their operations without faults."""
        faulty = []
        for number, kind in enumerate(kinds("")):
            for name in (name for name in OPERATIONS if wanted(kind.name, name)):
                script = functools.partial(self._script, number)
                work = _work(name, f"{number}-{self._share:g}", self._settings, script)
                faulty.append(Cell(kind.name, name, work))
        columns = [name for name in OPERATIONS if any(cell.column == name for cell in faulty)]
        clean = [Cell(_CLEAN, name, _work(name, "clean", self._settings, lambda _: ())) for name in columns]
        for cell, outcome in fault_cells.run(clean + faulty, locations, _LIMIT_S):
            self.outcomes[cell.row, cell.column] = outcome
            if sys.stderr.isatty():
                print(f"\r{len(self.outcomes)} of {len(clean + faulty)} cells ", end="", file=sys.stderr)

    def text(self) -> str:
        rows, columns = (list(dict.fromkeys(key[part] for key in self.outcomes)) for part in (0, 1))
        rows.sort(key=[_CLEAN, *(kind.name for kind in kinds(""))].index)
        columns.sort(key=list(OPERATIONS).index)
        cells = {key: outcome.word() for key, outcome in self.outcomes.items()}
        return aligned(
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
        figures = [self.operation, str(self.seed), f"{self.clean_s:.1f}", self.outcome.word(), ratio]
        return [*figures, f"{self.bound_s:.1f}", word]


def _stalls(chosen: Sequence[Kind]) -> dict[str, float]:
    """Returns the kinds of stalls with the timeout that ends each."""
    return {kind.name: _MIXED_SETTINGS[kind.stall] for kind in chosen if kind.stall}


def _drawn(endpoint: str, without: Sequence[str]) -> list[Kind]:
    """Returns the kinds of the mixed runs: those after which a retry succeeds."""
    return [kind for kind in kinds(endpoint) if kind.transient and kind.name not in without]


def _mixed(location: Location, seed: int, without: Sequence[str]) -> Iterator[Mixed]:
    """Runs each operation without and with faults, alternating."""
    chosen = _drawn(location.endpoint, without)
    stalls = sum(_stalls(chosen).values())

    def once(name: str, script: Sequence[Any]) -> Outcome:
        cell = Cell("mixed", name, _work(name, "mixed", _MIXED_SETTINGS, lambda _: script))
        return next(fault_cells.run([cell], [location], _MIXED_LIMIT_S))[1]

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
    return aligned(title, [head, *(run.row() for run in runs)])


def _wanted(words: Sequence[str] | None, without: Sequence[str], row: str, column: str) -> bool:
    """Returns rows matching a word, in the columns that match; all if none is given."""
    if row in without:
        return False
    columns = [word for word in words or () if any(word in name for name in OPERATIONS)]
    others = [word for word in words or () if word not in columns]
    return (not columns or any(word in column for word in columns)) and (
        not others or any(word in row for word in others)
    )


def main() -> int:
    program = Program("faults", __doc__, without=False, only=False)
    add = program.parser.add_argument
    add("--only", action="append", help="rows or columns whose name has this word; may be repeated")
    add("--without", action="append", default=[], help="leave out a kind of fault; may be repeated")
    add("--skip", choices=("table", "mixed"), help="leave out a part")
    add("--seed", type=int, default=1, help="random seed (default 1)")
    add("--objects", type=int, default=2000, help="objects of the mixed runs (default 2000)")
    given = program.start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    began_s, failures = time.monotonic(), []
    content: dict[str, Any] = {}
    if given.skip != "table":
        with _locations(_SERVERS, _OBJECTS) as locations:
            for share, settings in ((_SHARE, _SETTINGS), (1.0, _EVERY_REQUEST)):
                table = Table(share, settings, given.seed)
                table.run(functools.partial(_wanted, given.only, given.without), locations)
                print(table.text(), "", sep="\n", flush=True)
                failures += table.failures()
                outcomes = table.outcomes.items()
                content[f"{share:g}"] = {" / ".join(key): dataclasses.asdict(outcome) for key, outcome in outcomes}
    if given.skip != "mixed":
        with _locations(1, given.objects) as locations:
            runs = list(_mixed(locations[0], given.seed, given.without))
        print(mixed_text(runs, given.objects, given.without), "", sep="\n", flush=True)
        failures += [f"mixed {run.row()}\n    {run.outcome.text}" for run in runs if not run.kept]
        content["mixed"] = [dataclasses.asdict(run) for run in runs]
    print(*failures, f"{len(failures)} failures in {time.monotonic() - began_s:.0f} s", sep="\n")
    program.finish(content)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
