"""The cases of `gcs.py`, and how one is run: each client in turn, round after round, each run in its own process."""

import contextlib
import dataclasses
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import checkpoint_measure, checkpoint_report, feeds, gcs_report, loader, loop, measure, report, timed
from benchmarks.gcs_measure import Clients, Move
from benchmarks.gcs_report import FILE, S3, Moved, Moves
from benchmarks.lab import nginx, origin
from benchmarks.lab.boto import boto_client
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, KIB, MIB, Family, check, pieces, size_text
from benchmarks.report import OURS, Outcome, Rounds
from benchmarks.states import States
from tests.servers.install import cache_directory

BATCH = 256
STATES = States.of_mib(512)
_STATE_KEY = "load.pt"
_CHECKED = (20 * MIB + 7, 70 * MIB + 1, 1000)
_WARM = Family(4 * KIB, 1)
_TMPFS = "/dev/shm"


@dataclass(frozen=True)
class Entry:
    """One client of a case."""

    name: str
    client: str
    """Its name in `gcs_rivals`, `feeds` or `checkpoint_rivals`."""
    scheme: str = "gs"
    file: bool = False
    """Uploads a file where others upload from memory."""


_BOTH = (Entry(OURS, OURS), Entry(S3, OURS, "s3"))
_TENSOR = f"{OURS}, one tensor"
_READERS = (*_BOTH, *(Entry(name, name) for name in ("obstore", "obstore by hand", "gcsfs", "transfer_manager")))
_LARGE_READERS = (*_READERS, Entry("gcsfs by hand", "gcsfs by hand"))
_RIVALS = (
    Entry("obstore", "obstore"),
    Entry("gcsfs", "gcsfs"),
    Entry("transfer_manager", "transfer_manager", file=True),
)
_UPLOADERS = (*_BOTH, Entry(FILE, OURS, file=True), *_RIVALS)
_MOVERS = (_BOTH[0], *(Entry(name, name) for name in ("gcsfs", "transfer_manager")))
_FEEDS = (*_BOTH, Entry(_TENSOR, _TENSOR), Entry(f"{_TENSOR}, s3://", _TENSOR, "s3"), Entry("getitems", "getitems"))


@dataclass(frozen=True)
class Case:
    """What is measured, and for which clients."""

    kind: str
    """The first word of the label."""
    what: str
    entries: Sequence[Entry]
    family: Family = _WARM
    """What is read from nginx, or the sizes that are uploaded."""
    endpoint: str = "plain"
    place: str = "tmpfs"
    """Where files are."""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.what}"

    @property
    def reads(self) -> bool:
        """Whether nginx is read."""
        return self.kind in ("many", "one", "loader,", "down")


def cases(*, quick: bool) -> Iterator[Case]:
    """Yields all cases; with `quick` smaller ones and without the longest."""
    for kib in (10, 110):
        yield Case("many", f"{kib} KiB", _READERS, Family(kib * KIB, 1024))
    yield Case("one", "1 GiB", _LARGE_READERS, Family(GIB, 1))
    for size in (16 * MIB, GIB) if quick else (16 * MIB, GIB, 4 * GIB):
        yield Case("upload", size_text(size), _UPLOADERS, Family(size, 1))
    objects = Family(110 * KIB, 1024 if quick else 4000)
    yield Case("loader,", "no latency, 4 workers", _FEEDS, objects)
    yield Case("loader,", "20 ms, 4 workers", _FEEDS, objects, endpoint="20 ms")
    for action in ("save", "load"):
        yield Case(action, "512 MiB", _BOTH)
    large, medium = (256 * MIB, 32 * MIB) if quick else (GIB, 128 * MIB)
    for place, action in itertools.product(("disk", "tmpfs"), ("down", "up")):
        for family in (Family(large, 1), Family(medium, 10), Family(medium, 1)):
            what = f"{family.count} x {size_text(family.size)}, {place}"
            yield Case(action, what, _MOVERS, family, place=place)


@contextlib.contextmanager
def locations(chosen: Sequence[Case]) -> Iterator[dict[tuple[str, str], Location]]:
    """Runs nginx if `chosen` need it; yields the location of each endpoint and scheme."""
    counts = {_WARM.size: 1}
    for case in chosen:
        if case.reads:
            counts[case.family.size] = max(counts.get(case.family.size, 0), case.family.count)
    endpoints = {
        ("plain", "gs"): nginx.GCS,
        ("plain", "s3"): nginx.PLAIN,
        ("20 ms", "gs"): nginx.GCS_LATENCY,
        ("20 ms", "s3"): nginx.LATENCY,
    }
    if not any(case.reads for case in chosen):
        yield {}
        return
    families = [Family(size, count) for size, count in counts.items()]
    with nginx.running(families, list(endpoints.values())) as found:
        yield {name: found[endpoint] for name, endpoint in endpoints.items()}


@dataclass
class Done:
    """A case that was run."""

    rounds: Rounds
    table: str
    failed: dict[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Returns the case as it is written to the file."""
        rounds: Any = self.rounds
        content = report.fields(rounds) if isinstance(rounds, Outcome) else dataclasses.asdict(rounds)
        return content | {"failed": self.failed}


class Bench:
    """Runs cases."""

    def __init__(
        self, read: dict[tuple[str, str], Location], written: origin.Origin, rounds: int, min_s: float
    ) -> None:
        self._read, self._rounds, self._min_s = read, rounds, min_s
        self._written = {"s3": written, "gs": written.on("gs")}
        self._clients, self._loops, self._savers = Clients(), loop.Loops(), checkpoint_measure.Savers()
        self._prepared = False
        self._failed: dict[tuple[str, str], str] = {}
        cache_directory().joinpath("lab").mkdir(parents=True, exist_ok=True)
        disk = tempfile.mkdtemp(prefix="gcs-", dir=cache_directory() / "lab")
        self._folders = {"disk": Path(disk), "tmpfs": Path(tempfile.mkdtemp(prefix="torchobj-gcs-", dir=_TMPFS))}

    def close(self) -> None:
        for each in (self._clients, self._loops, self._savers):
            each.close()
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)

    def _file(self, place: str, index: int, size: int) -> str:
        """Returns a file with the content of object `index`, written if it is missing."""
        path = self._folders[place] / f"{size}-{index}"
        if not path.exists():
            with path.open("wb") as file:
                for piece in pieces(index, size):
                    file.write(piece)
        return str(path)

    def _delete(self, place: str) -> None:
        for path in self._folders[place].iterdir():
            path.unlink()

    def _upload(self, entry: Entry, case: Case) -> Moved:
        family, location = case.family, self._written[entry.scheme].discard
        pairs = [(self._file(case.place, index, family.size), f"up/{index}") for index in range(family.count)]
        warm = (self._file("tmpfs", 0, MIB), "warm/0")
        action = "up" if entry.file or case.kind == "up" else "put"
        job = Move(action, location, pairs, family.size * family.count, warm, counted=True)
        return Moved(**self._clients.move(entry.client, job))

    def _download(self, entry: Entry, case: Case) -> Moved:
        family, folder = case.family, self._folders[case.place]
        pairs = [(str(folder / f"down-{index}"), name) for index, name in enumerate(family.names())]
        warm = (str(folder / "down-warm"), _WARM.names()[0])
        job = Move("down", self._read["plain", entry.scheme], pairs, family.size * family.count, warm)
        return Moved(**self._clients.move(entry.client, job))

    def _get(self, entry: Entry, case: Case) -> measure.Measured:
        many = case.kind == "many"
        min_s = self._min_s if many else self._min_s / 2
        job = measure.Job(self._read["plain", entry.scheme], case.family, BATCH if many else 0, min_s)
        return self._clients.read(entry.client, job)

    def _loop(self, entry: Entry, case: Case) -> loop.Run:
        plan = feeds.Plan(self._read[case.endpoint, entry.scheme], case.family, loader.BATCH, 4)
        return self._loops.run(entry.client, loop.Job(plan, min_s=self._min_s))

    def _state(self, entry: Entry, case: Case) -> checkpoint_measure.Run:
        found = self._written[entry.scheme]
        if not self._prepared:
            self._savers.prepare(self._written["s3"].memory, STATES, _STATE_KEY)
            self._prepared = True
        location, key = (found.discard, "save.pt") if case.kind == "save" else (found.memory, _STATE_KEY)
        job = checkpoint_measure.Job(case.kind, location, STATES, key, counted=True)
        return self._savers.run(entry.client, job)

    def _check_upload(self, entry: Entry) -> None:
        """Uploads files, alone, together and from memory, and compares what boto3 reads back."""
        location, read = self._written[entry.scheme].memory, self._written["s3"].memory
        files = [self._file("tmpfs", index, size) for index, size in enumerate(_CHECKED)]
        warm = (self._file("tmpfs", 0, MIB), "warm/0")
        client = boto_client(read)

        def move(action: str, folder: str, chosen: Sequence[int]) -> None:
            pairs = [(files[index], f"{folder}/{index}") for index in chosen]
            self._clients.move(entry.client, Move(action, location, pairs, sum(_CHECKED), warm))
            for index, (_, key) in zip(chosen, pairs, strict=True):
                check(key, _CHECKED[index], client.get_object(Bucket=read.bucket, Key=key)["Body"].read())
                client.delete_object(Bucket=read.bucket, Key=key)

        every = range(len(files))
        for index in every:
            move("up", "alone", [index])
        move("up", "together", every)
        if entry.client != "transfer_manager":
            move("put", "put", every)

    def _check_save(self, entry: Entry) -> None:
        """Saves a state, and loads what was saved by boto3 and the stock torch.load."""
        states, key = States.of_mib(128), "check.pt"
        job = checkpoint_measure.Job("save", self._written[entry.scheme].memory, states, key)
        self._savers.run(entry.client, job)
        self._savers.prepare(self._written["s3"].memory, States.of_tensors(2), "unused.pt")
        self._savers.run("boto3", checkpoint_measure.Job("load", self._written["s3"].memory, states, key))

    def check(self, case: Case, entry: Entry) -> str | None:
        """Compares what a client writes, once per client and kind of case; returns what is wrong."""
        check = {"upload": self._check_upload, "up": self._check_upload, "save": self._check_save}.get(case.kind)
        if check is None:
            return None
        name = (check.__name__, entry.name)
        if name not in self._failed:
            try:
                check(entry)
                self._failed[name] = ""
            except (RuntimeError, AssertionError) as error:
                self._failed[name] = str(error)
        return self._failed[name]

    def run(self, case: Case, without: Sequence[str]) -> Done:
        """Runs all rounds of a case in turn."""
        runners: dict[str, tuple[Callable[[Entry, Case], Any], Any, Callable[[Any], str]]] = {
            "many": (self._get, Outcome(case.label, case.family.size, BATCH), report.table),
            "one": (self._get, Outcome(case.label, case.family.size, 0), report.table),
            "loader,": (self._loop, loader.Loop(case.label, "rate"), loader.table),
            "save": (self._state, checkpoint_measure.Case(case.label, "save"), checkpoint_report.table),
            "load": (self._state, checkpoint_measure.Case(case.label, "load"), checkpoint_report.table),
            "upload": (self._upload, Moves(case.label), gcs_report.moves_table),
            "up": (self._upload, Moves(case.label), gcs_report.moves_table),
            "down": (self._download, Moves(case.label), gcs_report.moves_table),
        }
        measure_one, rounds, table = runners[case.kind]
        entries = [entry for entry in case.entries if entry.name not in without]
        failed = {entry.name: wrong for entry in entries if (wrong := self.check(case, entry))}
        by_name = {entry.name: entry for entry in entries}
        timed.in_turn(list(by_name), self._rounds, lambda name: measure_one(by_name[name], case), rounds.runs, failed)
        for place in self._folders:
            self._delete(place)
        lines = [table(rounds) if rounds.runs else f"{case.label}: not measured"]
        lines += timed.left_out(failed)
        return Done(rounds, "\n".join(lines), failed)
