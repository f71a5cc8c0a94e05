"""Trains a small network in a loop with Accelerate, and commits its state in a bucket.

    python examples/accelerate_loop.py --checkpoints s3://bucket/run/

If the script is killed and started again, on this machine or another one, it resumes from its newest committed state,
also in the middle of an epoch. Its final weights are then identical to those of an uninterrupted run. It also runs
under `accelerate launch`. Needs `pip install accelerate`.
"""

import argparse
import hashlib

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchobj.accelerate import load_state, save_state


def main() -> None:
    """Trains to the last step."""
    parser = argparse.ArgumentParser(description="Trains with Accelerate, and commits its state in a bucket.")
    parser.add_argument("--checkpoints", required=True, help="URL of a folder, such as s3://bucket/run/")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()

    # An epoch that is resumed has the order in which it began.
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    points = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    # With a generator of its own, the loader does not draw from the global one, whose state was restored.
    loader = DataLoader(
        TensorDataset(points, points.norm(dim=1)), batch_size=16, shuffle=True, generator=torch.Generator()
    )
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)

    resumed = load_state(accelerator, arguments.checkpoints)
    if resumed is not None:
        accelerator.print(f"resumed from step {resumed}", flush=True)
    step = resumed or 0
    while step < arguments.steps:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for x, labels in accelerator.skip_first_batches(loader, done) if done else loader:
            loss = F.mse_loss(model(x)[:, 0], labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            step += 1
            if step % 20 == 0:
                save_state(accelerator, arguments.checkpoints, step, keep_last=2)
                accelerator.print(f"step {step}: loss {loss.item():.4f}, committed", flush=True)
            if step == arguments.steps:
                break
    weights = accelerator.unwrap_model(model).parameters()
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in weights))
    accelerator.print(f"weights {digest.hexdigest()}")


if __name__ == "__main__":
    main()
