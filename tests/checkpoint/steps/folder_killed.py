"""Run by `test_folder_checkpoints_kills.py`: for each line of orders a child that saves or restores a folder, to be killed
meanwhile.
"""

import dataclasses
from pathlib import Path

from tests.support.killing import serve
from torchobj import AdvancedOptions
from torchobj.checkpoint import FolderCheckpoints

#: Sizes of the files: one is sent in two parts, and one is equal in each step.
SIZES = {"model.bin": 6 << 20, "optimizer.pt": 100_000, "sub/rng_state_0.pth": 100, "tokenizer.json": 50_000}


def content_of(step):
    """The bytes of the files of a step."""
    return {name: bytes([step % 256 if name != "tokenizer.json" else 0]) * size for name, size in SIZES.items()}


def work(orders):
    config = dataclasses.replace(
        orders["config"], part_bytes=5 << 20, advanced=AdvancedOptions(whole_below_bytes=5 << 20)
    )
    checkpoints = FolderCheckpoints(orders["url"], keep_last=2, config=config)
    step, parent = orders["step"], Path(orders["parent"])
    if orders["restore"]:
        checkpoints.restore(step, parent / f"restored-{step}")
        return
    for name, data in content_of(step).items():
        (parent / f"checkpoint-{step}" / name).parent.mkdir(parents=True, exist_ok=True)
        (parent / f"checkpoint-{step}" / name).write_bytes(data)
    if orders["async"]:
        checkpoints.save_async(step, parent / f"checkpoint-{step}").result()
    else:
        checkpoints.save(step, parent / f"checkpoint-{step}", overwrite=True)


if __name__ == "__main__":
    serve(work)
