"""Trains on handwritten digits with several ranks, each of which writes its shard of every checkpoint to S3.

    torchrun --nproc-per-node 2 examples/checkpoint_ddp.py --data s3://bucket/digits/ --checkpoints s3://bucket/run/

The weights and the state of the optimizer are sharded over the ranks (FSDP2 with gloo, on the CPU). If the job is
killed and started again, with the same or another number of ranks, it resumes from its newest committed checkpoint.
SIGTERM to any rank, as of a preemption, ends all of them after the checkpoint of the epoch. A batch has 60 digits for
any number of ranks, so that this number affects only the rounding of floats.

Without torchrun it demonstrates recovery on an embedded S3 server: one of two ranks is killed with SIGKILL during a
save; three ranks resume from the previous checkpoint, and end with the result of an uninterrupted run.

    python examples/checkpoint_ddp.py
"""

import argparse
import collections
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from train_digits import decode, folder, measure_accuracy, seed_bucket

import torchobj
from torchobj.checkpoint import CheckpointManager

BATCH = 60  # of all ranks together; divisible by 2 and by 3
EPOCHS = 3
EXPECTED_ACCURACY = 0.9
WIDTH = 1000

# For the demonstration.
KILLED_IN = 3  # the rank is killed while the checkpoint of this epoch is written
UPLOAD_MBIT_S = 16.0  # limit of each rank in the run that is killed, so that a save takes seconds, as for large models
RUN_TIMEOUT_S = 180.0
DATA, UNINTERRUPTED, KILLED = (
    "s3://digits/",
    "s3://digits-checkpoints/uninterrupted/",
    "s3://digits-checkpoints/killed/",
)


# ---------------------------------------------------------------------------------------------------- a rank


def make_model() -> nn.Sequential:
    """Creates a network of 1.1 million weights, so that saving a checkpoint takes some time."""
    torch.manual_seed(0)
    inner = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    return nn.Sequential(nn.Flatten(), *inner)


class Training:
    """Model and optimizer as one item of a checkpoint, with names that do not depend on the sharding."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state_dict(self) -> dict[str, Any]:
        """The tensors, as the shards of this rank."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state into model and optimizer."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def manager(url: str, upload_mbit_s: float | None = None) -> CheckpointManager:
    """Manages the checkpoints of a run, and keeps the newest three."""
    # The smallest parts that S3 allows, so that this small checkpoint is a multipart upload that can be observed.
    config = torchobj.StoreConfig(
        upload_mbit_s=upload_mbit_s, advanced=torchobj.AdvancedOptions(whole_below_bytes=1 << 20), part_bytes=5 << 20
    )
    return CheckpointManager(url, keep_last=3, sharded=True, config=config)


def run_rank(arguments: argparse.Namespace) -> None:
    """Trains as one of the ranks of torchrun, from the newest checkpoint to the last epoch."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    if rank == 0:
        seed_bucket(arguments.data)
    dist.barrier()
    # A single write, because print writes the newline separately, and the ranks share the output.
    sys.stdout.write(f"rank {rank} of {ranks}: process {os.getpid()}\n")
    sys.stdout.flush()

    model = make_model()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model)

    with manager(arguments.checkpoints, arguments.upload_mbit_s) as checkpoints, checkpoints.on_signal(signal.SIGTERM):
        state = {"training": training, "epoch": 0}
        if checkpoints.restore(into=state, missing_ok=True) is not None:
            print_once(rank, f"{ranks} ranks resumed from step {state['epoch']}")
        stopped = train(state, checkpoints, arguments)
    dist.destroy_process_group()
    if stopped:
        # Ends the process as the signal does if it is not handled, so that the scheduler starts the job again.
        signal.raise_signal(signal.SIGTERM)


def train(state: dict[str, Any], checkpoints: CheckpointManager, arguments: argparse.Namespace) -> bool:
    """Trains the remaining epochs, and saves a checkpoint after each. Returns whether a signal has ended it before."""
    rank, ranks, training = dist.get_rank(), dist.get_world_size(), state["training"]
    # Half of the digits is enough to demonstrate checkpoints.
    dataset = torchobj.ObjectMapDataset(f"{arguments.data}train/", glob="**/*[02468].png", transform=decode)
    # Its order does not depend on the number of ranks.
    sampler = torchobj.ElasticDistributedSampler(dataset, num_replicas=ranks, rank=rank, seed=1)
    loader = torchobj.DataLoader(dataset, batch_size=BATCH // ranks, sampler=sampler, drop_last=True)
    for epoch in range(state["epoch"] + 1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        losses = []
        for pictures, labels in loader:
            loss = F.cross_entropy(training.model(pictures), labels)
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        state["epoch"] = epoch
        print_once(rank, f"epoch {epoch}/{arguments.epochs}: loss {mean / ranks:.4f}, saving")
        checkpoints.save(epoch, state)
        print_once(rank, f"epoch {epoch}/{arguments.epochs}: committed")
        if checkpoints.stop_requested():
            return bool(epoch < arguments.epochs)
    return False


def print_once(rank: int, text: str) -> None:
    """Prints a line on rank 0."""
    if rank == 0:
        print(text, flush=True)


# --------------------------------------------------------------------------------------------------- the demonstration


def say(text: str = "") -> None:
    """Prints a line without buffering."""
    print(text, flush=True)


class Run:
    """A running torchrun of this script."""

    def __init__(self, ranks: int, checkpoints: str, *settings: str) -> None:
        arguments = [f"--data={DATA}", f"--checkpoints={checkpoints}", *settings]
        say(f"    $ torchrun --nproc-per-node {ranks} examples/{Path(__file__).name} {' '.join(arguments)}")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self.process = subprocess.Popen(
            [*torchrun, __file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self.pids: dict[int, int] = {}
        self.output: list[str] = []

    def lines(self) -> Iterator[str]:
        """Yields the lines that the ranks print, until they exit. All output, also of torch, is kept in `output`."""
        for line in map(str.rstrip, self.stdout):
            self.output.append(line)
            if match := re.fullmatch(r"rank (\d+) of \d+: process (\d+)", line):
                self.pids[int(match[1])] = int(match[2])
            if re.match(r"rank \d|epoch \d|\d ranks|uploaded", line):
                say(f"    {line}")
                yield line


@contextlib.contextmanager
def running(ranks: int, checkpoints: str, *settings: str) -> Iterator[Run]:
    """Starts the ranks, and ends them at the end of the block."""
    run = Run(ranks, checkpoints, *settings)
    limit = threading.Timer(RUN_TIMEOUT_S, run.process.terminate)
    limit.start()
    try:
        yield run
    finally:
        limit.cancel()
        # torchrun terminates its ranks.
        run.process.terminate()
        collections.deque(run.lines(), maxlen=0)
        run.process.wait()
        run.stdout.close()


def run_to_end(ranks: int, checkpoints: str) -> list[str]:
    """Runs to the last epoch, and returns the lines that the ranks printed."""
    with running(ranks, checkpoints) as run:
        lines = list(run.lines())
        status = run.process.wait()
    if status != 0:
        sys.exit("\n".join([*run.output, f"The run exited with status {status}."]))
    return lines


def run_and_kill(ranks: int, checkpoints: str) -> None:
    """Kills the last rank while it uploads the checkpoint of epoch `KILLED_IN`."""
    store, prefix = torchobj.Store("s3://digits-checkpoints"), checkpoints.removeprefix("s3://digits-checkpoints/")
    with running(ranks, checkpoints, f"--upload-mbit-s={UPLOAD_MBIT_S}") as run:
        for line in run.lines():
            if re.match(rf"epoch {KILLED_IN}/.*saving", line):
                break
        # Names of files contain the rank.
        while not any(f"/__{ranks - 1}_" in upload.key for upload in store.unfinished_uploads(prefix)):
            if run.process.poll() is not None:
                sys.exit("\n".join([*run.output, "The run exited before its upload was observed."]))
            time.sleep(0.05)
        os.kill(run.pids[ranks - 1], signal.SIGKILL)
        say(f"    rank {ranks - 1} was killed with SIGKILL while it uploaded its shard of step {KILLED_IN}")
        status = run.process.wait()
    say(f"    torchrun terminated the other ranks: exit status {status}")


def restored(checkpoints: str) -> tuple[Training, int]:
    """Loads the newest checkpoint, with the shards of all ranks, into this process; returns it with its step."""
    training = Training(make_model())
    with manager(checkpoints) as committed:
        state = committed.restore(into={"training": training, "epoch": 0})
    return training, state["epoch"]


def differences(uninterrupted: list[str], resumed: list[str]) -> list[str]:
    """Compares the two runs, prints the results, and returns what is wrong."""
    wrong = []
    if f"3 ranks resumed from step {KILLED_IN - 1}" not in resumed:
        wrong.append(f"the three ranks did not resume from step {KILLED_IN - 1}")

    losses = [float(re.findall(r"loss (\d+\.\d+)", "\n".join(lines))[-1]) for lines in (uninterrupted, resumed)]
    say(f"  loss of the last epoch   {losses[0]:.4f} uninterrupted, {losses[1]:.4f} resumed")
    if abs(losses[0] - losses[1]) > 0.01:
        wrong.append("the losses differ")

    (one, step), (other, other_step) = restored(UNINTERRUPTED), restored(KILLED)
    if not step == other_step == EPOCHS:
        wrong.append(f"the newest steps are {step} and {other_step}, not {EPOCHS}")
    data = argparse.Namespace(data=DATA, workers=0)
    accuracies = [measure_accuracy(training.model, data) for training in (one, other)]
    say(f"  test accuracy            {accuracies[0]:.4f} uninterrupted, {accuracies[1]:.4f} resumed")
    if min(accuracies) < EXPECTED_ACCURACY:
        wrong.append(f"an accuracy is below {EXPECTED_ACCURACY}")

    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    largest = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
    say(f"  weights                  maximum difference {largest:.1e}, because three ranks add floats in another order")
    if largest > 0.01:
        wrong.append(f"a weight differs by {largest}")
    return wrong


def demonstrate() -> int:
    """Runs the demonstration and returns the exit status."""
    import embedded_s3  # noqa: PLC0415  not needed under torchrun

    started = time.monotonic()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # This process reads the shards of all ranks.
    with embedded_s3.start_alone():
        say("2. An uninterrupted run of two ranks. It uploads the data first.")
        uninterrupted = run_to_end(2, UNINTERRUPTED)

        say(f"\n3. Another run of two ranks. One is killed while the checkpoint of epoch {KILLED_IN} is written.")
        run_and_kill(2, KILLED)

        with manager(KILLED) as checkpoints:
            say(f"\n4. Committed steps: {checkpoints.steps()}. Objects of the step that was not committed:")
            for left in checkpoints.leftovers():
                say(f"    {left.key}, {'an unfinished upload' if left.upload else f'{left.size} bytes'}")

        say("\n5. Three ranks resume.")
        resumed = run_to_end(3, KILLED)

        say("\n6. Comparison of the uninterrupted run with the run that was killed and resumed:")
        wrong = differences(uninterrupted, resumed)

        with manager(KILLED) as checkpoints:
            say(f"\n7. sweep() deleted {len(checkpoints.sweep(older_than_s=0))} leftovers of the killed save.")

    say()
    for each in wrong:
        say(f"WRONG: {each}")
    if wrong:
        return 1
    say(f"All committed checkpoints are complete. The demonstration took {time.monotonic() - started:.0f} s.")
    return 0


def main() -> int:
    """Runs as a rank of torchrun, or runs the demonstration, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Trains with sharded checkpoints in S3, under torchrun.")
    parser.add_argument(
        "--data",
        type=folder,
        help="location of the digits, which are uploaded if they are missing: s3://bucket/prefix/",
    )
    parser.add_argument("--checkpoints", type=folder, help="s3://bucket/prefix/")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument(
        "--upload-mbit-s", type=float, help="bandwidth limit of uploads of each rank; default: no limit"
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        return demonstrate()
    if not (arguments.data and arguments.checkpoints):
        parser.error("pass --data and --checkpoints")
    run_rank(arguments)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
