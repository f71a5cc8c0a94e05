"""How much slower is a training loop while a checkpoint uploads in the same process and to the same server?
`checkpoint_report` formats the tables. `python -m benchmarks.beside NAME` is the fork server.
"""

import dataclasses
import functools
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.feeds import epochs
from benchmarks.fork_server import ForkServer, serve
from benchmarks.lab.location import Location
from benchmarks.lab.objects import KIB, Family
from benchmarks.lab.prepare import upload
from benchmarks.report import Rounds
from benchmarks.states import States

ALONE, BESIDE = "loop alone", "beside an upload"
CAP_MBIT_S = 400.0
LATENCY_MS = 20
_BATCH, _WORKERS = 64, 2
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Scale:
    """How much is read and saved."""

    objects: int
    state_mib: int
    min_s: float
    """Minimum duration of each loop; it always runs whole epochs."""

    @property
    def family(self) -> Family:
        """The objects that the loop reads."""
        return Family(110 * KIB, self.objects)

    @property
    def states(self) -> States:
        """The state that is saved repeatedly."""
        return States.of_mib(self.state_mib)


FULL = Scale(2048, 256, 5.0)
QUICK = Scale(512, 64, 0.5)


@dataclass(frozen=True)
class Phase:
    """A loop over whole epochs."""

    samples: int
    wall_s: float
    uploaded_bytes: int = 0
    upload_s: float = 0.0

    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.wall_s

    def upload_mbit_s(self) -> float:
        """Throughput of the uploads while they ran, which may be longer than the loop."""
        return self.uploaded_bytes * 8 / 1e6 / self.upload_s if self.upload_s else 0.0


@dataclass
class Phases(Rounds):
    """The loop alone and during an upload, alternating in one process."""

    label: str
    runs: dict[str, list[Phase]] = field(default_factory=dict)

    def lost(self) -> list[float]:
        """The share of samples per second lost to an upload, per round."""
        pairs = zip(self.runs[ALONE], self.runs[BESIDE], strict=True)
        return [1 - beside.rate() / alone.rate() for alone, beside in pairs]


class _Uploads:
    """Saves a state repeatedly in a thread."""

    def __init__(self, save: Callable[[], Any]) -> None:
        self._save, self._end, self._saved = save, threading.Event(), 0
        self._started_s, self._ended_s = time.perf_counter(), 0.0
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._end.is_set():
                self._save()
                self._saved += 1
        except BaseException as error:
            self._failed = error
        self._ended_s = time.perf_counter()

    def close(self) -> tuple[int, float]:
        """Waits for the last save; returns the number of saves and their duration."""
        self._end.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        return self._saved, self._ended_s - self._started_s


def _loop(loader: Any, min_s: float, step_s: float) -> tuple[int, float]:
    """Runs epochs for at least `min_s`; returns samples and seconds."""
    samples, started_s = 0, time.perf_counter()
    for _ in epochs(loader):
        for batch in loader:
            samples += len(batch.urls)
            if step_s:
                time.sleep(step_s)
        if time.perf_counter() - started_s >= min_s:
            break
    return samples, time.perf_counter() - started_s


def _measure(location: Location, scale: Scale, rounds: int, half_speed: bool) -> dict[str, Any]:
    """Runs loops alone and during an upload, alternating."""
    import torchobj

    location.enter()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    s3 = torchobj.S3Options(endpoint_url=location.endpoint_url, region=location.region)
    config = torchobj.StoreConfig(s3=s3, upload_mbit_s=CAP_MBIT_S)
    dataset = torchobj.S3MapDataset(f"s3://{location.bucket}/{scale.family.name}", config=config)
    sampler = torchobj.ElasticDistributedSampler(dataset, num_replicas=1, rank=0)
    more = {"num_workers": _WORKERS, "persistent_workers": True}
    loader = torchobj.DataLoader(dataset, batch_size=_BATCH, sampler=sampler, **more)
    state = scale.states.build()
    save = functools.partial(torchobj.save, state, f"s3://{location.bucket}/beside.pt", config=config)
    # Warm-up: workers start, connections are opened, the concurrency limit grows.
    _loop(loader, scale.min_s, 0.0)
    samples, wall_s = _loop(loader, scale.min_s, 0.0)
    step_s = 2 * _BATCH * wall_s / samples if half_speed else 0.0
    phases: dict[str, list[dict[str, Any]]] = {ALONE: [], BESIDE: []}
    for number in range(rounds):
        # The order alternates because the second loop finds a warmer process.
        for name in (ALONE, BESIDE) if number % 2 else (BESIDE, ALONE):
            uploads = _Uploads(save) if name == BESIDE else None
            looped = _loop(loader, scale.min_s, step_s)
            saves, upload_s = uploads.close() if uploads is not None else (0, 0.0)
            phase = Phase(*looped, saves * scale.states.payload_bytes, upload_s)
            phases[name].append(dataclasses.asdict(phase))
    return phases


def _work(fields: dict[str, Any]) -> dict[str, Any]:
    return _measure(Location(**fields.pop("location")), Scale(**fields.pop("scale")), **fields)


def run(location: Location, scale: Scale, rounds: int) -> list[Phases]:
    """Writes the objects, then runs a loop without work per batch and one whose trainer runs at half its speed.

    Raises:
        RuntimeError: Something failed.
    """
    upload(location, [scale.family])
    fork_server = ForkServer("benchmarks.beside", "beside")
    job = {"location": dataclasses.asdict(location), "scale": dataclasses.asdict(scale), "rounds": rounds}
    try:
        found = {
            kind: fork_server.run(job | {"half_speed": kind == "half-speed trainer"}, _LIMIT_S)
            for kind in ("trainer that does nothing", "half-speed trainer")
        }
    finally:
        fork_server.close()
    return [
        Phases(
            f"loop, {LATENCY_MS} ms, {kind}",
            {name: [Phase(**phase) for phase in runs] for name, runs in by_name.items()},
        )
        for kind, by_name in found.items()
    ]


if __name__ == "__main__":
    serve(_work)
