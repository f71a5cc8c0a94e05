"""How long does a background save block the training loop, that is until the state is copied?
`checkpoint_report` formats the table. `python -m benchmarks.blocking NAME` is the fork server.
"""

import dataclasses
import gc
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.fork_server import ForkServer, serve
from benchmarks.measure import used_cpu_s
from benchmarks.report import OURS, Rounds
from benchmarks.states import States

MEMCPY, CLONE = "memcpy", "clone"
SHARDED = f"{OURS}, sharded"
FIRST = f"{OURS}, a first save"
STOCK = "dcp.async_save, stock"
# A pause is short, and a single one has little significance.
_TIMES = 3
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Stop:
    """One copy of the state, or one background save."""

    wall_s: float
    cpu_s: float

    def milliseconds(self) -> float:
        return self.wall_s * 1e3


@dataclass
class Stops(Rounds):
    """All rounds, alternating between the ways, in one process."""

    label: str
    runs: dict[str, list[Stop]] = field(default_factory=dict)


def _ways(tensors: dict[str, torch.Tensor], stack: ExitStack) -> dict[str, Callable[[int], Any]]:
    """Returns what is timed, by name; each call returns its copy, or the save that it started."""
    from torchobj.checkpoint import CheckpointManager

    mesh = init_device_mesh("cpu", (1,))
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    used = [torch.zeros_like(tensor) for tensor in tensors.values()]
    whole = stack.enter_context(CheckpointManager("memory://blocking/whole", keep_last=1))
    sharded = stack.enter_context(CheckpointManager("memory://blocking/sharded", keep_last=1, sharded=True))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchobj-blocking-"))

    def memcpy(_: int) -> None:
        for copy, tensor in zip(used, tensors.values(), strict=True):
            copy.copy_(tensor)

    def first(step: int) -> Any:
        manager = CheckpointManager("memory://blocking/first", keep_last=1)
        return manager.save_async(step, tensors)

    return {
        MEMCPY: memcpy,
        CLONE: lambda _: [tensor.clone() for tensor in tensors.values()],
        OURS: lambda step: whole.save_async(step, tensors),
        SHARDED: lambda step: sharded.save_async(step, parts),
        FIRST: first,
        STOCK: lambda _: dcp.async_save(parts, storage_writer=dcp.FileSystemWriter(folder)),
    }


def _work(fields: dict[str, Any]) -> dict[str, Any]:
    # These warn that there is only one process, and that the stock writer overwrites its file.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = States(**fields["states"]).build()["model"]
    stops: dict[str, list[Any]] = {}
    with ExitStack() as stack:
        ways = _ways(tensors, stack)
        # The first round is warm-up: memory is reused from the second save on.
        for number, (name, way) in itertools.product(range(fields["rounds"] + 1), ways.items()):
            gc.collect()
            started_s, started_cpu_s = time.perf_counter(), used_cpu_s()
            made = way(number)
            stop = Stop(time.perf_counter() - started_s, used_cpu_s() - started_cpu_s)
            if name not in (MEMCPY, CLONE):
                made.result()
            del made
            if number:
                stops.setdefault(name, []).append(dataclasses.asdict(stop))
    dist.destroy_process_group()
    return stops


def run(states: States, rounds: int) -> Stops:
    """Copies and saves a state in each way.

    Raises:
        RuntimeError: Something failed.
    """
    fork_server = ForkServer("benchmarks.blocking", "blocking")
    try:
        found = fork_server.run({"states": dataclasses.asdict(states), "rounds": _TIMES * rounds}, _LIMIT_S)
    finally:
        fork_server.close()
    label = f"until save_async returns, {states.payload_bytes >> 20} MiB"
    return Stops(label, {name: [Stop(**stop) for stop in all_of_it] for name, all_of_it in found.items()})


if __name__ == "__main__":
    serve(_work)
