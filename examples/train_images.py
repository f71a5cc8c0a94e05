"""Trains a small network on images in class folders of a bucket with `torchobj.ImageFolder`.

    python examples/train_images.py

The images are the digits of `train_digits.py`, one PNG per object: `train/<class>/<number>.png` and
`test/<class>/<number>.png`. Without arguments they are uploaded to an S3 server that runs in memory and ends with the
script. With your own bucket:

    python examples/train_images.py --data s3://bucket/digits/
"""

import argparse
import functools
import os
import sys
from contextlib import nullcontext

import embedded_s3
import torch
from torch import nn
from torch.nn import functional as F
from train_digits import make_model, seed_bucket

import torchobj

EXPECTED_ACCURACY = 0.97  # with the default settings

#: Decodes an object to a grey image with values from 0 to 1. As a partial, it can be sent to workers.
decode = functools.partial(torchobj.decode.image, mode="L", dtype=torch.float32)


def train(model: nn.Module, dataset: torchobj.ImageFolder, arguments: argparse.Namespace) -> None:
    """Trains on the images in a new random order per epoch."""
    sampler = torchobj.ElasticDistributedSampler(dataset, seed=arguments.seed)
    loader = torchobj.DataLoader(
        dataset, batch_size=64, sampler=sampler, num_workers=arguments.workers, persistent_workers=arguments.workers > 0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        loss_sum = 0.0
        for images, targets in loader:
            loss = F.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        print(f"epoch {epoch + 1}/{arguments.epochs}: loss {loss_sum / len(loader):.4f}", flush=True)
    print(loader.report())


@torch.no_grad()
def accuracy(model: nn.Module, dataset: torchobj.ImageFolder) -> float:
    """The share of images whose class the model finds."""
    model.eval()
    found = 0
    for images, targets in torchobj.DataLoader(dataset, batch_size=128):
        found += int((model(images).argmax(1) == targets).sum())
    return found / len(dataset)


def run(arguments: argparse.Namespace) -> int:
    """Uploads what is missing, trains and tests. Returns the exit status."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    seed_bucket(arguments.data)
    training = torchobj.ImageFolder(f"{arguments.data}train/", loader=decode)
    testing = torchobj.ImageFolder(f"{arguments.data}test/", loader=decode)
    print(f"{len(training)} images of the classes {', '.join(training.classes)}, such as {training.samples[0]}")
    model = make_model()
    train(model, training, arguments)
    reached = accuracy(model, testing)
    print(f"accuracy {reached:.4f} on {len(testing)} other images")
    return int(reached < EXPECTED_ACCURACY and arguments.epochs >= 6)


def main() -> int:
    """Runs with a bucket, or with an embedded S3."""
    parser = argparse.ArgumentParser(description="Trains on images in class folders of a bucket.")
    parser.add_argument("--data", help="URL of the folder of the digits; without it, an S3 server in memory is used")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    with nullcontext() if arguments.data else embedded_s3.start() as s3:
        if s3 is not None:
            os.environ.update(s3.environment)
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1"
            arguments.data = "s3://digits/images/"
        arguments.data = f"{arguments.data.rstrip('/')}/"
        return run(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except torchobj.TorchobjError as error:
        sys.exit(f"{type(error).__name__}: {error}")
