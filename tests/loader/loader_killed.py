"""Run by `test_killed_worker.py`: a training loop that prints its worker processes and goes on until it is killed."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

from torch.utils.data import RandomSampler

import torchobj


def arena():
    """Returns the inode of the arena's file, by which other processes can identify it."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:torchobj-arena" in os.readlink(entry):
                return os.stat(entry).st_ino
        except FileNotFoundError:
            continue
    return None


def tree(pid):
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def main(folder, context):
    multiprocessing.set_forkserver_preload(["torchobj.loader"])
    data = torchobj.ObjectMapDataset(f"file://{folder}/")
    loader = torchobj.DataLoader(
        data,
        batch_size=4,
        sampler=RandomSampler(data, replacement=True, num_samples=10**9),
        num_workers=2,
        multiprocessing_context=context,
    )
    for step, _ in enumerate(loader):
        if step == 2:
            print(json.dumps({"pids": tree(os.getpid()), "arena": arena()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
