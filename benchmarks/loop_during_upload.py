"""How much slower is a training loop while a checkpoint uploads in the same process and to the same server? Run by
`checkpoint.py --only loop`.
"""

import functools
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Part, Rounds, Spread, Stopwatch, Timed, Verdict, targets
from benchmarks.harness.rivals.feeds import epochs
from benchmarks.harness.states import States
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, Family

ALONE, BESIDE = "loop alone", "beside an upload"
CAP_MBIT_S = 400.0
LATENCY_MS = 20
_BATCH, _WORKERS = 64, 2
_HALF_SPEED = "half-speed trainer"
#: A loop without work per batch, and one whose trainer runs at half its speed.
KINDS = ("trainer that does nothing", _HALF_SPEED)
_LOST = 0.1


@dataclass(frozen=True)
class Scale:
    """How much is read and saved."""

    family: Family
    """The objects that the loop reads."""
    states: States
    """The state that is saved repeatedly."""
    min_s: float
    """Minimum duration of each loop; it always runs whole epochs."""


FULL = Scale(Family(110 * KIB, 2048), States.of_mib(256), 5.0)
QUICK = Scale(Family(110 * KIB, 512), States.of_mib(64), 0.5)


@dataclass(frozen=True, kw_only=True)
class Phase(Timed):
    """Samples of a loop over whole epochs."""

    uploaded_bytes: int
    upload_s: float

    @property
    def upload_mbit_s(self) -> float | None:
        """Throughput of the uploads while they ran, which may be longer than the loop."""
        return self.uploaded_bytes * 8 / 1e6 / self.upload_s if self.upload_s else None


class Phases(Rounds):
    """The loop alone and during an upload, alternating in one process."""

    def shown(self) -> str:
        """Samples per second."""
        columns = {
            "rounds": self.count,
            "samples/s": self.spreads("rate", 0),
            "upload Mbit/s": self.spreads("upload_mbit_s", 0),
        }
        return self.table(f"uploads capped at {CAP_MBIT_S:g} Mbit/s: median (min-max)", columns)

    def verdict(self) -> Verdict:
        """The share of samples per second lost to an upload, per round."""
        pairs = zip(self.runs[ALONE], self.runs[BESIDE], strict=True)
        lost = Spread.of([100 * (1 - beside.rate / alone.rate) for alone, beside in pairs])
        target = f"{self.label}: loses <= {_LOST:.0%} of samples/s beside an upload"
        return targets.bounded(target, lost, 1, " %", most=100 * _LOST)


def _upload(save: Callable[[], Any], end: threading.Event) -> tuple[int, float]:
    """Saves a state repeatedly, and the last one whole; returns the number of saves and their duration."""
    saves, started_s = 0, time.perf_counter()
    while not end.is_set():
        save()
        saves += 1
    return saves, time.perf_counter() - started_s


def _loop(loader: Any, min_s: float, step_s: float) -> Timed:
    """Runs epochs for at least `min_s`."""
    samples, started_s = 0, time.perf_counter()
    with Stopwatch() as watch:
        for _ in epochs(loader):
            for batch in loader:
                samples += len(batch.urls)
                if step_s:
                    time.sleep(step_s)
            if time.perf_counter() - started_s >= min_s:
                break
    return watch.timed(samples)


def measure(location: Location, scale: Scale, rounds: int, kind: str) -> Part:
    """Runs loops alone and during an upload, alternating."""
    import torchobj

    location.enter()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    config = location.config(upload_mbit_s=CAP_MBIT_S)
    dataset = torchobj.S3MapDataset(location.url(scale.family.name), config=config)
    sampler = torchobj.ElasticDistributedSampler(dataset, num_replicas=1, rank=0)
    workers = {"num_workers": _WORKERS, "persistent_workers": True}
    loader = torchobj.DataLoader(dataset, batch_size=_BATCH, sampler=sampler, **workers)
    save = functools.partial(torchobj.save, scale.states.build(), location.url("beside.pt"), config=config)
    # Warm-up: workers start, connections are opened, the concurrency limit grows.
    _loop(loader, scale.min_s, 0.0)
    step_s = 2 * _BATCH / _loop(loader, scale.min_s, 0.0).rate if kind == _HALF_SPEED else 0.0
    phases = Phases(f"loop, {LATENCY_MS} ms, {kind}", {ALONE: [], BESIDE: []})
    threads = ThreadPoolExecutor(1)
    for number in range(rounds):
        # The order alternates because the second loop finds a warmer process.
        for name in (ALONE, BESIDE) if number % 2 else (BESIDE, ALONE):
            end = threading.Event()
            uploads = threads.submit(_upload, save, end) if name == BESIDE else None
            looped = _loop(loader, scale.min_s, step_s)
            end.set()
            saves, upload_s = uploads.result() if uploads is not None else (0, 0.0)
            uploaded_bytes = saves * scale.states.payload_bytes
            phases.runs[name].append(Phase(**vars(looped), uploaded_bytes=uploaded_bytes, upload_s=upload_s))
    return [phases], [phases.verdict()]
