"""Trains with Ray Train: two workers read the digits from a bucket, and their checkpoints are in a bucket.

    python examples/ray_train.py

It starts the embedded S3 and a local Ray. A first run ends after one of two epochs, as if the cluster had been taken
away; a second one resumes from its newest checkpoint. Its weights are identical to those of an uninterrupted run. With
`--data` and `--checkpoints` it trains in your buckets and on the Ray cluster of `RAY_ADDRESS`, and resumes there.
"""

import argparse
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Workers that only use the CPU need no notice about accelerators.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# Ray is not among the packages of development; a type checker that lacks it reports nothing here.
# pyright: reportMissingImports=false
import embedded_s3
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from torch.nn import functional as F
from train_digits import decode, folder, make_model, measure_accuracy, seed_bucket, weights_digest

import torchobj
from torchobj.checkpoint import CheckpointManager

DATA, UNINTERRUPTED, RESUMED = (
    "s3://digits/",
    "s3://digits-checkpoints/ray/uninterrupted/",
    "s3://digits-checkpoints/ray/resumed/",
)
EPOCHS, BATCH, WORKERS = 2, 64, 2


def train_worker(settings: dict[str, Any]) -> None:
    """Trains as one of the workers of Ray Train, from the newest checkpoint to the last epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model()
    parallel = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}

    dataset = torchobj.ObjectMapDataset(f"{settings['data']}train/", transform=decode)
    # Ray's prepare_data_loader would replace the sampler: this one divides the samples among the ranks itself.
    sampler = torchobj.ElasticDistributedSampler(dataset, seed=1)
    loader = torchobj.DataLoader(dataset, batch_size=BATCH // ranks, sampler=sampler, drop_last=True, num_workers=1)
    with CheckpointManager(settings["checkpoints"], keep_last=2) as checkpoints:
        checkpoints.restore(into=state, missing_ok=True)
        first = state["epoch"] + 1
        for epoch in range(first, settings["epochs"] + 1):
            # Dropout depends on epoch and rank only, also in a resumed run.
            torch.manual_seed(epoch * ranks + rank)
            sampler.set_epoch(epoch)
            loss = train_epoch(parallel, optimizer, loader)
            state["epoch"] = epoch
            checkpoints.save(epoch, state, metrics={"first": first, "loss": loss})
            ray.train.report({"epoch": epoch, "loss": loss})


def train_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> float:
    """Trains one epoch, and returns the mean loss of all workers."""
    losses = []
    model.train()
    for pictures, labels in loader:
        loss = F.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def run(data: str, checkpoints: str, epochs: int) -> None:
    """Runs the workers until the last epoch."""
    print(f"training {epochs} epochs with {WORKERS} workers, checkpoints in {checkpoints}", flush=True)
    with tempfile.TemporaryDirectory() as results:
        trainer = ray.train.torch.TorchTrainer(
            train_worker,
            train_loop_config={"data": data, "checkpoints": checkpoints, "epochs": epochs},
            scaling_config=ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 1}),
            # Ray keeps its own state here; models and optimizers are in the bucket.
            run_config=RunConfig(storage_path=results, name="digits"),
        )
        trainer.fit()
    # Ray's result has the metrics of its own checkpoints only.
    manager = CheckpointManager(checkpoints)
    if (epoch := manager.latest()) is not None:
        metrics = manager.metrics(epoch)
        print(f"    epochs {metrics['first']:.0f} to {epoch}: loss {metrics['loss']:.3f}", flush=True)


def tested(data: str, checkpoints: str) -> tuple[str, float]:
    """The digest of the weights of the newest checkpoint, and their accuracy."""
    model = make_model()
    model.load_state_dict(CheckpointManager(checkpoints).restore()["model"])
    accuracy = measure_accuracy(model, argparse.Namespace(data=data, workers=0))
    return weights_digest(model.state_dict()), accuracy


def demonstrate() -> int:
    """Compares an uninterrupted run with a resumed one, and returns the exit status."""
    started = time.monotonic()
    with embedded_s3.start_alone():
        seed_bucket(DATA)
        # The workers inherit the environment and the module path.
        ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
        try:
            run(DATA, UNINTERRUPTED, EPOCHS)
            run(DATA, RESUMED, EPOCHS // 2)
            run(DATA, RESUMED, EPOCHS)
        finally:
            ray.shutdown()
        (one, accuracy), (other, _) = tested(DATA, UNINTERRUPTED), tested(DATA, RESUMED)
    print(f"test accuracy {accuracy:.4f}")
    print(f"SHA-256 of weights {one[:16]}… uninterrupted, {other[:16]}… resumed")
    if one != other:
        print("WRONG: the weights differ", file=sys.stderr)
        return 1
    print(f"The weights are identical, bit for bit. The example took {time.monotonic() - started:.0f} s.")
    return 0


def main() -> int:
    """Demonstrates, or trains in the buckets that were passed, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits with Ray Train.")
    parser.add_argument("--data", type=folder, help="location of the digits, which are uploaded if they are missing")
    parser.add_argument("--checkpoints", type=folder)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    if arguments.data is None and arguments.checkpoints is None:
        return demonstrate()
    if arguments.data is None or arguments.checkpoints is None:
        parser.error("pass --data and --checkpoints, or none of them")
    seed_bucket(arguments.data)
    ray.init()
    run(arguments.data, arguments.checkpoints, arguments.epochs)
    print(f"test accuracy {tested(arguments.data, arguments.checkpoints)[1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
