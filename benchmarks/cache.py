"""How fast is the second epoch from the disk cache, compared with the same files in RAM, and what costs the first one?

    python benchmarks/cache.py                 # everything, about five minutes
    python benchmarks/cache.py --only "20 ms"  # the cases whose label has these words
    python benchmarks/cache.py --quick         # fewer objects: not for publication

Needs the extra `bench`, and nginx with its lua module. Each client is one process without DataLoader workers that reads
objects of 110 KiB in one shuffled order; all bytes reach the loop, and are compared once. An epoch precedes what is
measured, except in "first epoch". The files of all caches are in the page cache, on the disk of the temporary folder.
CPU time is that of the client; the server runs on the same machine. litData takes no plain HTTP and is not compared.

Written down before the first run, for 2 cores: a cached sample takes 1.0x the CPU time of a GET, the second epoch is
1.2x as fast as the loader of torch over the files, and the first one 0.7x as fast as one without a cache if the server
has no latency, because the processor writes the files, and 0.95x with 20 ms.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Rounds, Verdict, targets, timed
from benchmarks.lab import nginx
from benchmarks.lab.objects import KIB, MIB, Family

_FIRST, _FIRST_WITHOUT, _WITHOUT = f"{OURS}, first epoch", f"{OURS}, first epoch, no cache", f"{OURS}, no cache"
_FILES, _PREAD = "torch, files", "pread"
_CLIENTS = (OURS, _FIRST, _FIRST_WITHOUT, _WITHOUT, _FILES, _PREAD, "multi-storage-client")


@dataclass(frozen=True)
class Case:
    """Where the objects are."""

    label: str
    endpoint: nginx.Endpoint

    def verdicts(self, rounds: Rounds) -> Iterator[Verdict]:
        """The targets."""
        yield targets.ratio(rounds, "samples/s", "rate", _FILES, least=0.95)
        yield targets.ratio(rounds, "samples/s", "rate", _PREAD, least=0.9)
        yield targets.ratio(rounds, "samples/s", "rate", _FIRST_WITHOUT, least=0.95, ours=_FIRST)
        yield targets.ratio(rounds, "CPU µs a sample", "cpu_us", _WITHOUT, most=1.1)


CASES = [Case("no latency", nginx.PLAIN), Case("20 ms", nginx.LATENCY)]


def main() -> None:
    program = Program("cache", __doc__, 5, ("a quarter of the objects and two rounds", 2))
    given = program.start()
    family = Family(110 * KIB, 1024 if given.quick else 4096)
    with contextlib.ExitStack() as stack:
        locations = stack.enter_context(nginx.running([family], [nginx.PLAIN, nginx.LATENCY]))
        pool = stack.enter_context(Clients("harness.rivals.cached"))
        folder = nginx.objects_folder([family]) / nginx.BUCKET / family.name.rstrip("/")
        for case in program.selected(CASES, lambda case: case.label):
            work = partial(timed, locations[case.endpoint], {"family": family, "folder": str(folder)}, 64 * MIB)
            figures, run = {"samples/s": ("rate", 0), "CPU µs a sample": ("cpu_us", 1)}, partial(pool.run, job=work)
            program.measure(Rounds(case.label), _CLIENTS, run, figures, case.verdicts, ours=OURS)
    program.finish()


if __name__ == "__main__":
    main()
