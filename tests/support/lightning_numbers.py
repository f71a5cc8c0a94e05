"""A Trainer of Lightning over a loader of numbers."""

import pytest
import torch


def numbers_by_trainer(batches, **settings):
    """A Trainer that has fitted a module with `batches`, and the numbers that the module was trained with."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Recording(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.numbers = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _index):
            self.numbers += batch.tolist()
            return self.layer(batch.float()[:, None]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer, module = lightning.Trainer(accelerator="cpu", **settings, **dict.fromkeys(names, False)), Recording()
    trainer.fit(module, batches)
    return trainer, module.numbers
