"""Run by `test_pending_save_kills.py`: for each line of orders a child that saves a step, to be killed meanwhile.

torch is imported once, and each child is forked from the process that has done no more than that.
"""

import dataclasses

import torch

from tests.support.killing import serve
from torchobj import AdvancedOptions
from torchobj.checkpoint import CheckpointManager


def save(orders):
    """Saves a step of 11 MB: in three parts, or as several objects."""
    config = dataclasses.replace(
        orders["config"], part_bytes=5 << 20, advanced=AdvancedOptions(whole_below_bytes=5 << 20)
    )
    manager = CheckpointManager(orders["url"], keep_last=2, config=config, sharded=orders["sharded"])
    step = orders["step"]
    state = {"x": torch.full((2_700_000,), float(step)), "step": step}
    if orders["async"]:
        manager.save_async(step, state).result()
    else:
        manager.save(step, state, overwrite=orders["overwrite"])


if __name__ == "__main__":
    serve(save)
