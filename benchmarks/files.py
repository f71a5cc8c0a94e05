"""How fast, and with how much CPU, do 1, 32 and 128 threads move objects and files, compared with MSC, s3fs and boto3?

    python benchmarks/files.py                          # everything, about an hour
    python benchmarks/files.py --quick                  # a preview, some minutes: not for publication
    python benchmarks/files.py --only "get 64 MiB"      # the cases whose label has these words

Needs the extra `bench`, nginx with its lua module, Go for versitygw and a C compiler. MSC is NVIDIA's
multi-storage-client with its Rust client. Uploads go to an origin that discards them (`lab/origin.c`), downloads come
from the same origin's memory by sendfile, or for one large object from files of nginx; all on this machine, so that
client and server share its cores, and CPU-seconds per GB say more than MB/s. Files are in /dev/shm. 128 threads move
16 MiB instead of 64 MiB, so that the bytes in flight take at most 2 GiB. Each thread makes one call before the
measurement. Every byte of the last object or file is compared. The bare limit of a get is `recv` into one buffer, which
keeps no bytes. The cases with versitygw show a real server, which is
the limit there. The 4 GiB of the full run need 10 GiB of free memory, and are left out otherwise. Round after round,
each run in its own process.
"""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from benchmarks import files_rivals, timed
from benchmarks.files_rivals import ACTIONS
from benchmarks.lab import nginx, origin, versitygw
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, MIB, Family, pieces, size_text
from benchmarks.lab.prepare import upload
from benchmarks.program import Program
from benchmarks.ratio_target import Target, at_most
from benchmarks.report import LIMIT, OURS, Verdict
from benchmarks.timed import Timed, TimedRounds

_MSC = "MSC Rust"
_TMPFS = "/dev/shm"
_MOVERS = (OURS, "torchobj fsspec", _MSC, "s3fs")
_READERS = (OURS, "boto3 get_object", "boto3 download_fileobj", "s3fs", _MSC)
_MOST_MIB = 100
#: Files of each family that are stored; more calls read them again.
_STORED = 4


@dataclass(frozen=True)
class Case:
    """What is moved, by how many threads."""

    action: str
    size: int
    threads: int
    calls: int
    server: str
    """`origin`, `versitygw` or `nginx`."""
    clients: Sequence[str]

    @property
    def family(self) -> Family:
        return Family(self.size, 1 if self.server == "nginx" else _STORED)

    @property
    def label(self) -> str:
        return f"{self.action} {size_text(self.size)}, {self.threads} thread{'s' * (self.threads > 1)}, {self.server}"


def cases(*, quick: bool) -> Iterator[Case]:
    """Yields all cases."""
    for threads, size, calls in ((1, 64 * MIB, 8), (32, 64 * MIB, 64), (128, 16 * MIB, 256)):
        for action in ACTIONS:
            clients = (*_MOVERS, LIMIT) if action == "get" else _MOVERS
            yield Case(action, size, threads, calls // 2 if quick else calls, "origin", clients)
    for threads in (1, 32):
        for action in ("put", "get"):
            yield Case(action, 64 * MIB, threads, max(4, threads), "versitygw", (OURS, _MSC, "s3fs"))
    for size in (128 * MIB, GIB) if quick else (128 * MIB, GIB, 4 * GIB):
        yield Case("get", size, 1, 1, "nginx", _READERS)
    yield Case("download_file", GIB if quick else 4 * GIB, 1, 1, "nginx", (OURS, _MSC, "s3fs", "boto3 get_object"))


def verdicts(case: Case, done: TimedRounds) -> Iterator[Verdict]:
    """The targets of a case."""
    if case.server == "origin":
        most = 0.25 if case.action in ("put", "get") else 0.5
        yield Target("CPU-s per GB", _MSC, most).verdict(done, Timed.cpu_s_per_gb)
    if case.server != "nginx":
        least = 3 if case.server == "origin" and case.threads > 1 else 1
        yield Target("MB/s", _MSC, least, least=True).verdict(done, Timed.mb_per_s)
    elif case.action == "download_file":
        grown = done.grown_mib(OURS) if OURS in done.runs else None
        yield at_most(f"{case.label}: growth of RSS", grown, _MOST_MIB, "MiB")


class Servers:
    """The servers, each started by its first case."""

    def __init__(self, stack: contextlib.ExitStack, chosen: Sequence[Case]) -> None:
        self._stack, self._chosen = stack, chosen
        self._running: dict[str, Location] = {}
        self._origin: origin.Origin | None = None

    def _sizes(self, server: str) -> list[Family]:
        return list({case.family: None for case in self._chosen if case.server == server})

    def _started(self, server: str) -> Location:
        if server == "nginx":
            return self._stack.enter_context(nginx.running([*self._sizes(server), _WARM], [nginx.PLAIN]))[nginx.PLAIN]
        if server == "versitygw":
            return self._stack.enter_context(versitygw.running(self._sizes(server)))
        self._origin = self._stack.enter_context(origin.running())
        upload(self._origin.memory, self._sizes(server))
        return self._origin.memory

    def location(self, case: Case) -> Location:
        """Where a case writes to or reads from."""
        if case.server not in self._running:
            self._running[case.server] = self._started(case.server)
        if self._origin is not None and case.server == "origin" and case.action in ("put", "upload_file"):
            return self._origin.discard
        return self._running[case.server]


_WARM = Family(4 << 10, 1)


def run(case: Case, clients: Sequence[str], rounds: int, location: Location, pool: timed.Clients) -> TimedRounds:
    """Runs all rounds of a case."""
    done = TimedRounds(case.label)
    folder = Path(tempfile.mkdtemp(prefix="torchobj-files-", dir=_TMPFS))
    try:
        if case.action in ("put", "upload_file"):
            with (folder / "0").open("wb") as file:
                file.writelines(pieces(0, case.size))
        family = [case.family.size, case.family.count]
        job = {"action": case.action, "family": family, "threads": case.threads, "calls": case.calls}
        touch_bytes = files_rivals.touched_bytes(case.family, case.threads)
        timed.in_turn(
            clients,
            rounds,
            lambda name: pool.run(name, location, job | {"folder": str(folder)}, touch_bytes),
            done.runs,
            done.failed,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return done


def _possible(chosen: Sequence[Case]) -> Iterator[Case]:
    for case in chosen:
        if case.size > GIB and psutil.virtual_memory().available < 10 * GIB:
            print(f"{case.label}: left out, because less than 10 GiB of memory are free\n")
            continue
        yield case


def main() -> None:
    program = Program(__doc__, 5, ("fewer calls, without 4 GiB", 2)).has_cases()
    given = program.start()
    chosen = list(_possible(program.selected(list(cases(quick=given.quick)), lambda case: case.label)))
    done, found = [], []
    figures = [("MB/s", Timed.mb_per_s, 0), ("CPU-s per GB", Timed.cpu_s_per_gb, 3)]
    with contextlib.ExitStack() as stack:
        servers = Servers(stack, chosen)
        pool = timed.Clients("files_rivals")
        stack.callback(pool.close)
        for case in chosen:
            clients = [name for name in case.clients if name not in given.without]
            if case.action in ("upload_file", "download_file") and not files_rivals.has_files():
                clients = [name for name in clients if name != OURS]
            done.append(run(case, clients, given.rounds, servers.location(case), pool))
            found += verdicts(case, done[-1])
            print(timed.table(done[-1], figures), "", sep="\n", flush=True)
    program.finish("files", found, {"cases": [timed.fields(case) for case in done]})


if __name__ == "__main__":
    main()
