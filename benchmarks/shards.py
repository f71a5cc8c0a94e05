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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import shards_rivals, timed
from benchmarks.lab import nginx
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, Family, pieces, size_text
from benchmarks.lab.settings import store_config
from benchmarks.program import Program
from benchmarks.ratio_target import Target
from benchmarks.report import OURS, Verdict
from benchmarks.timed import Timed, TimedRounds

_SHARDS = 4
_ENDPOINTS = {"no latency": nginx.PLAIN, "20 ms": nginx.LATENCY}
_PARSE, _MEMORY = "torchobj parse", "torchobj, memory store"
_FILES, _CONNECTOR = "webdataset, local files", "webdataset, s3torchconnector"
_IN_MEMORY = "webdataset, memory"
_SHUFFLED, _OBJECTS = "shuffled shards", "shuffled objects"


@dataclass(frozen=True)
class Case:
    """What is read, and where."""

    size: int
    place: str

    @property
    def label(self) -> str:
        return f"{size_text(self.size)}, {self.place}"

    @property
    def clients(self) -> list[str]:
        return {
            "memory": [_PARSE, _MEMORY, _IN_MEMORY],
            "shuffled, 20 ms": [_SHUFFLED, _OBJECTS],
        }.get(self.place, [OURS, _FILES, _CONNECTOR])

    def verdicts(self, rounds: TimedRounds) -> Iterator[Verdict]:
        """The targets."""
        if self.place == "memory":
            least = 12 if self.size == 110 * KIB else 7
            for ours in (_PARSE, _MEMORY):
                yield Target("samples/s", _IN_MEMORY, least, least=True, ours=ours).verdict(rounds, Timed.rate)
        elif self.place == "no latency":
            yield Target("samples/s", _FILES, 3, least=True).verdict(rounds, Timed.rate)
        elif self.place == "20 ms":
            yield Target("samples/s", _CONNECTOR, 5, least=True).verdict(rounds, Timed.rate)
        else:
            yield Target("samples/s", _OBJECTS, 0.9, least=True, ours=_SHUFFLED).verdict(rounds, Timed.rate)


CASES = [
    Case(size, place) for size in (110 * KIB, 4 * KIB) for place in ("memory", "no latency", "20 ms", "shuffled, 20 ms")
]


def prepared(family: Family, location: Location) -> dict[str, Any]:
    """Writes the shards of a family and their index. Returns the fields of a job."""
    from torchobj.shards import TarIndex

    root = nginx.objects_folder([family]) / nginx.BUCKET
    name = f"shards-{family.name.rstrip('/')}-{family.count}"
    bodies = [b"".join(pieces(index, family.size)) for index in range(family.count)]
    files = shards_rivals.write_shards(root / name, bodies, _SHARDS)
    names = [f"{name}/{file.name}" for file in files]
    index = root / name / "index.parquet"
    location.enter()
    TarIndex.build([location.url(each) for each in names], config=store_config(location)).save(index)
    return {
        "files": [str(file) for file in files],
        "names": names,
        "samples": family.count,
        "index": str(index),
        "objects": family.names(),
    }


def cpu_s_per_1000(run: Timed) -> float:
    """CPU seconds per 1000 samples."""
    return run.cpu_s / run.items * 1000


def main() -> None:
    program = Program(__doc__, 5, ("a quarter of the samples and two rounds", 2)).has_cases()
    given = program.start()
    counts = {110 * KIB: 4096, 4 * KIB: 32_768}
    families = {size: Family(size, count // (4 if given.quick else 1)) for size, count in counts.items()}
    figures = [("samples/s", Timed.rate, 0), ("CPU-s per 1000", cpu_s_per_1000, 4)]
    done: list[TimedRounds] = []
    found: list[Verdict] = []
    with contextlib.ExitStack() as stack:
        locations = stack.enter_context(nginx.running(list(families.values()), list(_ENDPOINTS.values())))
        pool = timed.Clients("shards_rivals")
        stack.callback(pool.close)
        near = locations[nginx.PLAIN]
        jobs = {size: prepared(family, near) for size, family in families.items()}
        for case in program.selected(CASES, lambda case: case.label):
            endpoint = nginx.LATENCY if "20 ms" in case.place else nginx.PLAIN
            rounds = TimedRounds(case.label)
            clients = [name for name in case.clients if name not in given.without]

            def run(name: str, case: Case = case, at: Location = locations[endpoint]) -> Timed:
                return pool.run(name, at, jobs[case.size])

            timed.in_turn(clients, given.rounds, run, rounds.runs, rounds.failed)
            print(timed.table(rounds, figures, clients[0]), "", sep="\n", flush=True)
            done.append(rounds)
            found += case.verdicts(rounds)
    program.finish("shards", found, {"cases": [timed.fields(each) for each in done]})


if __name__ == "__main__":
    main()
