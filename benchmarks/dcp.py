"""What do torch's distributed checkpoints cost with torchobj's StorageWriter and StorageReader? Microseconds per small
tensor compared with a writer and a reader without I/O, and bytes for a small part of a checkpoint. Run by
`checkpoint.py --only dcp`.
"""

import copy
import gc
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from benchmarks.harness import OURS, Part, Rounds, Stopwatch, Timed, Verdict, targets
from benchmarks.harness.states import States
from benchmarks.lab import origin
from benchmarks.lab.location import Location
from benchmarks.lab.objects import MIB

NOTHING = "no-op"
ASKING = "no-op, planner asked"
STOCK = "stock, on disk"
_PART_TENSORS = 200
_PART_WANTED = (66, 133)
_TENSOR_US = 30
_SHARE = 0.015


class _NoWriter(dcp.FileSystemWriter):
    """Writes nothing and keeps the metadata for the reader.

    With `asks` it asks the planner for each tensor, as every writer and reader must: the planner's own cost.
    """

    metadata: Metadata | None = None

    def __init__(self, folder: str, asks: bool) -> None:
        super().__init__(folder)
        self.asks = asks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        for item in plan.items if self.asks else ():
            planner.resolve_data(item)
        return _done([])

    def finish(self, metadata: Metadata, results: Any) -> None:
        del results
        self.metadata = metadata


class _NoReader(dcp.FileSystemReader):
    """Reads nothing: the state stays unchanged."""

    def __init__(self, folder: str, writer: _NoWriter) -> None:
        super().__init__(folder)
        self._metadata, self._asks = copy.deepcopy(writer.metadata), writer.asks

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return self._metadata

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items if self._asks else ():
            planner.commit_tensor(item, planner.resolve_tensor(item))
        return _done(None)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Calls(Rounds):
    """All rounds of saving or loading small tensors, alternating between the writers in one process."""

    def shown(self) -> str:
        """Microseconds per tensor."""

        def beside(figure: str, base: str) -> Callable[[str], str]:
            bases = (ASKING, NOTHING)
            return lambda client: "" if client in bases else self.difference(figure, base, client).text(1)

        columns = {"rounds": self.count, "us for each": self.spreads("us", 1)}
        columns |= {f"beside {base}": beside("us", base) for base in (ASKING, NOTHING)}
        columns[f"CPU us beside {ASKING}"] = beside("cpu_us", ASKING)
        return self.table("median (min-max)", columns)

    def verdicts(self) -> Iterator[Verdict]:
        """torch's contract requires a writer and a reader to ask the planner for each tensor: that cost is the base."""
        for base in (ASKING, NOTHING):
            target = f"{self.label}: <= {_TENSOR_US} us for each on top of {base}"
            found = self.difference("us", base)
            yield targets.bounded(target, found, 1, " us", most=_TENSOR_US, beyond=base == NOTHING)


def _ours(location: Location, folder: str) -> tuple[Callable[[], StorageWriter], Callable[[], StorageReader]]:
    from torchobj.checkpoint import StorageReader as Reader
    from torchobj.checkpoint import StorageWriter as Writer

    url, config = f"s3://{location.bucket}/{folder}", location.config()
    return lambda: Writer(url, config=config), lambda: Reader(url, config=config)


def _pairs(
    location: Location, folder: str
) -> Iterator[tuple[str, Callable[[], StorageWriter], Callable[[], StorageReader]]]:
    for name in (NOTHING, ASKING):
        writer = _NoWriter(folder, asks=name == ASKING)
        yield name, lambda by=writer: by, lambda by=writer: _NoReader(folder, by)
    yield STOCK, lambda: dcp.FileSystemWriter(folder), lambda: dcp.FileSystemReader(folder)
    yield OURS, *_ours(location, "small")


def _check(found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Compares bytes: some are NaNs, which do not equal themselves."""
    for name, tensor in found.items():
        if not torch.equal(tensor.view(torch.int32), saved[name].view(torch.int32)):
            raise AssertionError(f"{name}: what was loaded is not what was saved")


def _timed(tensors: int, call: Callable[..., Any], *args: Any, **more: Any) -> Timed:
    with Stopwatch() as watch:
        call(*args, **more, no_dist=True)
    return watch.timed(tensors)


def _enter(location: Location) -> None:
    location.enter()
    # The fork server froze its imports. Users do not: their garbage collector traverses torch, too.
    gc.unfreeze()
    # These warn that there is only one process, and that the stock writer overwrites its file.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")


def small(location: Location, tensors: int, rounds: int) -> Part:
    """Saves and loads small tensors with each pair in turn, and compares what was loaded."""
    _enter(location)
    saved = States.of_tensors(tensors).build()["model"]
    saves, loads = (Calls(f"dcp.{action}, {tensors} small tensors") for action in ("save", "load"))
    with tempfile.TemporaryDirectory(prefix="torchobj-dcp-") as folder:
        pairs = list(_pairs(location, folder))
        # The first round is warm-up: torch imports modules, and connections are opened.
        for number, (name, make_writer, make_reader) in itertools.product(range(rounds + 1), pairs):
            loaded = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
            writer = make_writer()
            save = _timed(tensors, dcp.save, saved, storage_writer=writer)
            reader = make_reader()
            load = _timed(tensors, dcp.load, loaded, storage_reader=reader)
            if name not in (NOTHING, ASKING):
                _check(loaded, saved)
            if number:
                saves.runs.setdefault(name, []).append(save)
                loads.runs.setdefault(name, []).append(load)
    return [saves, loads], [*saves.verdicts(), *loads.verdicts()]


def share(location: Location) -> Part:
    """Saves 200 tensors of 1 MiB and loads two, at an origin that counts the bytes that are read."""
    _enter(location)
    writer, reader = _ours(location, "part")
    model = States(_PART_TENSORS, MIB, 0).build()["model"]
    weights = {name: tensor for name, tensor in model.items() if name.endswith("weight")}
    dcp.save(weights, storage_writer=writer(), no_dist=True)
    wanted = {name: torch.zeros_like(weights[name]) for name in (f"layers.{layer}.weight" for layer in _PART_WANTED)}
    before = origin.counters(location)
    dcp.load(wanted, storage_reader=reader(), no_dist=True)
    read_bytes = (origin.counters(location) - before)["sent_bytes"]
    _check(wanted, weights)
    found = read_bytes / (_PART_TENSORS * MIB)
    target = f"dcp.load of {len(wanted)} of {_PART_TENSORS} tensors of 1 MiB: <= {_SHARE:.1%} of the bytes"
    return [], [Verdict(target, f"{found:.2%} ({read_bytes} of {_PART_TENSORS * MIB} bytes)", found <= _SHARE)]
