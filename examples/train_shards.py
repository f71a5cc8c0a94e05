"""Packs the digits into tar shards, trains from them, is killed in mid-epoch, resumes, and ends with identical weights.

    python examples/train_shards.py

It starts the embedded S3, and packs with `torchobj pack`. The training runs in processes of its own, which save the
position in the shards and the shuffle buffer with the model. To train in your bucket, pack your data there and start
the training alone:

    python examples/train_shards.py --train --shards 's3://bucket/shards/train-*.tar' --checkpoints s3://bucket/run/
"""

import argparse
import io
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import embedded_s3
import numpy as np
import PIL.Image
import torch
from torch.nn import functional as F
from train_digits import folder, make_model, measure_accuracy, seed_bucket, weights_digest

import torchobj
from torchobj.checkpoint import CheckpointManager, RngState

DATA = "s3://digits/"
UNINTERRUPTED, KILLED = (
    "s3://digits-checkpoints/shards/uninterrupted/",
    "s3://digits-checkpoints/shards/killed/",
)
SAMPLES_PER_SHARD = 100
SHUFFLE_BUFFER = 400  # several shards: the digits of a shard have the same label
EPOCHS, BATCH, SAVED_EVERY = 4, 32, 10
KILLED_AFTER = 70  # a step in the middle of the second epoch, whose state is saved
TRAINER_TIMEOUT_S = 120.0
EXPECTED_ACCURACY = 0.92


def say(text: str = "") -> None:
    """Prints a line without buffering."""
    print(text, flush=True)


# ------------------------------------------------------------------------------------------------------ the training


def decode_png(data: torchobj.Buffer) -> torch.Tensor:
    """Decodes the member of a sample to a picture. Called in the workers of the DataLoader."""
    pixels = np.asarray(PIL.Image.open(io.BytesIO(data)), dtype=np.float32) / 255
    return torch.from_numpy(pixels).unsqueeze(0)


def labelled(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Returns the picture, and the label that is the folder in the key of the sample."""
    return sample["png"], int(sample["__key__"].split("/")[0])


def train(arguments: argparse.Namespace) -> None:
    """Trains from the newest checkpoint to the last epoch, and saves a checkpoint every ten steps."""
    # For reproducible bits: sums of floats depend on the order in which threads add them.
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    dataset = torchobj.TarIterableDataset(
        arguments.shards, decode={"png": decode_png}, transform=labelled, shuffle_buffer=SHUFFLE_BUFFER, seed=1
    )
    # Its own generator: the loader draws from it when it starts workers, which a resumed run does in another step.
    loader = torchobj.DataLoader(dataset, batch_size=BATCH, num_workers=2, generator=torch.Generator())
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": RngState(), "loader": loader}
    state |= {"epoch": 0, "step": 0}
    checkpoints = CheckpointManager(arguments.checkpoints)
    if checkpoints.restore(into=state, missing_ok=True) is not None:
        say(f"resumed from step {state['step']}, in epoch {state['epoch'] + 1}")

    model.train()
    while state["epoch"] < arguments.epochs:
        dataset.set_epoch(state["epoch"])
        for pictures, labels in loader:
            loss = F.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1
            if state["step"] % SAVED_EVERY == 0:
                checkpoints.save(state["step"], state)
                say(f"step {state['step']}: in epoch {state['epoch'] + 1}, loss {loss.item():.3f}, saved")
        state["epoch"] += 1
    checkpoints.save(state["step"] + 1, state)
    say(f"weights {weights_digest(model.state_dict())}")


# ------------------------------------------------------------------------------------------------- the demonstration


@contextmanager
def trainer(s3: embedded_s3.EmbeddedS3, shards: str, checkpoints: str) -> Iterator[Iterator[str]]:
    """Starts a training, yields the lines that it prints, and kills it at the end of the block if it still runs."""
    arguments = ["--train", f"--shards={shards}", f"--checkpoints={checkpoints}"]
    process = subprocess.Popen(
        [sys.executable, *(f"-W{option}" for option in sys.warnoptions), __file__, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The group is killed with the server, including the workers of the DataLoader.
        process_group=s3.process_group,
    )
    limit = threading.Timer(TRAINER_TIMEOUT_S, process.kill)
    limit.start()
    assert process.stdout is not None
    try:
        yield map(str.rstrip, process.stdout)
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def digest_of_run(s3: embedded_s3.EmbeddedS3, shards: str, checkpoints: str) -> str:
    """Runs a training to its end, and returns the digest of its weights."""
    lines = []
    with trainer(s3, shards, checkpoints) as running:
        for line in running:
            lines.append(line)
            if line.startswith("resumed"):
                say(f"    {line}")
            if match := re.fullmatch("weights (.*)", line):
                say(f"    {line}")
                return match[1]
    sys.exit("\n".join([*lines, "The training ended without weights."]))


def run_and_kill(s3: embedded_s3.EmbeddedS3, shards: str, checkpoints: str) -> None:
    """Kills a training after it has saved the step `KILLED_AFTER`."""
    lines = []
    with trainer(s3, shards, checkpoints) as running:
        for line in running:
            lines.append(line)
            if line.startswith(f"step {KILLED_AFTER}:"):
                say(f"    {line}")
                say("    killed with SIGKILL")
                return
    sys.exit("\n".join([*lines, "The training ended before it could be killed."]))


def demonstrate() -> int:
    """Compares an uninterrupted training with one that was killed, and returns the exit status."""
    started = time.monotonic()
    with embedded_s3.start_alone() as s3:
        seed_bucket(DATA)
        pattern, shards = f"{DATA}shards/train-%03d.tar", f"{DATA}shards/train-*.tar"
        pack = ["pack", f"{DATA}train/", pattern, "--maxcount", str(SAMPLES_PER_SHARD)]
        say(f"2. Shards of the digits.\n    $ torchobj {' '.join(pack)}")
        done = subprocess.run([sys.executable, "-m", "torchobj", *pack], stdout=subprocess.PIPE, text=True, check=True)
        say(f"    {done.stdout.strip()}")

        say("\n3. An uninterrupted training.")
        uninterrupted = digest_of_run(s3, shards, UNINTERRUPTED)

        say(f"\n4. Another one. It is killed in mid-epoch, after step {KILLED_AFTER}.")
        run_and_kill(s3, shards, KILLED)

        say("\n5. The same command again. It resumes within its shards.")
        resumed = digest_of_run(s3, shards, KILLED)

        model = make_model()
        model.load_state_dict(CheckpointManager(KILLED).restore()["model"])
        accuracy = measure_accuracy(model, argparse.Namespace(data=DATA, workers=0))
    say(f"\ntest accuracy {accuracy:.4f}")
    if accuracy < EXPECTED_ACCURACY or resumed != uninterrupted:
        print(f"WRONG: the accuracy must be {EXPECTED_ACCURACY}, and the weights identical", file=sys.stderr)
        return 1
    say(f"The weights are identical, bit for bit. The example took {time.monotonic() - started:.0f} s.")
    return 0


def main() -> int:
    """Demonstrates, or trains with `--train`, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Trains on handwritten digits in tar shards.")
    parser.add_argument("--train", action="store_true", help="train, instead of the demonstration")
    parser.add_argument("--shards", help="URL of the shards, with wildcards")
    parser.add_argument("--checkpoints", type=folder)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    arguments = parser.parse_args()
    if not arguments.train:
        return demonstrate()
    if arguments.shards is None or arguments.checkpoints is None:
        parser.error("--train needs --shards and --checkpoints")
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
