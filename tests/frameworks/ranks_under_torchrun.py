"""A rank under `torchrun`: reads its share of a folder in two epochs and writes its samples to a file."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler

import torchobj
from torchobj import _torchobj


def key_and_size(reader):
    return int(reader.key[-2:]), len(bytes(reader))


def main(folder, out):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=key_and_size)
    sampler = DistributedSampler(data, seed=7)
    loader = torchobj.DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([sample for keys, sizes in loader for sample in zip(keys.tolist(), sizes.tolist(), strict=True)])
    Path(out, f"{rank}.json").write_text(json.dumps({"epochs": epochs, "stats": _torchobj.prefetch_stats()}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
