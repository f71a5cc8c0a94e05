"""Runs the longer examples as a user would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.install import cache_directory
from tests.support.buckets import new_gcs_bucket

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


@pytest.mark.timeout(120)
def test_a_training_with_its_data_and_checkpoints_in_gcs_resumes(fake_gcs_server):
    for package in ("sklearn", "PIL", "rich"):
        pytest.importorskip(package)
    data, checkpoints = (new_gcs_bucket(f"digits-{name}", fake_gcs_server) for name in ("data", "checkpoints"))
    command = [sys.executable, EXAMPLES / "train_digits.py", "--workers", "1"]
    command += ["--data", f"{data.url}/digits", "--checkpoints", f"{checkpoints.url}/run"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "STORAGE_EMULATOR_HOST": fake_gcs_server.endpoint}
    for epochs, expected in (("1", "epoch 1/1: loss"), ("2", f"resumed from epoch 1 in {checkpoints.url}/run")):
        done = subprocess.run(
            [*command, "--epochs", epochs], capture_output=True, text=True, timeout=100, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout
    assert [key for key in checkpoints.keys() if "commits/" in key] == [
        f"run/commits/{step:012}.json" for step in (1, 2)
    ]


@pytest.mark.matrix
@pytest.mark.timeout(200)
def test_a_network_learns_from_images_in_class_folders():
    for package in ("moto", "sklearn", "PIL", "rich"):
        pytest.importorskip(package)
    done = run_example("train_images.py", 180)
    assert (
        "1437 images of the classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, such as ('s3://digits/images/train/0/" in done.stdout
    )
    accuracy, count = re.search(r"accuracy (\d\.\d+) on (\d+) other images", done.stdout).groups()
    assert (float(accuracy) >= 0.97, count) == (True, "360")


@pytest.mark.timeout(300)
def test_a_training_from_packed_shards_resumes_in_mid_epoch():
    for package in ("moto", "sklearn", "PIL", "pyarrow", "click"):
        pytest.importorskip(package)
    done = run_example("train_shards.py", 280)
    assert "packed 15 shards: 1437 samples, 1437 files" in done.stdout
    assert "resumed from step 70, in epoch 2" in done.stdout
    assert "The weights are identical, bit for bit." in done.stdout


def ray_packages():
    """The folder of Ray and its requirements, installed once. In the environment of the tests its TensorBoard writer
    would become the logger of Lightning, which writes to buckets.
    """
    folder = cache_directory() / f"ray-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "ray[train]>=2.40"]
        subprocess.run(command, check=True, timeout=600)
        (folder / "complete").touch()
    return folder


@pytest.mark.matrix
@pytest.mark.timeout(1500)
def test_ray_train_resumes_with_identical_weights():
    for package in ("moto", "sklearn", "PIL"):
        pytest.importorskip(package)
    done = run_example("ray_train.py", 880, str(ray_packages()))
    assert re.findall(r"epochs (\d to \d): loss", done.stdout) == ["1 to 2", "1 to 1", "2 to 2"]
    assert "The weights are identical, bit for bit." in done.stdout


def run_example(name, limit_s, *packages):
    """Runs an example, which must succeed. `packages` are folders of further packages."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *packages])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
