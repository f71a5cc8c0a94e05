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
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from benchmarks.harness import LIMIT, OURS, Clients, Program, Rounds, Timed, Verdict, targets, timed
from benchmarks.harness.transfers import Threads
from benchmarks.lab import nginx, origin, versitygw
from benchmarks.lab.location import Location
from benchmarks.lab.objects import GIB, KIB, MIB, Family, pieces, size_text

_MSC = "MSC Rust"
_TMPFS = "/dev/shm"
_MOVERS = (OURS, "torchobj fsspec", _MSC, "s3fs")
_READERS = (OURS, "boto3 get_object", "boto3", "s3fs", _MSC)
_MOST_MIB = 100
#: Files of each family that are stored; more calls read them again.
_STORED = 4
_WARM = Family(4 * KIB, 1)


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
    def uploads(self) -> bool:
        return self.action in ("put", "upload")

    @property
    def family(self) -> Family:
        return Family(self.size, 1 if self.server == "nginx" else _STORED)

    @property
    def label(self) -> str:
        return f"{self.action} {size_text(self.size)}, {self.threads} thread{'s' * (self.threads > 1)}, {self.server}"


def cases(*, quick: bool) -> Iterator[Case]:
    """Yields all cases."""
    for threads, size, calls in ((1, 64 * MIB, 8), (32, 64 * MIB, 64), (128, 16 * MIB, 256)):
        for action in ("put", "get", "upload", "download"):
            clients = (*_MOVERS, LIMIT) if action == "get" else _MOVERS
            yield Case(action, size, threads, calls // 2 if quick else calls, "origin", clients)
    for threads in (1, 32):
        for action in ("put", "get"):
            yield Case(action, 64 * MIB, threads, max(4, threads), "versitygw", (OURS, _MSC, "s3fs"))
    for size in (128 * MIB, GIB) if quick else (128 * MIB, GIB, 4 * GIB):
        yield Case("get", size, 1, 1, "nginx", _READERS)
    yield Case("download", GIB if quick else 4 * GIB, 1, 1, "nginx", (OURS, _MSC, "s3fs", "boto3"))


def verdicts(case: Case, done: Rounds) -> Iterator[Verdict]:
    """The targets of a case."""
    if case.server == "origin":
        most = 0.25 if case.action in ("put", "get") else 0.5
        yield targets.ratio(done, "CPU-s per GB", "cpu_s_per_gb", _MSC, most=most)
    if case.server != "nginx":
        least = 3 if case.server == "origin" and case.threads > 1 else 1
        yield targets.ratio(done, "MB/s", "mb_per_s", _MSC, least=least)
    elif case.action == "download":
        yield targets.grows_at_most(done, _MOST_MIB)


def started(stack: contextlib.ExitStack, server: str, families: Sequence[Family]) -> tuple[Location, Location]:
    """Starts a server; returns where its cases read, and where they write."""
    if server == "origin":
        found = stack.enter_context(origin.running())
        found.fill(families)
        return found.memory, found.discard
    if server == "nginx":
        location = stack.enter_context(nginx.running([*families, _WARM], [nginx.PLAIN]))[nginx.PLAIN]
    else:
        location = stack.enter_context(versitygw.running(families))
    return location, location


@contextlib.contextmanager
def work(case: Case, location: Location) -> Iterator[Callable[..., Timed]]:
    """Yields the job of a case, with its files."""
    with tempfile.TemporaryDirectory(prefix="torchobj-files-", dir=_TMPFS, ignore_cleanup_errors=True) as folder:
        if case.uploads:
            with Path(folder, "0").open("wb") as file:
                file.writelines(pieces(0, case.size))
        job = {"action": case.action, "family": case.family, "threads": case.threads, "calls": case.calls}
        # What the client with the largest need uses.
        touch_bytes = min(case.threads * case.size * 2, GIB)
        yield partial(timed, location, job | {"folder": Path(folder)}, touch_bytes, worker=Threads)


def _possible(chosen: Sequence[Case]) -> Iterator[Case]:
    for case in chosen:
        if case.size > GIB and psutil.virtual_memory().available < 10 * GIB:
            print(f"{case.label}: left out, because less than 10 GiB of memory are free\n")
            continue
        yield case


def main() -> None:
    program = Program("files", __doc__, 5, ("fewer calls, without 4 GiB", 2))
    given = program.start()
    chosen = list(_possible(program.selected(list(cases(quick=given.quick)), lambda case: case.label)))
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Clients("harness.rivals.objects"))
        servers: dict[str, tuple[Location, Location]] = {}
        figures = {"MB/s": ("mb_per_s", 0), "CPU-s per GB": ("cpu_s_per_gb", 3)}
        for case in chosen:
            if case.server not in servers:
                families = list({each.family: None for each in chosen if each.server == case.server})
                servers[case.server] = started(stack, case.server, families)
            with work(case, servers[case.server][case.uploads]) as job:
                run = partial(pool.run, job=job)
                program.measure(Rounds(case.label), case.clients, run, figures, partial(verdicts, case))
    program.finish()


if __name__ == "__main__":
    main()
