"""Does every operation end with the right bytes or a typed error under any server fault, and how much later?

    python benchmarks/faults.py                            # the table and the mixed runs, some minutes
    python benchmarks/faults.py --only stall --only DCP    # rows and columns whose names have one of these words
    python benchmarks/faults.py --skip table               # the mixed runs alone
    python benchmarks/faults.py --provider gs              # Google Cloud Storage alone; default: S3 and then it
    python benchmarks/faults.py --without "200 B/s"        # leave a kind out of the table and the mixed runs

The servers are the strict servers of the tests, with scripted faults. Each cell is its own process with a deadline. In
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
import queue
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Clients, JobError, Program
from benchmarks.harness.fault_kinds import NO_FAULTS, Kind, Script, kinds
from benchmarks.harness.fault_operations import OPERATIONS, Location, Outcome, attempt, prepare, served
from benchmarks.harness.report import aligned
from benchmarks.lab.objects import MIB
from benchmarks.lab.progress import progress
from torchobj import AdvancedOptions

#: Number of servers, and of concurrent cells: most of a cell's time is spent waiting.
_SERVERS = 4
_LIMIT_S, _MIXED_LIMIT_S = 40.0, 300.0
_SHARE, _MIXED_SHARE = 0.2, 0.05
_PROGRESS_CELLS = 20
_CLEAN = "no fault"
#: Few objects per cell: the table has hundreds of cells.
_OBJECTS = 96
_TIMES_CLEAN, _TIMEOUTS = 3.0, 2.0
_MIXED = ("get_many", "loader map", "loader iter")
_ROUNDS = 3

#: Short timeouts, so that stalls take seconds; and the smallest parts that S3 allows.
SETTINGS: dict[str, Any] = {
    "part_bytes": 5 * MIB,
    "advanced": AdvancedOptions(whole_below_bytes=5 * MIB, connect_timeout_s=1.0),
    "first_byte_timeout_s": 1.0,
    "idle_timeout_s": 1.0,
    "retry_timeout_s": 20.0,
}
_EVERY_REQUEST = SETTINGS | {"max_attempts": 3, "retry_timeout_s": 3.0}
_MIXED_SETTINGS: dict[str, Any] = {"first_byte_timeout_s": 2.0, "idle_timeout_s": 2.0, "retry_timeout_s": 60.0}


@dataclasses.dataclass(frozen=True)
class Cell:
    """An operation under faults."""

    row: str
    column: str
    """The operation."""
    folder: str
    """The folder that only this cell writes to."""
    script: Script = NO_FAULTS


@dataclasses.dataclass(frozen=True)
class Bench:
    """Runs cells concurrently, one per server at a time, each in its own process with a deadline."""

    locations: Sequence[Location]
    pools: Sequence[Clients]
    """A fork server for each location."""

    def run(self, cells: Sequence[Cell], settings: dict[str, Any], limit_s: float) -> Iterator[tuple[Cell, Outcome]]:
        """Yields each cell with its outcome when it ends."""
        free: queue.SimpleQueue[tuple[Location, Clients]] = queue.SimpleQueue()
        for slot in zip(self.locations, self.pools, strict=True):
            free.put(slot)

        def outcome(cell: Cell) -> tuple[Cell, Outcome]:
            location, pool = free.get()
            config = dataclasses.replace(location.config, **settings)
            at = dataclasses.replace(location, config=config, folder=cell.folder)
            try:
                return cell, pool.run("", functools.partial(attempt, cell.column, at, cell.script), limit_s)
            except JobError as error:
                return cell, Outcome("late" if error.kind == "late" else "died", text=str(error))
            finally:
                free.put((location, pool))

        with ThreadPoolExecutor(len(self.locations)) as threads:
            for done in as_completed([threads.submit(outcome, cell) for cell in cells]):
                yield done.result()


@contextlib.contextmanager
def _bench(pools: Sequence[Clients], objects: int, scheme: str) -> Iterator[Bench]:
    """Starts a server of a provider with the objects to read for each of the fork servers."""
    with contextlib.ExitStack() as stack:
        locations = [stack.enter_context(served(scheme, objects)) for _ in pools]
        jobs = [functools.partial(prepare, location) for location in locations]
        with ThreadPoolExecutor(len(pools)) as threads:
            list(threads.map(lambda pool, job: pool.run("", job, _MIXED_LIMIT_S), pools, jobs))
        yield Bench(locations, pools)


@dataclasses.dataclass(frozen=True)
class Table:
    """All cells of one share of requests."""

    scheme: str
    share: float
    settings: dict[str, Any]
    seed: int
    outcomes: dict[tuple[str, str], Outcome] = dataclasses.field(default_factory=dict)
    """By kind of fault and operation."""

    def run(self, wanted: Callable[[str, str], bool], bench: Bench) -> None:
        """Runs the wanted cells, and their operations without faults."""
        faulty = [
            Cell(kind.name, name, f"{number}-{self.share:g}", Script((kind.name,), self.share, self.seed))
            for number, kind in enumerate(kinds(""))
            for name in OPERATIONS
            if wanted(kind.name, name)
        ]
        cells = [Cell(_CLEAN, name, "clean") for name in OPERATIONS if any(cell.column == name for cell in faulty)]
        cells += faulty
        for cell, outcome in bench.run(cells, self.settings, _LIMIT_S):
            self.outcomes[cell.row, cell.column] = outcome
            if len(self.outcomes) % _PROGRESS_CELLS == 0:
                print(f"{len(self.outcomes)} of {len(cells)} cells", file=sys.stderr, flush=True)

    def text(self) -> str:
        limits = {**self.settings, "connect_timeout_s": self.settings["advanced"].connect_timeout_s}
        settings = ", ".join(f"{name}={limits[name]:g}" for name in limits if name.endswith(("_s", "attempts")))
        which = "every request" if self.share == 1.0 else f"{self.share:.0%} of all requests"
        title = f"{self.scheme}://, {which} (seed {self.seed}; {settings}): how it ended, after how many seconds"
        kept = [set(names) for names in zip(*self.outcomes, strict=True)] or [set(), set()]
        rows = [row for row in (_CLEAN, *(kind.name for kind in kinds(""))) if row in kept[0]]
        columns = [column for column in OPERATIONS if column in kept[1]]
        cells = {key: outcome.word() for key, outcome in self.outcomes.items()}
        body = [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
        return aligned(title, [["", *columns], *body])

    def failures(self) -> list[str]:
        return [
            f"{self.scheme}:// {row} / {column}: {outcome.word()}\n{textwrap.indent(outcome.text.strip(), '    ')}"
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
        word, ratio = "kept" if self.kept else "NOT KEPT", f"{self.outcome.took_s / self.clean_s:.1f}x"
        figures = [f"{self.seed}", f"{self.clean_s:.1f}", self.outcome.word(), ratio, f"{self.bound_s:.1f}"]
        return [self.operation, *figures, word]


def _stalls(chosen: Sequence[Kind]) -> dict[str, float]:
    """Returns the kinds of stalls with the timeout that ends each."""
    return {kind.name: _MIXED_SETTINGS[kind.stall] for kind in chosen if kind.stall}


def _drawn(without: Sequence[str], scheme: str) -> list[Kind]:
    """Returns the kinds of the mixed runs: those after which a retry succeeds."""
    return [kind for kind in kinds("") if kind.is_retried(scheme) and kind.name not in without]


def _mixed(bench: Bench, seed: int, without: Sequence[str], scheme: str) -> Iterator[Mixed]:
    """Runs each operation without faults, and with them."""
    chosen = _drawn(without, scheme)
    stalls, names = sum(_stalls(chosen).values()), tuple(kind.name for kind in chosen)

    def once(name: str, script: Script = NO_FAULTS) -> Outcome:
        with progress(f"{name}, {script.share:.0%} of all requests"):
            [(_, outcome)] = bench.run([Cell("mixed", name, "mixed", script)], _MIXED_SETTINGS, _MIXED_LIMIT_S)
        return outcome

    for name in _MIXED:
        clean = [once(name) for _ in range(_ROUNDS)]
        if any(outcome.verdict != "ok" for outcome in clean):
            raise RuntimeError(f"{name} fails without faults: {clean}")
        clean_s = statistics.median(outcome.took_s for outcome in clean)
        bound_s = _TIMES_CLEAN * clean_s + _TIMEOUTS * stalls
        for drawn in range(seed, seed + _ROUNDS):
            yield Mixed(name, clean_s, once(name, Script(names, _MIXED_SHARE, drawn)), bound_s, drawn)


def mixed_text(runs: Sequence[Mixed], objects: int, without: Sequence[str], scheme: str) -> str:
    chosen = _drawn(without, scheme)
    ends = ", ".join(f"{name}: {timeout_s:g} s" for name, timeout_s in _stalls(chosen).items())
    settings = ", ".join(f"{name}={value:g}" for name, value in _MIXED_SETTINGS.items())
    title = (
        f"{scheme}://, {_MIXED_SHARE:.0%} of all requests, {len(chosen)} kinds, {objects} objects ({settings}).\n"
        f"Bound: {_TIMES_CLEAN:g}x the clean time + {_TIMEOUTS:g}x what ends each kind of stall ({ends})"
    )
    head = ["", "seed", "clean s", "with faults", "ratio", "bound s", ""]
    return aligned(title, [head, *(run.row() for run in runs)])


def _wanted(words: Sequence[str], without: Sequence[str], row: str, column: str) -> bool:
    """Returns rows matching a word, in the columns that match; all if none is given."""
    columns = [word for word in words if any(word in name for name in OPERATIONS)]
    others = [word for word in words if word not in columns]
    pairs = (columns, column), (others, row)
    matches = [not chosen or any(word in name for word in chosen) for chosen, name in pairs]
    return row not in without and all(matches)


def main() -> int:
    only = "rows or columns whose name has this word"
    program = Program("faults", __doc__, without="leave out a kind of fault", only=only)
    add = program.parser.add_argument
    add("--skip", choices=("table", "mixed"), help="leave out a part")
    add("--provider", choices=("s3", "gs"), help="only one provider")
    add("--seed", type=int, default=1, help="random seed (default 1)")
    add("--objects", type=int, default=2000, help="objects of the mixed runs (default 2000)")
    given = program.start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    began_s, failures = time.monotonic(), []
    content: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        module = "harness.fault_operations"
        pools = [stack.enter_context(Clients(module, lives=1)) for _ in range(_SERVERS)]
        for scheme in [given.provider] if given.provider else ["s3", "gs"]:
            if given.skip != "table":
                bench = stack.enter_context(_bench(pools, _OBJECTS, scheme))
                for share, settings in ((_SHARE, SETTINGS), (1.0, _EVERY_REQUEST)):
                    table = Table(scheme, share, settings, given.seed)
                    table.run(functools.partial(_wanted, given.only, given.without), bench)
                    print(table.text(), "", sep="\n", flush=True)
                    failures += table.failures()
                    outcomes = table.outcomes.items()
                    content[f"{scheme} {share:g}"] = {
                        " / ".join(key): dataclasses.asdict(outcome) for key, outcome in outcomes
                    }
            if given.skip != "mixed":
                runs = list(
                    _mixed(
                        stack.enter_context(_bench(pools[:1], given.objects, scheme)), given.seed, given.without, scheme
                    )
                )
                print(mixed_text(runs, given.objects, given.without, scheme), "", sep="\n", flush=True)
                failures += [f"mixed {scheme} {run.row()}\n    {run.outcome.text}" for run in runs if not run.kept]
                content[f"{scheme} mixed"] = [dataclasses.asdict(run) for run in runs]
    print(*failures, f"{len(failures)} failures in {time.monotonic() - began_s:.0f} s", sep="\n")
    program.finish(content)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
