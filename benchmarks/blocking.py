"""How long does a background save block the training loop, that is until the state is copied? Run by
`checkpoint.py --only blocking`.
"""

import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.harness import OURS, Part, Rounds, Spread, Stopwatch, Verdict, targets
from benchmarks.harness.states import States

MEMCPY, CLONE = "memcpy", "clone"
SHARDED = f"{OURS}, sharded"
FIRST = f"{OURS}, a first save"
LOCAL = f"{OURS}, local="
SHARDED_LOCAL = f"{OURS}, sharded, local="
STOCK = "dcp.async_save, stock"
# A pause is short, and a single one has little significance.
_TIMES = 3
_MEMCPY = 1.2
_LOCAL = 1.05


class Stops(Rounds):
    """All rounds, alternating between the ways, in one process."""

    def shown(self) -> str:
        """Milliseconds for which the loop is blocked."""
        columns = {
            "rounds": self.count,
            "ms": lambda name: Spread.of([run.wall_s * 1000 for run in self.runs[name]]).text(0),
            "of a memcpy": lambda name: f"{self.ratio('wall_s', MEMCPY, name).text(2)}x",
            "CPU ms": lambda name: Spread.of([run.cpu_s * 1000 for run in self.runs[name]]).text(0),
        }
        return self.table("median (min-max)", columns)

    def verdicts(self) -> Iterator[Verdict]:
        for name in (OURS, SHARDED):
            target = f"{self.label}, {name}: <= {_MEMCPY}x one memcpy"
            yield targets.bounded(target, self.ratio("wall_s", MEMCPY, name), 2, "x", most=_MEMCPY)
        for name, without in ((LOCAL, OURS), (SHARDED_LOCAL, SHARDED)):
            target = f"{self.label}, {name}: <= {_LOCAL}x the same without it"
            yield targets.bounded(target, self.ratio("wall_s", without, name), 2, "x", most=_LOCAL)


def _ways(tensors: dict[str, torch.Tensor], stack: ExitStack) -> dict[str, Callable[[int], Any]]:
    """Returns what is timed, by name; each call returns its copy, or the save that it started."""
    from torchobj.checkpoint import CheckpointManager

    mesh = init_device_mesh("cpu", (1,))
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
    used = [torch.zeros_like(tensor) for tensor in tensors.values()]
    whole = stack.enter_context(CheckpointManager("memory://blocking/whole", keep_last=1))
    sharded = stack.enter_context(CheckpointManager("memory://blocking/sharded", keep_last=1, sharded=True))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchobj-blocking-"))
    local = {"keep_last": 1, "local": f"{folder}/local"}
    near = stack.enter_context(CheckpointManager("memory://blocking/near", **local))
    near_shards = stack.enter_context(
        CheckpointManager("memory://blocking/near-shards", sharded=True, **(local | {"local": f"{folder}/shards"}))
    )

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
        LOCAL: lambda step: near.save_async(step, tensors),
        SHARDED_LOCAL: lambda step: near_shards.save_async(step, parts),
        FIRST: first,
        STOCK: lambda _: dcp.async_save(parts, storage_writer=dcp.FileSystemWriter(folder)),
    }


def measure(states: States, rounds: int) -> Part:
    """Copies and saves a state in each way."""
    # These warn that there is only one process, and that the stock writer overwrites its file.
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = states.build()["model"]
    stops = Stops(f"until save_async returns, {states.payload_bytes >> 20} MiB")
    with ExitStack() as stack:
        ways = _ways(tensors, stack)
        # The first round is warm-up: memory is reused from the second save on.
        for number, (name, way) in itertools.product(range(_TIMES * rounds + 1), ways.items()):
            with Stopwatch() as watch:
                made = way(number)
            if name not in (MEMCPY, CLONE):
                made.result()
            del made
            if number:
                stops.runs.setdefault(name, []).append(watch.timed())
    dist.destroy_process_group()
    return [stops], list(stops.verdicts())
