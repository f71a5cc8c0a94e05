"""The examples that tell a story, run as anybody would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(300)
def test_ranks_of_another_number_go_on_from_the_checkpoint_before_the_save_that_was_killed():
    pytest.importorskip("moto")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "checkpoint_ddp.py"],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "rank 1 was killed with SIGKILL, while its part of step 3 was uploaded" in said
    assert "Committed are the steps [1, 2]." in said
    assert "3 ranks resumed from step 2" in said
    assert "No checkpoint was lost, and none was half." in said
