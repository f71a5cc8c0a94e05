"""How fast does one process read samples from tar shards, compared with webdataset over local files and over S3?

    python benchmarks/shards.py                       # everything, about ten minutes
    python benchmarks/shards.py --only "memory"       # the cases whose label has these words
    python benchmarks/shards.py --quick               # fewer samples: not for publication

Needs the extra `bench`, pyarrow, and nginx with its lua module. Each client is one process without DataLoader workers
and returns dicts of the bytes of a body and a label; every sample is compared with that of tarfile. Passes are repeated
for a second. CPU time is that of the client; the server runs on the same machine. litData and MosaicML's streaming read
no tar files and are not compared.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import OURS, Clients, Program, Rounds, Verdict, targets, timed
from benchmarks.harness.rivals.shards import write_shards
from benchmarks.lab import nginx
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, MIB, Family, size_text

_SHARDS = 4
_PARSE, _MEMORY = "torchobj parse", "torchobj, memory store"
_FILES, _CONNECTOR = "webdataset, local files", "webdataset, s3torchconnector"
_IN_MEMORY = "webdataset, memory"
_SHUFFLED, _BLOCKS, _OBJECTS = "shuffled shards", "shards shuffled in blocks", "shuffled objects"


_CLIENTS = {
    "memory": (_PARSE, _MEMORY, _IN_MEMORY),
    "no latency": (OURS, _FILES, _CONNECTOR),
    "20 ms": (OURS, _FILES, _CONNECTOR),
    "shuffled, 20 ms": (_SHUFFLED, _BLOCKS, _OBJECTS),
}


@dataclass(frozen=True)
class Case:
    """What is read, and where."""

    size: int
    place: str

    @property
    def label(self) -> str:
        return f"{size_text(self.size)}, {self.place}"

    def verdicts(self, rounds: Rounds) -> Iterator[Verdict]:
        """The targets."""
        memory = 12.0 if self.size == 110 * KIB else 7.0
        for ours, rival, least in {
            "memory": ((_PARSE, _IN_MEMORY, memory), (_MEMORY, _IN_MEMORY, memory)),
            "no latency": ((OURS, _FILES, 3.0),),
            "20 ms": ((OURS, _CONNECTOR, 5.0),),
            "shuffled, 20 ms": ((_SHUFFLED, _OBJECTS, 0.9),),
        }[self.place]:
            yield targets.ratio(rounds, "samples/s", "rate", rival, least=least, ours=ours)


CASES = [Case(size, place) for size in (110 * KIB, 4 * KIB) for place in _CLIENTS]


def prepared(family: Family, location: Location) -> dict[str, Any]:
    """Writes the shards of a family and their index. Returns the fields of a job."""
    from torchobj.shards import TarIndex

    root = nginx.objects_folder([family]) / nginx.BUCKET
    name = f"shards-{family.name.rstrip('/')}-{family.count}"
    bodies = [b"".join(family.pieces(index)) for index in range(family.count)]
    files = write_shards(root / name, bodies, _SHARDS)
    names = [f"{name}/{file.name}" for file in files]
    index = root / name / "index.parquet"
    location.enter()
    TarIndex.build([location.url(each) for each in names], config=location.config()).save(index)
    return {
        "files": [str(file) for file in files],
        "names": names,
        "count": family.count,
        "index": str(index),
        "objects": family.names(),
    }


def main() -> None:
    program = Program("shards", __doc__, 5, ("a quarter of the samples and two rounds", 2))
    given = program.start()
    counts = {110 * KIB: 4096, 4 * KIB: 32_768}
    families = {size: Family(size, count // (4 if given.quick else 1)) for size, count in counts.items()}
    with contextlib.ExitStack() as stack:
        locations = stack.enter_context(nginx.running(list(families.values()), [nginx.PLAIN, nginx.LATENCY]))
        pool = stack.enter_context(Clients("harness.rivals.shards"))
        jobs = {size: prepared(family, locations[nginx.PLAIN]) for size, family in families.items()}
        for case in program.selected(CASES, lambda case: case.label):
            location = locations[nginx.LATENCY if "20 ms" in case.place else nginx.PLAIN]
            work = partial(timed, location, jobs[case.size], 64 * MIB)
            figures, run = {"samples/s": ("rate", 0), "CPU µs a sample": ("cpu_us", 1)}, partial(pool.run, job=work)
            clients = _CLIENTS[case.place]
            rounds = Rounds(case.label)
            more = {"GETs per 1000": rounds.medians("requests_per_1000", 1)}
            program.measure(rounds, clients, run, figures, case.verdicts, ours=clients[0], more=more)
    program.finish()


if __name__ == "__main__":
    main()
