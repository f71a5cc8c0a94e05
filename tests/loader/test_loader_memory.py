"""The memory of a loader: the budget and little more, for any amount of data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_python

MIB = 1 << 20
BUDGET = 64 * MIB


@pytest.fixture
def run(tmp_path):
    def run(mode, total_bytes):
        for number in range(total_bytes // (256 << 10)):
            with (tmp_path / f"k{number:05}").open("wb") as file:
                file.truncate(256 << 10)
        script = Path(__file__).with_name("loader_memory.py")
        environment = os.environ | {"TORCHOBJ_BUDGET_BYTES": str(BUDGET)}
        if mode == "held":
            done = warm_python.run([script, tmp_path, mode], env=environment, timeout=240, check=True)
        else:
            # The memory of a forked process is shared in part with its parent.
            done = subprocess.run(
                [sys.executable, script, tmp_path, mode], env=environment, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("total_bytes", [256 * MIB, pytest.param(4096 * MIB, marks=pytest.mark.matrix)])
def test_the_process_tree_uses_the_budget_and_little_more_than_the_same_loop_in_memory(run, total_bytes):
    figures = run("epoch", total_bytes)
    print({name: value / MIB for name, value in figures.items()})
    assert figures["ours"] <= figures["stock"] + BUDGET + 64 * MIB


@pytest.mark.matrix
def test_epochs_that_stop_early_use_no_more_memory_with_persistent_workers(run):
    figures = run("breaks", 256 * MIB)
    print({name: value / MIB for name, value in figures.items()})
    assert figures["ours"] <= figures["stock"] + BUDGET + 64 * MIB


@pytest.mark.matrix
def test_memory_is_constant_while_batches_are_held_and_dropped_at_random(run):
    early, late = run("holding", 0)
    print(early / MIB, late / MIB)
    assert late <= early * 1.1


def test_descriptors_and_threads_do_not_grow_with_the_number_of_iterators(run):
    few, many = run("held", 0)
    assert many[0] <= 10, "the arena, and a block for each batch that workers had finished"
    assert many[1] <= few[1]
    assert many[2] <= few[2]
