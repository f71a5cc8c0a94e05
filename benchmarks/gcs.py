"""How fast, and with how much CPU, is Google Cloud Storage read and written, compared with other clients and with S3?

    python benchmarks/gcs.py                            # everything, about half an hour
    python benchmarks/gcs.py --quick                    # a preview, a few minutes: not for publication
    python benchmarks/gcs.py --only many --only "one 1" # the cases whose label has these words
    python benchmarks/gcs.py --only upload --without gcsfs

Needs the extra `bench` and a C compiler. The origin serves the paths of the JSON, XML and S3 APIs: objects are read
from its memory; what is uploaded it discards, and counts requests by kind. It is on this machine, over plain HTTP and
without credentials. A case is run by one client after the other, round after round; each run is its own process, and
CPU time includes that of the processes that it starts. obstore has the XML API only. transfer_manager uploads files
only; in the cases "upload" the others upload from memory, torchobj a file as well. Files are in tmpfs or, where the
label says disk, in the page cache. Of what is downloaded every byte of the last batch or file is compared, in the
loader one object of each batch; before its uploads are measured, what a client uploads is read by boto3 and compared.
"""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Rounds, Verdict, loop, states, targets
from benchmarks.harness.loop import Loop
from benchmarks.harness.rivals.feeds import Plan
from benchmarks.harness.states import States, saving
from benchmarks.harness.transfers import FIGURES, MANY, ONE, moving, read
from benchmarks.lab import origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, KIB, MIB, Family, check, pieces, size_text
from benchmarks.lab.progress import progress
from tests.servers.install import cache_directory

BATCH = 256
_LOADER_BATCH = 64
STATES = States.of_mib(512)
_STATE_KEY = "load.pt"
_CHECKED = (20 * MIB + 7, 70 * MIB + 1, 1000)
_WARM = Family(4 * KIB, 1)
_TMPFS = "/dev/shm"
_LIMIT_S = 300.0

#: What a client's name ends with that reads and writes by the S3 paths of the same origin, or that uploads a file where
#: others upload from memory, as transfer_manager does.
_BY_S3, _FROM_FILE = ", s3://", ", a file"
S3, FILE = f"{OURS}{_BY_S3}", f"{OURS}{_FROM_FILE}"
# Rival, the maximum of our CPU time as a multiple of theirs.
_SMALL_CPU = {"obstore": 0.15, "obstore by hand": 0.4, S3: 1.15}
_SMALL_RATE = 5.0
_LARGE_RATE = 4.0
# Memory that a GET may need in addition to the object.
_EXTRA_MIB = 16
_UPLOAD_CPU, _UPLOAD_RATE = 0.2, 3.0
_LIKE_S3 = 0.85

_BOTH, _MANAGER, _TENSOR = (OURS, S3), "transfer_manager", f"{OURS}, one tensor"
_READERS = (*_BOTH, "obstore", "obstore by hand", "gcsfs", _MANAGER)
_UPLOADERS = (*_BOTH, FILE, "obstore", "gcsfs", _MANAGER)
_MOVERS = (OURS, "gcsfs", _MANAGER)
_FEEDS = (*_BOTH, _TENSOR, f"{_TENSOR}{_BY_S3}", "getitems")


@dataclass(frozen=True)
class Case:
    """What is measured, and for which clients."""

    kind: str
    """The first word of the label."""
    what: str
    clients: Sequence[str]
    family: Family = _WARM
    """What is read, or the sizes that are uploaded."""
    delay_ms: int = 0
    place: str = "tmpfs"
    """Where files are."""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.what}"

    @property
    def reads(self) -> bool:
        """Whether objects of the family are read."""
        return self.kind in ("many", "one", "loader,", "down")


def cases(*, quick: bool) -> Iterator[Case]:
    """Yields all cases; with `quick` smaller ones and without the longest."""
    for kib in (10, 110):
        yield Case("many", f"{kib} KiB", _READERS, Family(kib * KIB, 1024))
    yield Case("one", "1 GiB", (*_READERS, "gcsfs by hand"), Family(GIB, 1))
    for size in (16 * MIB, GIB) if quick else (16 * MIB, GIB, 4 * GIB):
        yield Case("upload", size_text(size), _UPLOADERS, Family(size, 1))
    objects = Family(110 * KIB, 1024 if quick else 4000)
    yield Case("loader,", "no latency, 4 workers", _FEEDS, objects)
    yield Case("loader,", "20 ms, 4 workers", _FEEDS, objects, delay_ms=20)
    for action in ("save", "load"):
        yield Case(action, "512 MiB", _BOTH)
    large, medium = (256 * MIB, 32 * MIB) if quick else (GIB, 128 * MIB)
    for place, action in itertools.product(("disk", "tmpfs"), ("down", "up")):
        for family in (Family(large, 1), Family(medium, 10), Family(medium, 1)):
            what = f"{family.count} x {size_text(family.size)}, {place}"
            yield Case(action, what, _MOVERS, family, place=place)


def _requests(case: Rounds, client: str) -> str:
    """Those of the last round: `131: 128 put, 3 compose`."""
    found = case.runs[client][-1].kinds
    each = ", ".join(f"{number} {kind}" for kind, number in found.most_common())
    return f"{found.total()}: {each}" if found else ""


class Bench(contextlib.ExitStack):
    """Runs cases, on origins that their first case starts."""

    def __init__(self, chosen: Sequence[Case], min_s: float) -> None:
        super().__init__()
        self._chosen, self._min_s = chosen, min_s
        self._objects = self.enter_context(Clients("harness.rivals.objects", _LIMIT_S))
        self._feeds = self.enter_context(Clients("harness.rivals.feeds", loop.LIMIT_S))
        self._savers = self.enter_context(Clients("harness.rivals.checkpoint", _LIMIT_S))
        self._origin, self._wrong = cache(self._started), cache(self._check)
        parents = {"disk": cache_directory() / "lab", "tmpfs": Path(_TMPFS)}
        parents["disk"].mkdir(parents=True, exist_ok=True)
        options: Any = {"prefix": "torchobj-gcs-", "ignore_cleanup_errors": True}
        made = {place: tempfile.TemporaryDirectory(dir=parent, **options) for place, parent in parents.items()}
        self._folders = {place: Path(self.enter_context(folder)) for place, folder in made.items()}

    def _started(self, delay_ms: int) -> origin.Origin:
        """Returns an origin with the objects that its cases read."""
        counts = {_WARM.size: 1}
        for case in self._chosen:
            if case.reads and case.delay_ms == delay_ms:
                counts[case.family.size] = max(counts.get(case.family.size, 0), case.family.count)
        found = self.enter_context(origin.running(delay_ms))
        found.fill([Family(size, count) for size, count in counts.items()])
        if any(case.kind == "load" and case.delay_ms == delay_ms for case in self._chosen):
            states.prepare(self._savers, found.memory, STATES, _STATE_KEY)
            found.add_checksums([_STATE_KEY, states.WARM_KEY])
        return found

    def _bucket(self, name: str, bucket: str, delay_ms: int = 0) -> Location:
        """Returns how a client reaches "memory" or "discard"."""
        found = self._origin(delay_ms).on("s3" if name.endswith(_BY_S3) else "gs")
        return found.memory if bucket == "memory" else found.discard

    def _file(self, place: str, index: int, size: int) -> str:
        """Returns a file with the content of object `index`, written if it is missing."""
        path = self._folders[place] / f"{size}-{index}"
        if not path.exists():
            with path.open("wb") as file:
                file.writelines(pieces(index, size))
        return str(path)

    def _move(self, case: Case, name: str) -> Any:
        family, downloads = case.family, case.kind == "down"
        if downloads:
            folder = self._folders[case.place]
            pairs = [(str(folder / f"down-{index}"), key) for index, key in enumerate(family.names())]
            action, warm = "down", (str(folder / "down-warm"), _WARM.names()[0])
        else:
            pairs = [(self._file(case.place, index, family.size), f"up/{index}") for index in range(family.count)]
            action = "up" if case.kind == "up" or name in (FILE, _MANAGER) else "put"
            warm = (self._file("tmpfs", 0, MIB), "warm/0")
        location = self._bucket(name, "memory" if downloads else "discard")
        return self._objects.run(_client(name), moving(action, location, pairs, warm, family.size * family.count))

    def _get(self, case: Case, name: str) -> Any:
        batch, min_s = (BATCH, self._min_s) if case.kind == "many" else (0, self._min_s / 2)
        job = partial(read, self._bucket(name, "memory"), case.family, batch, min_s)
        return self._objects.run(_client(name), job)

    def _loop(self, case: Case, name: str) -> Any:
        plan = Plan(self._bucket(name, "memory", case.delay_ms), case.family, _LOADER_BATCH, 4)
        return self._feeds.run(_client(name), partial(loop.measure, loop.Job(plan, min_s=self._min_s)))

    def _state(self, case: Case, name: str) -> Any:
        bucket, key = ("discard", "save.pt") if case.kind == "save" else ("memory", _STATE_KEY)
        return self._savers.run(_client(name), saving(case.kind, self._bucket(name, bucket), STATES, key))

    def _check_upload(self, name: str) -> None:
        """Uploads files, alone, together and from memory, and compares what boto3 reads back."""
        location, read = self._bucket(name, "memory"), self._origin(0).memory
        files = [self._file("tmpfs", index, size) for index, size in enumerate(_CHECKED)]
        warm = (self._file("tmpfs", 0, MIB), "warm/0")
        client = read.boto3()

        def move(action: str, folder: str, chosen: Sequence[int]) -> None:
            pairs = [(files[index], f"{folder}/{index}") for index in chosen]
            self._objects.run(_client(name), moving(action, location, pairs, warm, sum(_CHECKED)))
            for index, (_, key) in zip(chosen, pairs, strict=True):
                check(key, _CHECKED[index], client.get_object(Bucket=read.bucket, Key=key)["Body"].read())
                client.delete_object(Bucket=read.bucket, Key=key)

        every = range(len(files))
        for index in every:
            move("up", "alone", [index])
        move("up", "together", every)
        if name != _MANAGER:
            move("put", "put", every)

    def _check_save(self, name: str) -> None:
        """Saves a state, and loads what was saved by boto3 and the stock torch.load."""
        saved, key, read = States.of_mib(128), "check.pt", self._origin(0).memory
        self._savers.run(_client(name), saving("save", self._bucket(name, "memory"), saved, key))
        states.prepare(self._savers, read, States.of_tensors(2), "unused.pt")
        self._savers.run("boto3", saving("load", read, saved, key))

    def _check(self, check: Callable[[str], None], name: str) -> str:
        """Compares what a client writes, once per client and kind of case; returns what is wrong."""
        try:
            with progress(f"comparing what {name} writes"):
                check(name)
        except (RuntimeError, AssertionError) as error:
            return str(error)
        return ""

    def run(self, case: Case, program: Program) -> None:
        """Runs all rounds of a case in turn."""
        done = Loop(case.label) if case.kind == "loader," else Rounds(case.label)
        measure, check, figures = {
            "many": (self._get, None, MANY),
            "one": (self._get, None, ONE),
            "loader,": (self._loop, None, loop.FIGURES),
            "save": (self._state, self._check_save, FIGURES),
            "load": (self._state, None, FIGURES),
            "upload": (self._move, self._check_upload, FIGURES),
            "up": (self._move, self._check_upload, FIGURES),
            "down": (self._move, None, FIGURES),
        }[case.kind]
        for name in case.clients if check is not None else ():
            if name not in program.given.without and (wrong := self._wrong(check, name)):
                done.failed[name] = wrong
        more = done.columns() if isinstance(done, Loop) else {"requests": partial(_requests, done)}
        program.measure(done, case.clients, partial(measure, case), figures, verdicts, more=more)
        for path in [path for folder in self._folders.values() for path in folder.iterdir()]:
            path.unlink()


def _client(name: str) -> str:
    """Returns the client of a name in `rivals`."""
    return name.removesuffix(_BY_S3).removesuffix(_FROM_FILE)


def verdicts(case: Any) -> Iterator[Verdict]:
    """The targets of a case."""
    kind = case.label.split()[0]
    if kind in ("loader,", "save", "load"):
        yield targets.ratio(case, "samples/s" if kind == "loader," else "MB/s", "rate", S3, least=_LIKE_S3)
    elif case.label == "many 10 KiB":
        for rival, most in _SMALL_CPU.items():
            yield targets.ratio(case, "CPU", "cpu_us", rival, most=most)
        yield targets.ratio(case, "objects/s", "rate", "gcsfs", least=_SMALL_RATE)
    elif case.label == "one 1 GiB":
        for rival in ("gcsfs", "gcsfs by hand"):
            yield targets.ratio(case, "MB/s", "mb_per_s", rival, least=_LARGE_RATE, beyond=rival != "gcsfs")
        yield targets.grows_by_object(case, GIB, _EXTRA_MIB)
    elif case.label == "upload 1 GiB":
        for ours in (OURS, FILE):
            rival = "transfer_manager"
            yield targets.ratio(case, "CPU-s per GB", "cpu_s_per_gb", rival, most=_UPLOAD_CPU, ours=ours)
            yield targets.ratio(case, "MB/s", "mb_per_s", rival, least=_UPLOAD_RATE, ours=ours)


def main() -> None:
    program = Program("gcs", __doc__, 5, ("short rounds, without 4 GiB", 2))
    given = program.start()
    chosen = program.selected(list(cases(quick=given.quick)), lambda case: case.label)
    with Bench(chosen, 0.4 if given.quick else 1.0) as bench:
        for case in chosen:
            bench.run(case, program)
    program.finish()


if __name__ == "__main__":
    main()
