"""A rank of `torchrun` that trains with Lightning and checkpoints in a bucket: two epochs, then a third one resumed."""

import json
import pickle
import sys
from pathlib import Path

import lightning.pytorch
import torch

from torchobj.fsspec import register
from torchobj.lightning import ObjectCheckpointIO


class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, _index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


def fit(url, config, epochs):
    # Lightning's own checks of paths use it too, also if s3fs is installed.
    register(config=config)
    plugin = ObjectCheckpointIO(config=config)
    callback = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=url, monitor="loss", save_top_k=2, save_last=True)
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=epochs,
        plugins=[plugin],
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    torch.manual_seed(1)
    module = Module()
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(16, 3) / 10)
    newest = plugin.newest(url)
    trainer.strategy.barrier()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=newest)
    return trainer, [tensor.tolist() for tensor in module.state_dict().values()]


def main(url, config, out):
    config = pickle.loads(bytes.fromhex(config))
    fit(f"{url}/broken", config, 2)
    trainer, resumed = fit(f"{url}/broken", config, 3)
    _, unbroken = fit(f"{url}/unbroken", config, 3)
    found = {"resumed": resumed, "unbroken": unbroken, "steps": trainer.global_step}
    Path(out, f"{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
