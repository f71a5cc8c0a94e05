"""Runs `origin.c`, a server of S3 and Google Cloud Storage that costs almost nothing: it discards what one bucket
receives, and keeps in memory what another receives. The C compiler builds it if its sources changed. Linux only.
"""

import contextlib
import hashlib
import http.client
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from benchmarks.lab.location import Location, lab_location
from benchmarks.lab.objects import Family, upload
from benchmarks.lab.progress import progress
from tests.servers.install import cache_directory
from tests.servers.lifetime import die_with_parent

_SOURCES = sorted(Path(__file__).resolve().parent.glob("origin*.[ch]"))


@dataclass(frozen=True)
class Origin:
    """A running origin."""

    port: int
    scheme: str = "s3"
    """That of its locations: also "gs"."""

    @property
    def discard(self) -> Location:
        """The bucket that keeps only the sizes of what is written."""
        return self.listed("discard")

    @property
    def memory(self) -> Location:
        """The bucket that keeps what is written in memory."""
        return self.listed("memory")

    def on(self, scheme: str) -> "Origin":
        """The same origin, whose locations are of another scheme."""
        return replace(self, scheme=scheme)

    def listed(self, bucket: str) -> Location:
        """A bucket of keys, which has the name of their file."""
        return lab_location(bucket, self.port, counts=True, scheme=self.scheme)

    def fill(self, families: Sequence[Family]) -> None:
        """Writes objects to the bucket that keeps them."""
        with progress(f"writing {sum(family.count for family in families)} objects to the origin"):
            upload(self.memory, families)
            self.add_checksums(name for family in families for name in family.names())

    def set(self, rate: int = 0, reset: int = 0, silence: int = 0) -> None:
        """Sets what all connections together may send in bytes per second, and how many bodies of at least 1 MiB there
        are for each that is cut by a reset, and for each that is silent for 1.5 s in its middle; 0: no limit, or none.
        """
        _read(self.memory, f"/-/set?rate={rate}&reset={reset}&silence={silence}")

    def add_checksums(self, keys: Iterable[str]) -> None:
        """Computes those that Google Cloud Storage has of objects in memory, before a measurement does."""
        for key in keys:
            _read(self.memory, f"/storage/v1/b/memory/o/{quote(key, safe='')}")


def _read(location: Location, path: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(location.endpoint_url or "").netloc, timeout=60.0)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read().decode()


def counters(location: Location) -> Counter[str]:
    """Reads what an origin has done: the number of requests of each kind, `received_bytes` of bodies as they were sent,
    including aws-chunked framing in the bucket that discards, `sent_bytes`, and `faults`. Any process may call this.
    """
    if not location.counts:
        return Counter()
    lines = (line.split() for line in _read(location, "/-/counters").splitlines())
    return Counter({name: int(number) for name, number in lines})


def _built() -> Path:
    """Returns the program, compiled once per version of its sources."""
    name = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:12]
    program = cache_directory() / "bin" / f"origin-{name}"
    if program.exists():
        return program
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise SystemExit("the origin that discards is built by a C compiler: cc is not on PATH (or set CC)")
    program.parent.mkdir(parents=True, exist_ok=True)
    partial = program.with_name(f"{program.name}.{os.getpid()}")
    sources = [str(source) for source in _SOURCES if source.suffix == ".c"]
    subprocess.run([compiler, "-O2", "-pthread", "-o", str(partial), *sources], check=True)
    partial.replace(program)
    return program


@contextlib.contextmanager
def running(latency_ms: int = 0, keys: Sequence[Path | str] = ()) -> Iterator[Origin]:
    """Runs an origin that waits for `latency_ms` before each response, without delaying others.

    Args:
        latency_ms: The wait.
        keys: Files of keys, a sorted one per line: each is a bucket that can be listed, with the name of its file.
            Or `numbered:COUNT`, a bucket of computed keys of 24 bytes, or `random:COUNT`, whose objects have ETags.
    """
    command = [str(_built()), str(latency_ms), *map(str, keys)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, preexec_fn=die_with_parent)  # noqa: PLW1509  no other thread runs yet
    assert process.stdin is not None, "stdin=PIPE was passed at the start"
    assert process.stdout is not None, "stdout=PIPE was passed at the start"
    try:
        yield Origin(int(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(10.0)
