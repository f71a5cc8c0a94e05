"""Helpers for tests of the manager."""

import threading

import torch
import torch.distributed as dist

from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps import state_content

#: Large enough to be sent in parts.
LARGE = 3_000_000


def tensor(value, size=4):
    return torch.full((size,), float(value))


def of_ranks(url, config, **settings):
    """A manager in a rank that `run_ranks` has started."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return CheckpointManager(url, config=config, **settings)


def outcome(call):
    """The result of a call, or the name and text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def whole_and_shard(value):
    """The same tensor whole, and sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(16.0).reshape(8, 2) + value
    return whole, distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])


def saved_value(manager, step="latest"):
    return manager.restore(step)["x"][0].item()


def data_keys(bucket, step=None):
    folder = "run/steps/" if step is None else f"run/steps/{step:012}-"
    return [key for key in bucket.keys() if key.startswith(folder)]


def nothing_of(bucket, step):
    """Returns whether a step has no object, no upload and no commit."""
    return (
        data_keys(bucket, step) == [] and bucket.uploads() == [] and f"run/commits/{step:012}.json" not in bucket.keys()
    )


class Gate:
    """Blocks the writing of data until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.reached = threading.Event(), threading.Event()
        real = state_content.save_counted

        def save(*given, **named):
            self.reached.set()
            assert self.open.wait(60)
            return real(*given, **named)

        monkeypatch.setattr(state_content, "save_counted", save)


class Holder:
    """An object of the user that contains a tensor."""

    def __init__(self, value):
        self.inner = value
