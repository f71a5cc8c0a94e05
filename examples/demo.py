"""The program of `make demo`: a training run is killed with SIGKILL, resumes from S3, and ends with identical weights.

It runs `train_digits.py` in a separate process. Exits with status 0 if the results are as expected; otherwise it prints
the differences and exits with 1.
"""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import embedded_s3
import torch
from train_digits import EXPECTED_ACCURACY, weights_digest

import torchobj
from torchobj.checkpoint import CheckpointManager

EPOCHS = 6
KILLED_AFTER = 3  # last checkpoint of the killed run, which is killed in the middle of the next epoch
TRAINER_TIMEOUT_S = 120.0
UNINTERRUPTED, KILLED = "s3://digits-checkpoints/uninterrupted/", "s3://digits-checkpoints/killed/"


def say(text: str = "") -> None:
    """Prints a line without buffering."""
    print(text, flush=True)


class Trainer:
    """A running `train_digits.py`."""

    def __init__(self, s3: embedded_s3.EmbeddedS3, checkpoints: str) -> None:
        script = Path(__file__).with_name("train_digits.py")
        arguments = [f"--checkpoints={checkpoints}", f"--epochs={EPOCHS}"]
        say(f"    $ python examples/{script.name} {' '.join(arguments)}")
        # The process group of the embedded S3 is killed when this process exits, including the workers of the trainer.
        self.process = subprocess.Popen(
            [sys.executable, *(f"-W{option}" for option in sys.warnoptions), str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=s3.process_group,
        )

    def lines(self) -> Iterator[str]:
        """Yields the lines that the trainer prints, until it exits."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            say(f"    {line.rstrip()}")
            yield line.rstrip()


@contextmanager
def trainer(s3: embedded_s3.EmbeddedS3, checkpoints: str) -> Iterator[Trainer]:
    """Starts a trainer, and kills it at the end of the block if it is still running."""
    running = Trainer(s3, checkpoints)
    limit = threading.Timer(TRAINER_TIMEOUT_S, running.process.kill)
    limit.start()
    try:
        yield running
    finally:
        limit.cancel()
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()


def run_to_end(s3: embedded_s3.EmbeddedS3, checkpoints: str) -> list[str]:
    """Runs the trainer until it exits, and returns the lines that it printed."""
    with trainer(s3, checkpoints) as running:
        lines = list(running.lines())
        status = running.process.wait()
    if status == -signal.SIGKILL:
        sys.exit(f"The trainer was killed because it ran for more than {TRAINER_TIMEOUT_S:.0f} s.")
    if status != 0:
        sys.exit(f"The trainer exited with status {status}.")
    return lines


def run_and_kill(s3: embedded_s3.EmbeddedS3, checkpoints: str) -> None:
    """Kills the trainer when it prints that it is in the middle of the epoch after `KILLED_AFTER`."""
    with trainer(s3, checkpoints) as running:
        for line in running.lines():
            if line.startswith(f"epoch {KILLED_AFTER + 1}/{EPOCHS}: batch"):
                running.process.kill()
                say(f"    killed with SIGKILL: exit status {running.process.wait()}")
                return
    sys.exit("The trainer exited before it could be killed.")


def matched(pattern: str, lines: Sequence[str]) -> str:
    """The group of `pattern` in the first line that matches."""
    for line in lines:
        if match := re.fullmatch(pattern, line):
            return match[1]
    sys.exit(f"The trainer printed no line that matches {pattern!r}.")


def load(url: str) -> dict[str, torch.Tensor]:
    """Loads the weights of the newest checkpoint."""
    weights: dict[str, torch.Tensor] = CheckpointManager(url).restore()["model"]
    return weights


def differences(uninterrupted: list[str], resumed: list[str]) -> list[str]:
    """Compares the two runs, prints the results, and returns what is wrong."""
    wrong = []

    resumed_from = matched(r"resumed from (.*)", resumed)
    expected = f"epoch {KILLED_AFTER} in {KILLED.rstrip('/')}"
    say(f"  resumed from        {resumed_from}")
    if resumed_from != expected:
        wrong.append(f"the trainer resumed from {resumed_from}, not from {expected}")

    accuracies = [matched(r"test accuracy (.*)", lines) for lines in (uninterrupted, resumed)]
    say(f"  test accuracy       {accuracies[0]} uninterrupted, {accuracies[1]} resumed")
    if accuracies[0] != accuracies[1]:
        wrong.append("the accuracies differ")
    if min(map(float, accuracies)) < EXPECTED_ACCURACY:
        wrong.append(f"an accuracy is below {EXPECTED_ACCURACY}")

    weights = [load(url) for url in (UNINTERRUPTED, KILLED)]
    if weights[0].keys() != weights[1].keys():
        wrong.append("the checkpoints contain different tensors")
    else:
        unequal = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
        say(f"  equal tensors       {len(weights[0]) - len(unequal)} of {len(weights[0])}")
        wrong += [f"the tensor {name} differs" for name in unequal]

    digests = [weights_digest(each) for each in weights]
    say(f"  SHA-256 of weights  {digests[0][:16]}… uninterrupted, {digests[1][:16]}… resumed")
    if len({*digests, *(matched(r"weights (.*)", lines) for lines in (uninterrupted, resumed))}) > 1:
        wrong.append(
            "the digests of the weights differ between the checkpoints, or from those that the trainers printed"
        )
    return wrong


def main() -> int:
    """Runs the demo and returns the exit status."""
    started = time.monotonic()
    with embedded_s3.start_alone() as s3:
        say("2. An uninterrupted run. It uploads the data first.")
        uninterrupted = run_to_end(s3, UNINTERRUPTED)

        say(f"\n3. A second run with its own checkpoints. It is killed in the middle of epoch {KILLED_AFTER + 1}.")
        run_and_kill(s3, KILLED)

        say("\n4. The objects of the killed run. A checkpoint exists once its commit is written.")
        for info in torchobj.Store("s3://digits-checkpoints").list("killed/"):
            say(f"    {info.key}  {info.size} bytes")

        say("\n5. The same command again. It resumes.")
        resumed = run_to_end(s3, KILLED)

        say("\n6. Comparison of the uninterrupted run with the run that was killed and resumed:")
        wrong = differences(uninterrupted, resumed)

    say()
    for each in wrong:
        say(f"WRONG: {each}")
    if wrong:
        return 1
    say(f"The weights are identical, bit for bit. The demo took {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
