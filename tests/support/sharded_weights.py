"""A state of tensors of many kinds, sharded over two ranks by rows, by columns, unevenly, or not at all."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def whole():
    """The whole tensors."""
    return {
        "rows": torch.arange(40_000.0).view(400, 100),
        "columns": torch.arange(60_000, dtype=torch.bfloat16).view(200, 300),
        "uneven": torch.arange(21, dtype=torch.int64).view(7, 3),
        "one row": torch.arange(12, dtype=torch.uint8).view(1, 12),
        "middle": torch.arange(240, dtype=torch.int32).view(4, 6, 10),
        "replicated": torch.arange(9, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }


PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "uneven": Shard(0), "one row": Shard(0), "middle": Shard(1)}


def joined():
    """Initialises a process group, and returns the mesh of two ranks."""
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (2,))


def sharded(mesh, placements=None):
    """The state as each rank has it: DTensors, and plain tensors that all ranks have."""
    placements = PLACEMENTS if placements is None else placements
    state = whole()
    return state | {name: distribute_tensor(state[name], mesh, [placement]) for name, placement in placements.items()}


def blank(state):
    """The same state with other values."""
    found = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in found.values():
        getattr(tensor, "_local_tensor", tensor).fill_(1)
    return found


def differing(state):
    """The names of tensors whose values on this rank are not those of the state `sharded`."""
    expected = whole()
    full = {
        name: tensor.redistribute(placements=[Replicate()]).to_local() if hasattr(tensor, "redistribute") else tensor
        for name, tensor in state.items()
    }
    return [name for name, tensor in full.items() if not torch.equal(tensor, expected[name])]
