"""What do torch's distributed checkpoints cost with torchobj's StorageWriter and StorageReader? Microseconds per small
tensor compared with a writer and a reader without I/O, and bytes for a small part of a checkpoint.
`checkpoint_report` formats the tables. `python -m benchmarks.dcp NAME` is the fork server.
"""

import copy
import dataclasses
import functools
import gc
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from benchmarks.fork_server import ForkServer, serve
from benchmarks.lab import origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB
from benchmarks.measure import used_cpu_s
from benchmarks.report import OURS, Rounds
from benchmarks.states import States

NOTHING = "no-op"
ASKING = "no-op, planner asked"
STOCK = "stock, on disk"
_PART_TENSORS = 200
_PART_WANTED = (66, 133)
_LIMIT_S = 300.0


class _NoWriter(StorageWriter):
    """Writes nothing and keeps the metadata for the reader.

    With `asks` it asks the planner for each tensor, as every writer must: the planner's own cost.
    """

    metadata: Metadata | None = None

    def __init__(self, asks: bool) -> None:
        self.asks = asks

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        for item in plan.items if self.asks else ():
            planner.resolve_data(item)
        return _done([])

    def finish(self, metadata: Metadata, results: Any) -> None:
        del results
        self.metadata = metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return True


class _NoReader(StorageReader):
    """Reads nothing: the state stays unchanged. With `asks` it asks the planner for the destination of each tensor."""

    def __init__(self, metadata: Metadata, asks: bool) -> None:
        self._metadata, self._asks = metadata, asks

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items if self._asks else ():
            planner.commit_tensor(item, planner.resolve_tensor(item))
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return True


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@dataclass(frozen=True)
class Call:
    """One dcp.save or dcp.load."""

    tensors: int
    wall_s: float
    cpu_s: float

    def tensor_us(self) -> float:
        """Microseconds per tensor."""
        return self.wall_s / self.tensors * 1e6

    def tensor_cpu_us(self) -> float:
        return self.cpu_s / self.tensors * 1e6


@dataclass
class Calls(Rounds):
    """All rounds of saving or loading small tensors, alternating between the writers in one process."""

    label: str
    runs: dict[str, list[Call]] = field(default_factory=dict)

    def beside(self, figure: Callable[[Call], float], client: str, base: str) -> list[float]:
        """A figure minus that of another client, per round."""
        pairs = zip(self.runs[client], self.runs[base], strict=True)
        return [figure(run) - figure(other) for run, other in pairs]


@dataclass(frozen=True)
class Share:
    """The bytes read to load a few of many tensors."""

    tensors: int
    wanted: int
    read_bytes: int
    all_bytes: int

    def share(self) -> float:
        return self.read_bytes / self.all_bytes


def _ours(location: Location, folder: str) -> tuple[Callable[[], StorageWriter], Callable[[], StorageReader]]:
    from torchobj.checkpoint import StorageReader as Reader
    from torchobj.checkpoint import StorageWriter as Writer

    url, where = f"s3://{location.bucket}/{folder}", {"region": location.region, "endpoint_url": location.endpoint_url}
    return lambda: Writer(url, **where), lambda: Reader(url, **where)


def _timed(tensors: int, call: Callable[[], Any]) -> Call:
    gc.collect()
    started_s, started_cpu_s = time.perf_counter(), used_cpu_s()
    call()
    return Call(tensors, time.perf_counter() - started_s, used_cpu_s() - started_cpu_s)


def _pairs(
    location: Location, folder: str
) -> Iterator[tuple[str, Callable[[], StorageWriter], Callable[[], StorageReader]]]:
    for name in (NOTHING, ASKING):
        writer = _NoWriter(asks=name == ASKING)
        yield name, lambda by=writer: by, lambda by=writer: _NoReader(copy.deepcopy(by.metadata), by.asks)
    yield STOCK, lambda: dcp.FileSystemWriter(folder), lambda: dcp.FileSystemReader(folder)
    yield OURS, *_ours(location, "small")


def _check(found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Compares bytes: some are NaNs, which do not equal themselves."""
    for name, tensor in found.items():
        if not torch.equal(tensor.view(torch.int32), saved[name].view(torch.int32)):
            raise AssertionError(f"{name}: what was loaded is not what was saved")


def _small(location: Location, tensors: int, rounds: int) -> dict[str, Any]:
    """Saves and loads small tensors with each pair in turn, and compares what was loaded."""
    saved = States.of_tensors(tensors).build()["model"]
    calls: dict[str, dict[str, list[Any]]] = {"save": {}, "load": {}}
    with tempfile.TemporaryDirectory(prefix="torchobj-dcp-") as folder:
        pairs = list(_pairs(location, folder))
        # The first round is warm-up: torch imports modules, and connections are opened.
        for number, (name, make_writer, make_reader) in itertools.product(range(rounds + 1), pairs):
            loaded = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
            writer = make_writer()
            save = _timed(tensors, functools.partial(dcp.save, saved, storage_writer=writer, no_dist=True))
            reader = make_reader()
            load = _timed(tensors, functools.partial(dcp.load, loaded, storage_reader=reader, no_dist=True))
            if name not in (NOTHING, ASKING):
                _check(loaded, saved)
            if number:
                calls["save"].setdefault(name, []).append(dataclasses.asdict(save))
                calls["load"].setdefault(name, []).append(dataclasses.asdict(load))
    return calls


def _share(location: Location) -> dict[str, Any]:
    """Saves 200 tensors of 1 MiB and loads two."""
    writer, reader = _ours(location, "part")
    model = States(_PART_TENSORS, MIB, 0).build()["model"]
    weights = {name: tensor for name, tensor in model.items() if name.endswith("weight")}
    dcp.save(weights, storage_writer=writer(), no_dist=True)
    wanted = {name: torch.zeros_like(weights[name]) for name in (f"layers.{layer}.weight" for layer in _PART_WANTED)}
    before = origin.counters(location)
    dcp.load(wanted, storage_reader=reader(), no_dist=True)
    read = origin.counters(location) - before
    _check(wanted, weights)
    return dataclasses.asdict(Share(_PART_TENSORS, len(wanted), read.sent_bytes, _PART_TENSORS * MIB))


def _work(fields: dict[str, Any]) -> dict[str, Any]:
    location = Location(**fields["location"])
    location.enter()
    # The fork server froze its imports. Users do not: their garbage collector traverses torch, too.
    gc.unfreeze()
    # These warn that there is only one process, and that the stock writer overwrites its file.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    if fields["action"] == "share":
        return _share(location)
    return _small(location, fields["tensors"], fields["rounds"])


class Measuring:
    """Runs jobs, each in its own process, at an origin that keeps what is saved."""

    def __init__(self, location: Location) -> None:
        self._location, self._fork_server = dataclasses.asdict(location), ForkServer("benchmarks.dcp", "dcp")

    def small(self, tensors: int, rounds: int) -> list[Calls]:
        """Saves and loads `tensors` small tensors.

        Raises:
            RuntimeError: Something failed, or what was loaded is not what was saved.
        """
        job = {"location": self._location, "action": "small", "tensors": tensors, "rounds": rounds}
        found = self._fork_server.run(job, _LIMIT_S)
        return [
            Calls(
                f"dcp.{action}, {tensors} small tensors", {name: [Call(**run) for run in runs] for name, runs in each}
            )
            for action, each in ((action, clients.items()) for action, clients in found.items())
        ]

    def share(self) -> Share:
        """Loads one percent of the tensors of a checkpoint.

        Raises:
            RuntimeError: Something failed, or what was loaded is not what was saved.
        """
        return Share(**self._fork_server.run({"location": self._location, "action": "share"}, _LIMIT_S))

    def close(self) -> None:
        self._fork_server.close()


if __name__ == "__main__":
    serve(_work)
