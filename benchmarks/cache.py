"""How fast is the second epoch from the disk cache, compared with the same files in RAM, and what costs the first one?

    python benchmarks/cache.py                 # everything, about twelve minutes
    python benchmarks/cache.py --only "20 ms"  # the cases whose label has these words
    python benchmarks/cache.py --quick         # fewer objects: not for publication

Needs the extra `bench`, and nginx with its lua module. Each client is one process without DataLoader workers that reads
objects of 110 KiB in one shuffled order; all bytes reach the loop, and are compared once. An epoch precedes what is
measured, except in "first epoch". The files of all caches are in the page cache, on the disk of the lab's objects. CPU
time is that of the client; the server runs on the same machine. litData (raw) fills its cache by TLS, because its
client takes no plain HTTP; its measured epochs send no request. multi-storage-client sends a request for each sample,
one after the other, and is measured once.

"Far" is a bucket whose responses take 20 ms, and which sends 125 MB/s on all connections together: the case that a
cache is for. "Training" is the loop of a training: two workers that stay, and batches of one tensor.

Written down before the first run, for 2 cores: a cached sample takes 1.0x the CPU time of a GET, the second epoch is
1.2x as fast as the loader of torch over the files, and the first one 0.7x as fast as one without a cache if the server
has no latency, because the processor writes the files, and 0.95x with 20 ms.
"""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Rounds, Verdict, targets, timed
from benchmarks.lab import nginx, origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family, upload
from benchmarks.lab.progress import progress

_FIRST, _FIRST_WITHOUT, _WITHOUT = f"{OURS}, first epoch", f"{OURS}, first epoch, no cache", f"{OURS}, no cache"
_FILES, _PREAD = "torch, files", "pread"
_TRAINING, _FILES_TRAINING, _LITDATA = f"{OURS}, 2 workers", "torch, files, 2 workers", "litData (raw)"
_EPOCHS = (OURS, _FIRST, _FIRST_WITHOUT, _WITHOUT)
_MSC = "multi-storage-client"
_RIVALS = (_FILES, _PREAD, _MSC, _LITDATA)

#: What the far bucket sends, in bytes per second, and the time before its responses.
_FAR_RATE, _FAR_MS = 125_000_000, 20


@dataclass(frozen=True)
class Case:
    """Where the objects are, and who reads them."""

    label: str
    endpoint: nginx.Endpoint | None
    """None: the far bucket."""
    clients: tuple[str, ...]

    def verdicts(self, rounds: Rounds) -> Iterator[Verdict]:
        """The targets."""
        if _TRAINING in self.clients:
            yield targets.ratio(rounds, "samples/s", "rate", _FILES_TRAINING, least=0.95, ours=_TRAINING)
            return
        if _FILES in self.clients:
            yield targets.ratio(rounds, "samples/s", "rate", _FILES, least=0.95)
            yield targets.ratio(rounds, "samples/s", "rate", _PREAD, least=0.9)
        yield targets.ratio(rounds, "samples/s", "rate", _FIRST_WITHOUT, least=0.95, ours=_FIRST)
        yield targets.ratio(rounds, "CPU µs a sample", "cpu_us", _WITHOUT, most=1.1)

    @property
    def ours(self) -> str:
        """The client whose figures are divided by those of the others."""
        return self.clients[0]


CASES = [
    Case("no latency", nginx.PLAIN, (*_EPOCHS, *_RIVALS)),
    Case("20 ms", nginx.LATENCY, (*_EPOCHS, *_RIVALS)),
    Case("far", None, _EPOCHS),
    Case("training", nginx.PLAIN, (_TRAINING, _FILES_TRAINING)),
]


def _by_tls(endpoint: nginx.Endpoint) -> nginx.Endpoint:
    return dataclasses.replace(endpoint, tls=True)


def _run(
    pool: Clients,
    locations: dict[nginx.Endpoint, Location],
    far: Location,
    case: Case,
    job: dict[str, Any],
    client: str,
) -> Any:
    if case.endpoint is None:
        location = far
    else:
        location = locations[_by_tls(case.endpoint) if client == _LITDATA else case.endpoint]
    return pool.run(client, partial(timed, location, job, 64 * MIB))


def main() -> None:
    program = Program("cache", __doc__, 5, ("a quarter of the objects and two rounds", 2))
    given = program.start()
    family = Family(110 * KIB, 1024 if given.quick else 4096)
    with contextlib.ExitStack() as stack:
        near = [nginx.PLAIN, nginx.LATENCY]
        locations = stack.enter_context(nginx.running([family], [*near, *map(_by_tls, near)]))
        far = stack.enter_context(origin.running(_FAR_MS))
        folder = nginx.objects_folder([family]) / nginx.BUCKET / family.name.rstrip("/")
        # On the disk of the files: those of the temporary folder may be in memory.
        caches = stack.enter_context(tempfile.TemporaryDirectory(prefix="caches-", dir=folder.parent))
        pool = stack.enter_context(Clients("harness.rivals.cached"))
        job = {"family": family, "folder": str(folder), "caches": caches}
        for case in program.selected(CASES, lambda case: case.label):
            if case.endpoint is None:
                with progress(f"writing {family.count} objects to the far bucket"):
                    upload(far.memory, [family])
                far.set(rate=_FAR_RATE)
            figures = {"samples/s": ("rate", 0)}
            if _TRAINING not in case.clients:
                # CPU time of workers is known when they have ended.
                figures["CPU µs a sample"] = ("cpu_us", 1)
            run = partial(_run, pool, locations, far.memory, case, job)
            program.measure(
                Rounds(case.label), case.clients, run, figures, case.verdicts, ours=case.ours, fewer={_MSC: 1}
            )
    program.finish()


if __name__ == "__main__":
    main()
