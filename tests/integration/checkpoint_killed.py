"""Run by `test_manager_kills.py`: for each line of orders a child that saves a step, to be killed meanwhile.

torch is imported once, and each child is forked from the process that has done no more than that.
"""

import json
import os
import sys

import torch

from torchobj import StoreConfig
from torchobj.checkpoint import CheckpointManager


def save(orders):
    """Saves one step of 18 MB: in parts, or as several objects."""
    config = StoreConfig(**orders["config"], part_bytes=5 << 20, whole_below_bytes=5 << 20)
    manager = CheckpointManager(orders["url"], keep_last=2, config=config, sharded=orders["sharded"])
    step = orders["step"]
    state = {"x": torch.full((4_500_000,), float(step)), "step": step}
    if orders["async"]:
        manager.save_async(step, state).result()
    else:
        manager.save(step, state, overwrite=orders["overwrite"])


def main():
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            save(json.loads(line))
            os._exit(0)
        print(json.dumps({"pid": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"killed_by": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None}), flush=True)


if __name__ == "__main__":
    main()
