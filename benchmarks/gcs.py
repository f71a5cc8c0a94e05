"""How fast, and with how much CPU, is Google Cloud Storage read and written, compared with other clients and with S3?

    python benchmarks/gcs.py                            # everything, about half an hour
    python benchmarks/gcs.py --quick                    # a preview, a few minutes: not for publication
    python benchmarks/gcs.py --only many --only "one 1" # the cases whose label has these words
    python benchmarks/gcs.py --only upload --without gcsfs

Needs the extra `bench`, nginx with its lua module, and a C compiler. Objects are read from nginx, which serves the
paths of the JSON, XML and S3 APIs; files are uploaded to an origin that discards them and counts requests by kind. Both
are on this machine, over plain HTTP and without credentials. A case is run by one client after the other, round after
round; each run is its own process, and CPU time includes that of the processes that it starts. obstore has the XML API
only. transfer_manager uploads files only; in the cases "upload" the others upload from memory, torchobj a file as well.
Files are in tmpfs or, where the label says disk, in the page cache. Of what is downloaded every byte of the last
batch or file is compared, in the loader one object of each batch; before its uploads are measured, what a client
uploads is read by boto3 and compared.
"""

import contextlib
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Rounds, Verdict, loop, reads, targets, transfers
from benchmarks.harness.loop import Loop
from benchmarks.harness.reads import Reads
from benchmarks.harness.rivals.feeds import Plan
from benchmarks.harness.states import States
from benchmarks.harness.transfers import Move, Save, Saves, run_save
from benchmarks.lab import nginx, origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, KIB, MIB, Family, check, pieces, size_text
from tests.servers.install import cache_directory

BATCH = 256
_LOADER_BATCH = 64
STATES = States.of_mib(512)
_STATE_KEY = "load.pt"
_CHECKED = (20 * MIB + 7, 70 * MIB + 1, 1000)
_WARM = Family(4 * KIB, 1)
_TMPFS = "/dev/shm"
_LIMIT_S = 300.0

S3 = f"{OURS}, s3://"
"""Ours on the S3 paths of the same origin."""
FILE = f"{OURS}, a file"
"""Ours, which uploads a file as transfer_manager does."""
# Rival, the maximum of our CPU time as a multiple of theirs.
_SMALL_CPU = {"obstore": 0.15, "obstore by hand": 0.4, S3: 1.15}
_SMALL_RATE = 5.0
_LARGE_RATE = 4.0
# Memory that a GET may need in addition to the object.
_EXTRA_MIB = 16
_UPLOAD_CPU, _UPLOAD_RATE = 0.2, 3.0
_LIKE_S3 = 0.85


@dataclass(frozen=True)
class Entry:
    """One client of a case."""

    name: str
    client: str
    """Its name in `rivals.objects`, `rivals.feeds` or `rivals.checkpoint`."""
    scheme: str = "gs"
    file: bool = False
    """Uploads a file where others upload from memory."""


ENDPOINTS = {
    ("plain", "gs"): nginx.GCS,
    ("plain", "s3"): nginx.PLAIN,
    ("20 ms", "gs"): nginx.GCS_LATENCY,
    ("20 ms", "s3"): nginx.LATENCY,
}
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
    families = [Family(size, count) for size, count in counts.items()]
    with nginx.named(families, ENDPOINTS, ENDPOINTS if any(case.reads for case in chosen) else ()) as found:
        yield found


class Moves(Rounds):
    """All rounds of transferring files."""

    def _requests(self, client: str) -> str:
        """Those of the last round: `131: 128 put, 3 compose`."""
        found = Counter(self.runs[client][-1].kinds)
        each = ", ".join(f"{number} {kind}" for kind, number in found.most_common())
        return f"{found.total()}: {each}" if found else ""

    def shown(self) -> str:
        """Returns the lines of the case."""
        columns = {
            "MB/s": self.spreads("rate", 0),
            "CPU-s per GB": self.spreads("cpu_s_per_gb", 2),
            "s": self.medians("wall_s", 2),
            "our rate is": self.times("rate"),
            "our CPU is": self.times("cpu_s_per_gb"),
            "requests": self._requests,
        }
        return self.table("median (min-max) of {rounds} rounds", columns)


class Bench(contextlib.ExitStack):
    """Runs cases."""

    def __init__(
        self, read: dict[tuple[str, str], Location], written: origin.Origin, rounds: int, min_s: float
    ) -> None:
        super().__init__()
        self._read, self._rounds, self._min_s = read, rounds, min_s
        self._written = {"s3": written, "gs": written.on("gs")}
        self._objects = self.enter_context(Clients("harness.rivals.objects", _LIMIT_S))
        self._feeds = self.enter_context(Clients("harness.rivals.feeds", loop.LIMIT_S))
        self._savers = self.enter_context(Clients("harness.rivals.checkpoint", _LIMIT_S))
        self._prepared = cache(self._prepare)
        self._wrong = cache(self._check)
        disk = cache_directory() / "lab"
        disk.mkdir(parents=True, exist_ok=True)
        self._folders = {"disk": self._folder(disk), "tmpfs": self._folder(Path(_TMPFS))}

    def _folder(self, parent: Path) -> Path:
        made = tempfile.TemporaryDirectory(prefix="torchobj-gcs-", dir=parent, ignore_cleanup_errors=True)
        return Path(self.enter_context(made))

    def _file(self, place: str, index: int, size: int) -> str:
        """Returns a file with the content of object `index`, written if it is missing."""
        path = self._folders[place] / f"{size}-{index}"
        if not path.exists():
            with path.open("wb") as file:
                file.writelines(pieces(index, size))
        return str(path)

    def _move(self, case: Case, entry: Entry) -> Any:
        family = case.family
        if case.kind == "down":
            folder, location = self._folders[case.place], self._read["plain", entry.scheme]
            pairs = [(str(folder / f"down-{index}"), name) for index, name in enumerate(family.names())]
            action, warm = "down", (str(folder / "down-warm"), _WARM.names()[0])
        else:
            location = self._written[entry.scheme].discard
            pairs = [(self._file(case.place, index, family.size), f"up/{index}") for index in range(family.count)]
            action = "up" if entry.file or case.kind == "up" else "put"
            warm = (self._file("tmpfs", 0, MIB), "warm/0")
        job = Move(action, location, pairs, family.size * family.count, warm, counted=action != "down")
        return self._objects.run(entry.client, partial(transfers.move, job))

    def _get(self, case: Case, entry: Entry) -> Any:
        many = case.kind == "many"
        min_s = self._min_s if many else self._min_s / 2
        job = reads.Job(self._read["plain", entry.scheme], case.family, BATCH if many else 0, min_s)
        return self._objects.run(entry.client, partial(reads.read, job))

    def _loop(self, case: Case, entry: Entry) -> Any:
        plan = Plan(self._read[case.endpoint, entry.scheme], case.family, _LOADER_BATCH, 4)
        return self._feeds.run(entry.client, partial(loop.measure, loop.Job(plan, min_s=self._min_s)))

    def _prepare(self, states: States, key: str) -> None:
        transfers.prepare(self._savers, self._written["s3"].memory, states, key)

    def _state(self, case: Case, entry: Entry) -> Any:
        found = self._written[entry.scheme]
        self._prepared(STATES, _STATE_KEY)
        location, key = (found.discard, "save.pt") if case.kind == "save" else (found.memory, _STATE_KEY)
        return run_save(self._savers, entry.client, Save(case.kind, location, STATES, key, counted=True))

    def _check_upload(self, entry: Entry) -> None:
        """Uploads files, alone, together and from memory, and compares what boto3 reads back."""
        location, read = self._written[entry.scheme].memory, self._written["s3"].memory
        files = [self._file("tmpfs", index, size) for index, size in enumerate(_CHECKED)]
        warm = (self._file("tmpfs", 0, MIB), "warm/0")
        client = read.boto3()

        def move(action: str, folder: str, chosen: Sequence[int]) -> None:
            pairs = [(files[index], f"{folder}/{index}") for index in chosen]
            job = Move(action, location, pairs, sum(_CHECKED), warm)
            self._objects.run(entry.client, partial(transfers.move, job))
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
        run_save(self._savers, entry.client, Save("save", self._written[entry.scheme].memory, states, key))
        self._prepared(States.of_tensors(2), "unused.pt")
        run_save(self._savers, "boto3", Save("load", self._written["s3"].memory, states, key))

    def _check(self, check: Callable[[Entry], None], entry: Entry) -> str:
        """Compares what a client writes, once per client and kind of case; returns what is wrong."""
        try:
            check(entry)
        except (RuntimeError, AssertionError) as error:
            return str(error)
        return ""

    def run(self, case: Case, without: Sequence[str]) -> Any:
        """Runs all rounds of a case in turn."""
        measure, done, check = {
            "many": (self._get, Reads(case.label, size=case.family.size, batch=BATCH), None),
            "one": (self._get, Reads(case.label, size=case.family.size), None),
            "loader,": (self._loop, Loop(case.label), None),
            "save": (self._state, Saves(case.label), self._check_save),
            "load": (self._state, Saves(case.label, action="load"), None),
            "upload": (self._move, Moves(case.label), self._check_upload),
            "up": (self._move, Moves(case.label), self._check_upload),
            "down": (self._move, Moves(case.label), None),
        }[case.kind]
        entries = {entry.name: entry for entry in case.entries if entry.name not in without}
        for name, entry in entries.items():
            if check is not None and (wrong := self._wrong(check, entry)):
                done.failed[name] = wrong
        done.take(list(entries), self._rounds, lambda name: measure(case, entries[name]))
        for path in [path for folder in self._folders.values() for path in folder.iterdir()]:
            path.unlink()
        return done


def verdicts(case: Any) -> Iterator[Verdict]:
    """The targets of a case."""
    like_s3 = {"loader": "samples/s", "save": "MB/s", "load": "MB/s"}.get(case.label.split()[0].rstrip(","))
    if like_s3 is not None:
        yield targets.ratio(case, like_s3, "rate", S3, least=_LIKE_S3)
    elif case.label == "many 10 KiB":
        for rival, most in _SMALL_CPU.items():
            yield targets.ratio(case, "CPU", "cpu_us", rival, most=most)
        yield targets.ratio(case, "objects/s", "rate", "gcsfs", least=_SMALL_RATE)
    elif case.label == "one 1 GiB":
        for rival in ("gcsfs", "gcsfs by hand"):
            yield targets.ratio(case, "MB/s", "rate", rival, least=_LARGE_RATE, beyond=rival != "gcsfs")
        yield targets.grows_by_object(case, case.size / MIB, size_text(case.size), _EXTRA_MIB)
    elif case.label == "upload 1 GiB":
        for ours in (OURS, FILE):
            rival = "transfer_manager"
            yield targets.ratio(case, "CPU-s per GB", "cpu_s_per_gb", rival, most=_UPLOAD_CPU, ours=ours)
            yield targets.ratio(case, "MB/s", "rate", rival, least=_UPLOAD_RATE, ours=ours)


def main() -> None:
    program = Program("gcs", __doc__, 5, ("short rounds, without 4 GiB", 2))
    given = program.start()
    chosen = program.selected(list(cases(quick=given.quick)), lambda case: case.label)
    with contextlib.ExitStack() as stack:
        read, written = stack.enter_context(locations(chosen)), stack.enter_context(origin.running())
        bench = stack.enter_context(Bench(read, written, given.rounds, 0.4 if given.quick else 1.0))
        for case in chosen:
            done = bench.run(case, given.without)
            program.show(done, done.shown(), verdicts(done))
    program.finish()


if __name__ == "__main__":
    main()
