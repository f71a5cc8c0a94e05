"""A rank of `torchrun` that trains with Lightning, which distributes the samples, and writes its samples to a file."""

import json
import os
import sys
from pathlib import Path

import lightning.pytorch
import torch

import torchobj
from torchobj import _torchobj


class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.keys = torch.nn.Linear(1, 1), []

    def training_step(self, batch, _index):
        self.keys += batch[0].tolist()
        return self.layer(batch[1].float()[:, None]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def key_and_size(reader):
    return int(reader.key[-2:]), len(bytes(reader))


def main(folder, out):
    data = torchobj.ObjectMapDataset(f"file://{folder}/", transform=key_and_size)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.pytorch.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **quiet)
    module = Module()
    trainer.fit(module, torchobj.DataLoader(data, batch_size=4, shuffle=True, num_workers=1))
    kind = type(trainer.train_dataloader.batch_sampler.sampler).__name__
    found = {"keys": module.keys, "sampler": kind, "stats": _torchobj.prefetch_stats()}
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
