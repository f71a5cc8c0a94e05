"""Runs the longer examples as a user would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(300)
def test_another_number_of_ranks_resumes_from_the_checkpoint_before_the_killed_save():
    pytest.importorskip("moto")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "checkpoint_ddp.py"],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    output = done.stdout
    assert "rank 1 was killed with SIGKILL while it uploaded its shard of step 3" in output
    assert "Committed steps: [1, 2]." in output
    assert "3 ranks resumed from step 2" in output
    assert "All committed checkpoints are complete." in output
