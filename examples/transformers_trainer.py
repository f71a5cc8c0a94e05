"""Trains a small network with the Trainer of transformers, and commits its checkpoints in a bucket.

    python examples/transformers_trainer.py --checkpoints s3://bucket/run/

If the script is killed and started again, on this machine or another one, it resumes from its newest committed
checkpoint. Its final weights are then identical to those of an uninterrupted run. SIGTERM, as of a preemption, ends it
after a checkpoint. It also runs under torchrun, where a signal to one rank is enough. Needs
`pip install transformers accelerate`.
"""

import argparse
import hashlib
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from torchobj.transformers import CheckpointCallback, latest_checkpoint


class Model(nn.Module):
    """A network as the Trainer expects it: given the batch, it returns the loss and the predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Predicts the labels."""
        predicted = self.layers(x)[:, 0]
        return {"loss": F.mse_loss(predicted, labels), "logits": predicted}


class Points(Dataset[dict[str, torch.Tensor]]):
    """Points, and the distances from the origin that the network learns."""

    def __init__(self) -> None:
        self.points = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.points[index], "labels": self.points[index].norm()}


def main() -> None:
    """Trains to the last step, or until a signal."""
    parser = argparse.ArgumentParser(description="Trains with transformers, and commits checkpoints in a bucket.")
    parser.add_argument("--checkpoints", required=True, help="URL of a folder, such as s3://bucket/run/")
    parser.add_argument("--output", default="out", help="local folder for the files of the Trainer")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    settings = TrainingArguments(
        arguments.output,
        max_steps=arguments.steps,
        per_device_train_batch_size=16,
        save_steps=20,
        save_total_limit=2,
        logging_steps=20,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    checkpoint = CheckpointCallback(arguments.checkpoints, keep_last=2)
    torch.manual_seed(0)
    model = Model()
    trainer = Trainer(model, settings, train_dataset=Points(), callbacks=[checkpoint])
    newest = latest_checkpoint(arguments.checkpoints, arguments.output)
    if newest is not None:
        print(f"resumed from {newest}", flush=True)
    trainer.train(resume_from_checkpoint=newest)
    if checkpoint.stopped:
        print(f"stopped after step {trainer.state.global_step}, which is committed", flush=True)
        # Ends the process as the signal does if it is not handled, so that the scheduler starts the job again.
        signal.raise_signal(signal.SIGTERM)
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    print(f"weights {digest.hexdigest()}")


if __name__ == "__main__":
    main()
