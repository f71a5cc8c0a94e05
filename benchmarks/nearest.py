"""How fast is a restore from a local disk, compared with reading its files by pread, and with a bucket of limited
bandwidth? Run by `checkpoint.py --only nearest`.
"""

import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch.distributed as dist

from benchmarks.harness import Part, Rounds, Stopwatch, Verdict, targets
from benchmarks.harness.states import States
from benchmarks.lab.location import Location

#: What the bucket sends, in bytes per second.
CAP = 125_000_000
PREAD, DISK, BUCKET = "pread of the files", "torchobj, the disk", "torchobj, the bucket"
#: Whether the files are in the page cache.
WARM, COLD = "page cache warm", "page cache cold"
_BLOCK_BYTES = 16 << 20


class Restores(Rounds):
    """All rounds, alternating between the ways, in one process."""

    def shown(self) -> str:
        """Throughput of each way."""
        columns = {"rounds": self.count, "MB/s": self.spreads("mb_per_s", 0)}
        return self.table(f"the bucket sends {CAP / 1e6:g} MB/s: median (min-max)", columns)

    def verdicts(self) -> Iterator[Verdict]:
        yield targets.ratio(self, "MB/s", "mb_per_s", PREAD, least=0.9, ours=DISK)
        yield targets.ratio(self, "MB/s", "mb_per_s", BUCKET, least=5.0, ours=DISK)


def _forget(files: list[Path]) -> None:
    """Drops files from the page cache."""
    for path in files:
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def _pread(files: list[Path], memory: list[np.ndarray]) -> None:
    for path, buffer in zip(files, memory, strict=True):
        number = os.open(path, os.O_RDONLY)
        view, at = memoryview(buffer), 0
        while at < len(view):
            at += os.preadv(number, [view[at : at + _BLOCK_BYTES]], at)
        os.close(number)


def measure(location: Location, states: States, rounds: int, *, sharded: bool) -> Part:
    """Reads a checkpoint in each way."""
    from torchobj.checkpoint import CheckpointManager

    location.enter()
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    size, kind = f"{states.payload_bytes >> 20} MiB", "shards" if sharded else "file"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchobj-nearest-"))
        url, config = location.url(f"nearest-{kind}"), location.config()
        near = stack.enter_context(CheckpointManager(url, local=folder, sharded=sharded, config=config))
        far = stack.enter_context(CheckpointManager(url, sharded=sharded, config=config))
        near.save(1, {"model": states.build()["model"]})
        files = sorted(path for path in Path(folder).glob("*/steps/*/*") if path.is_file())
        memory = [np.ones(path.stat().st_size, np.uint8) for path in files]
        into = {"model": states.build()["model"]}
        ways: dict[str, Callable[[], object]] = {
            PREAD: lambda: _pread(files, memory),
            DISK: lambda: near.restore(into=into),
            BUCKET: lambda: far.restore(into=into),
        }
        cases = {cache: Restores(f"restore {size}, {kind}, {cache}") for cache in (WARM, COLD)}
        # The first round is warm-up.
        for number, (cache, case) in itertools.product(range(rounds + 1), cases.items()):
            for name, way in ways.items():
                if name == BUCKET and cache == COLD:
                    continue
                if cache == COLD:
                    _forget(files)
                with Stopwatch() as watch:
                    way()
                if number:
                    case.runs.setdefault(name, []).append(watch.timed(states.payload_bytes))
        cases[COLD].runs[BUCKET] = cases[WARM].runs[BUCKET]
    dist.destroy_process_group()
    return list(cases.values()), [verdict for case in cases.values() for verdict in case.verdicts()]
