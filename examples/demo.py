"""The story of `make demo`: a training run is killed with SIGKILL, resumes from S3, and ends with the same weights.

The trainer is `train_digits.py` beside this file, in a process of its own, as anybody would run it. Ends with status 0
when all is as it should be; otherwise it says what differs, and ends with 1.
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
KILLED_AFTER = 3  # the checkpoint that the killed run leaves; the kill comes in the middle of the next epoch
TRAINER_LIMIT_S = 120.0
UNBROKEN, KILLED = "s3://digits-checkpoints/unbroken/", "s3://digits-checkpoints/killed/"


def say(text: str = "") -> None:
    """Prints a line now, also into a pipe."""
    print(text, flush=True)


class Trainer:
    """`train_digits.py`, running."""

    def __init__(self, s3: embedded_s3.EmbeddedS3, checkpoints: str) -> None:
        script = Path(__file__).with_name("train_digits.py")
        arguments = [f"--checkpoints={checkpoints}", f"--epochs={EPOCHS}"]
        say(f"    $ python examples/{script.name} {' '.join(arguments)}")
        # In the process group of the embedded S3 it ends, with its workers, when this process ends, whatever happens.
        self.process = subprocess.Popen(
            [sys.executable, *(f"-W{option}" for option in sys.warnoptions), str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=s3.process_group,
        )

    def lines(self) -> Iterator[str]:
        """What it prints, while it prints it, to its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            say(f"    {line.rstrip()}")
            yield line.rstrip()


@contextmanager
def trainer(s3: embedded_s3.EmbeddedS3, checkpoints: str) -> Iterator[Trainer]:
    """Starts a trainer; by the end of the block it has ended, or is killed."""
    running = Trainer(s3, checkpoints)
    limit = threading.Timer(TRAINER_LIMIT_S, running.process.kill)
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
    """Runs the trainer to its end and returns what it printed."""
    with trainer(s3, checkpoints) as running:
        lines = list(running.lines())
        status = running.process.wait()
    if status == -signal.SIGKILL:
        sys.exit(f"The trainer was killed; {TRAINER_LIMIT_S:.0f} s is what it may take.")
    if status != 0:
        sys.exit(f"The trainer ended with status {status}.")
    return lines


def run_and_kill(s3: embedded_s3.EmbeddedS3, checkpoints: str) -> None:
    """Runs the trainer to the middle of the epoch after `KILLED_AFTER`, by its own word, and kills it there."""
    with trainer(s3, checkpoints) as running:
        for line in running.lines():
            if line.startswith(f"epoch {KILLED_AFTER + 1}/{EPOCHS}: batch"):
                running.process.kill()
                say(f"    killed with SIGKILL: exit status {running.process.wait()}")
                return
    sys.exit("The trainer ended before it could be killed.")


def found(pattern: str, lines: Sequence[str]) -> str:
    """The part of the one line that matches."""
    for line in lines:
        if match := re.fullmatch(pattern, line):
            return match[1]
    sys.exit(f"The trainer printed no line like {pattern!r}.")


def load(url: str) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    weights: dict[str, torch.Tensor] = CheckpointManager(url).restore()["model"]
    return weights


def differences(unbroken: list[str], resumed: list[str]) -> list[str]:
    """What is not as it should be."""
    wrong = []

    resumed_from = found(r"resumed from (.*)", resumed)
    expected = f"epoch {KILLED_AFTER} in {KILLED.rstrip('/')}"
    say(f"  resumed from        {resumed_from}")
    if resumed_from != expected:
        wrong.append(f"the trainer resumed from {resumed_from}, not from {expected}")

    accuracies = [found(r"test accuracy (.*)", lines) for lines in (unbroken, resumed)]
    say(f"  test accuracy       {accuracies[0]} unbroken, {accuracies[1]} resumed")
    if accuracies[0] != accuracies[1]:
        wrong.append("the accuracies differ")
    if min(map(float, accuracies)) < EXPECTED_ACCURACY:
        wrong.append(f"an accuracy is below {EXPECTED_ACCURACY}")

    weights = [load(url) for url in (UNBROKEN, KILLED)]
    if weights[0].keys() != weights[1].keys():
        wrong.append("the checkpoints hold different tensors")
    else:
        unequal = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
        say(f"  equal tensors       {len(weights[0]) - len(unequal)} of {len(weights[0])}")
        wrong += [f"the tensor {name} differs" for name in unequal]

    digests = [weights_digest(each) for each in weights]
    say(f"  SHA-256 of weights  {digests[0][:16]}… unbroken, {digests[1][:16]}… resumed")
    if len({*digests, *(found(r"weights (.*)", lines) for lines in (unbroken, resumed))}) > 1:
        wrong.append("the digests of the weights differ, among the two checkpoints and what the trainers printed")
    return wrong


def main() -> int:
    """Tells the story and returns the exit status."""
    started = time.monotonic()
    with embedded_s3.start_alone() as s3:
        say("2. An unbroken run, which uploads the data first:")
        unbroken = run_to_end(s3, UNBROKEN)

        say(f"\n3. A second run, with other checkpoints, to be killed in the middle of epoch {KILLED_AFTER + 1}:")
        run_and_kill(s3, KILLED)

        say("\n4. What the killed run left in the bucket; a checkpoint exists when its commit does:")
        for info in torchobj.Store("s3://digits-checkpoints").list("killed/"):
            say(f"    {info.key}  {info.size} bytes")

        say("\n5. The same command again:")
        resumed = run_to_end(s3, KILLED)

        say("\n6. The unbroken run and the one that was killed and resumed:")
        wrong = differences(unbroken, resumed)

    say()
    for each in wrong:
        say(f"WRONG: {each}")
    if wrong:
        return 1
    say(f"The weights are equal bit for bit. All of it took {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
