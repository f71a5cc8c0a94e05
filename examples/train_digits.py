"""Trains a small network on handwritten digits in a bucket, and saves a checkpoint of each epoch to a bucket.

    python examples/train_digits.py --data s3://bucket/digits/ --checkpoints s3://bucket/digits-checkpoints/

The digits are the 1797 pictures of 8 x 8 pixels of scikit-learn, which are uploaded first if they are missing. If the
script is killed and started again, it resumes from its newest checkpoint. Its final weights are then identical to
those of an uninterrupted run.
"""

import argparse
import hashlib
import io
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import PIL.Image
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler

import torchobj
from torchobj.checkpoint import CheckpointManager, RngState
from torchobj.exceptions import TorchobjError

DIGITS = 1797
EXPECTED_ACCURACY = 0.97  # with the default settings; other seeds reach 0.98 or more


# ---------------------------------------------------------------------------------------------------- the bucket


def seed_bucket(url: str) -> None:
    """Uploads the digits that are missing, as `train/<label>/<number>.png` and `test/<label>/<number>.png`."""
    parsed = torchobj.urls.parse_url(url)
    store, prefix = torchobj.Store(parsed.base), parsed.key
    present = {info.key for part in ("train", "test") for info in store.list(f"{prefix}{part}/")}
    if len(present) >= DIGITS:
        return

    from sklearn.datasets import load_digits  # noqa: PLC0415  takes two seconds to import, and is needed once

    pictures, labels = load_digits(return_X_y=True)
    missing = {}
    for number, (pixels, label) in enumerate(zip(pictures, labels, strict=True)):
        part = "test" if number % 5 == 0 else "train"
        key = f"{prefix}{part}/{label}/{number:04}.png"
        if key not in present:
            missing[key] = png(pixels.reshape(8, 8))

    def upload(key: str) -> None:
        store.put(key, missing[key], content_type="image/png")

    with ThreadPoolExecutor(16) as threads:
        for _ in threads.map(upload, missing):
            pass
    print(f"uploaded {len(missing)} digits to {url}", flush=True)


def png(pixels: np.ndarray) -> bytes:
    """Encodes a picture with values from 0 to 16 as PNG."""
    file = io.BytesIO()
    PIL.Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def decode(reader: torchobj.ObjectReader) -> tuple[torch.Tensor, int]:
    """Decodes an object to a picture and the label in its key. Called in the workers of the DataLoader."""
    pixels = np.asarray(PIL.Image.open(reader), dtype=np.float32) / 255
    label = int(reader.key.split("/")[-2])
    return torch.from_numpy(pixels).unsqueeze(0), label


# ------------------------------------------------------------------------------------------------- checkpoints


class Training:
    """The state of the training that a checkpoint contains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, int], url: str) -> None:
        self.model = model
        # Saves the states of these objects and the plain values. A checkpoint exists only if it is complete.
        self.checkpoints = CheckpointManager(url, keep_last=None)
        self.state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": RngState(), "settings": settings}
        self.state["epoch"] = 0

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        done: int = self.state["epoch"]
        return done

    def save(self, epoch: int) -> None:
        """Writes the checkpoint of a completed epoch."""
        self.state["epoch"] = epoch
        self.checkpoints.save(epoch, self.state)

    def resume(self) -> None:
        """Restores the newest checkpoint, if one exists."""
        newest = self.checkpoints.latest()
        if newest is None:
            return
        settings = dict(self.state["settings"])  # must be the same in a resumed run
        self.checkpoints.restore(newest, into=self.state)
        if self.state["settings"] != settings:
            sys.exit(f"{self.checkpoints.url} has other settings, {self.state['settings']}: pass other --checkpoints")
        print(f"resumed from epoch {newest} in {self.checkpoints.url}", flush=True)


# ---------------------------------------------------------------------------------------------------- training


def make_model() -> nn.Module:
    """Creates a small convolutional network for pictures of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(training: Training, arguments: argparse.Namespace) -> None:
    """Trains the remaining epochs, and saves a checkpoint after each."""
    dataset = torchobj.ObjectMapDataset(f"{arguments.data}train/", transform=decode)
    # The order of an epoch must depend only on the seed and the epoch. It therefore has its own generator: the loader
    # draws from its generator when it starts workers, which a resumed run does in another epoch.
    order = torch.Generator()
    loader = torchobj.DataLoader(
        dataset,
        batch_size=arguments.batch_size,
        sampler=RandomSampler(dataset, generator=order),
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        generator=torch.Generator(),
    )
    optimizer = training.state["optimizer"]
    is_terminal = sys.stdout.isatty()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()

    training.model.train()
    with Progress(*columns, disable=not is_terminal) as progress:
        bar = progress.add_task("", total=arguments.epochs * len(loader), completed=training.epoch * len(loader))
        for epoch in range(training.epoch + 1, arguments.epochs + 1):
            order.manual_seed(arguments.seed * 10_000 + epoch)
            name = f"epoch {epoch}/{arguments.epochs}"
            progress.update(bar, description=name)
            loss_sum = 0.0
            for number, (pictures, labels) in enumerate(loader, start=1):
                loss = F.cross_entropy(training.model(pictures), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.item()
                progress.advance(bar)
                if not is_terminal and number == len(loader) // 2:
                    print(f"{name}: batch {number} of {len(loader)}", flush=True)
            training.save(epoch)
            print(f"{name}: loss {loss_sum / len(loader):.3f}, saved in {training.checkpoints.url}", flush=True)

    print(loader.report(), flush=True)


def measure_accuracy(model: nn.Module, arguments: argparse.Namespace) -> float:
    """The share of the test digits that the model classifies correctly."""
    dataset = torchobj.ObjectMapDataset(f"{arguments.data}test/", transform=decode)
    model.eval()
    correct = 0
    with torch.inference_mode():
        for pictures, labels in torchobj.DataLoader(dataset, batch_size=120, num_workers=arguments.workers):
            correct += int((model(pictures).argmax(dim=1) == labels).sum())
    return correct / len(dataset)


def weights_digest(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 of the names and bytes of all weights."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------- the program


def folder(url: str) -> str:
    """Appends a slash to a URL, because the prefix `s3://bucket/a` would also select `s3://bucket/ab`."""
    if not re.match("(s3|gs)://[^/]", url):
        raise argparse.ArgumentTypeError(f"{url!r}: must be s3://bucket/prefix/ or gs://bucket/prefix/")
    return url.rstrip("/") + "/"


def main() -> int:
    """Trains and tests the network, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits and saves checkpoints in buckets.")
    parser.add_argument(
        "--data",
        type=folder,
        default="s3://digits/",
        help="location of the digits, which are uploaded if they are missing",
    )
    parser.add_argument("--checkpoints", type=folder, default="s3://digits-checkpoints/")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--workers", type=int, default=2, help="number of DataLoader workers; does not affect the weights"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    default_urls = {parser.get_default("data"), parser.get_default("checkpoints")}
    has_endpoint = "AWS_ENDPOINT_URL" in os.environ or "AWS_ENDPOINT_URL_S3" in os.environ
    if default_urls & {arguments.data, arguments.checkpoints} and not has_endpoint:
        # On AWS the buckets with these names belong to another account.
        parser.error("pass --data and --checkpoints, or start a local server: python examples/embedded_s3.py")

    # For reproducible bits: sums of floats depend on the order in which threads add them.
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    seed_bucket(arguments.data)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    settings = {"seed": arguments.seed, "batch_size": arguments.batch_size}
    training = Training(model, optimizer, settings, arguments.checkpoints)
    training.resume()
    train(training, arguments)

    accuracy = measure_accuracy(model, arguments)
    print(f"test accuracy {accuracy:.4f}")
    print(f"weights {weights_digest(model.state_dict())}")
    is_default = all(getattr(arguments, name) == parser.get_default(name) for name in ("epochs", "batch_size", "seed"))
    if is_default and accuracy < EXPECTED_ACCURACY:
        print(f"test accuracy {accuracy:.4f} is below {EXPECTED_ACCURACY}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: the same command resumes from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except TorchobjError as error:
        sys.exit(f"{type(error).__name__}: {error}")
