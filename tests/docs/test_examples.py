"""Runs the longer examples, as a user would, or for an epoch or two."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.install import cache_directory
from tests.support import warm_python
from tests.support.buckets import new_gcs_bucket
from tests.support.killing import HELD_S, kill_at
from tests.support.ranks import environment_of, job_store
from torchobj.checkpoint import CheckpointManager, FolderCheckpoints

pytestmark = pytest.mark.matrix

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def digits(fake_gcs_server):
    """The URL of the digits of the examples, in a bucket of fake-gcs-server."""
    for package in ("sklearn", "PIL", "rich"):
        pytest.importorskip(package)
    url = f"{new_gcs_bucket('digits', fake_gcs_server).url}/digits/"
    script = f"from train_digits import seed_bucket; seed_bucket({url!r})"
    warm_python.run(["-c", script], env=environment(fake_gcs_server), cwd=EXAMPLES, timeout=150, check=True)
    return url


def environment(gcs, s3=None):
    """The environment of an example, in which these servers are those of Google and of AWS."""
    found = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "STORAGE_EMULATOR_HOST": gcs.endpoint}
    if s3 is not None:
        found |= {"AWS_ENDPOINT_URL": s3.endpoint, "AWS_PROFILE": "strict", "AWS_REGION": "us-east-1"}
    return found


@pytest.mark.timeout(300)
def test_another_number_of_ranks_resumes_from_the_checkpoint_before_the_killed_save(
    bucket, control, digits, strict_server, fake_gcs_server
):
    checkpoints = CheckpointManager(f"{bucket.url}/run/", sharded=True, config=bucket.config)
    arguments = [f"--data={digits}", f"--checkpoints={bucket.url}/run/", "--epochs=2"]
    # The server holds the upload of the second rank's shard of step 2.
    held = {"delay_first_byte_s": HELD_S}
    control.faults({"operation": "UploadPart", "key": f"steps/{2:012}-.*/__1_", "action": held})
    with started_ranks(2, arguments, environment(fake_gcs_server, strict_server)) as ranks:
        assert any(line.startswith("epoch 2/2") for line in ranks[0].stdout), ranks[0].errors()
        assert kill_at(control, ranks[1].pid), ranks[1].errors()
        ranks[0].kill()
    control.clear_faults()
    assert checkpoints.steps() == [1]
    assert checkpoints.leftovers()
    with started_ranks(3, arguments, environment(fake_gcs_server, strict_server)) as ranks:
        for rank in ranks:
            assert rank.wait(100) == 0, rank.errors()
        output = ranks[0].stdout.read()
    assert "3 ranks resumed from step 1" in output
    assert "epoch 2/2: committed" in output
    assert checkpoints.steps() == [1, 2]


@pytest.mark.timeout(300)
def test_ranks_end_after_a_checkpoint_if_one_of_them_gets_a_signal(bucket, digits, strict_server, fake_gcs_server):
    checkpoints = CheckpointManager(f"{bucket.url}/run/", sharded=True, config=bucket.config)
    arguments = [f"--data={digits}", f"--checkpoints={bucket.url}/run/", "--epochs=1000"]
    with started_ranks(2, arguments, environment(fake_gcs_server, strict_server)) as ranks:
        assert "epoch 1/1000: committed\n" in ranks[0].stdout, ranks[0].errors()
        ranks[1].send_signal(signal.SIGTERM)
        for rank in ranks:
            assert rank.wait(100) == -signal.SIGTERM, rank.errors()
        *_, last = ranks[0].stdout.read().splitlines()
    assert last == f"epoch {checkpoints.latest()}/1000: committed"


@contextlib.contextmanager
def started_ranks(number, arguments, environment):
    """Starts ranks of `checkpoint_ddp.py` as torchrun does."""
    store, command = job_store(), [EXAMPLES / "checkpoint_ddp.py", *arguments]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                warm_python.Process(command, env=environment | environment_of(store.port, rank, number))
            )
            for rank in range(number)
        ]


@pytest.mark.timeout(1000)
def test_ranks_that_resume_end_with_the_result_of_an_uninterrupted_run():
    pytest.importorskip("moto")
    output = run_example("checkpoint_ddp.py").stdout
    assert "rank 1 was killed with SIGKILL while it uploaded its shard of step 3" in output
    assert "Committed steps: [1, 2]." in output
    assert "3 ranks resumed from step 2" in output
    assert "All committed checkpoints are complete." in output


@pytest.mark.timeout(300)
def test_a_training_with_its_data_and_checkpoints_in_gcs_resumes(digits, fake_gcs_server):
    checkpoints = new_gcs_bucket("digits-checkpoints", fake_gcs_server)
    command = [EXAMPLES / "train_digits.py", "--workers=1", f"--data={digits}", f"--checkpoints={checkpoints.url}/run"]
    for epochs, expected in (("1", "epoch 1/1: loss"), ("2", f"resumed from epoch 1 in {checkpoints.url}/run")):
        done = warm_python.run(
            [*command, "--epochs", epochs], env=environment(fake_gcs_server), timeout=240, check=True
        )
        assert expected in done.stdout
    assert [key for key in checkpoints.keys() if "commits/" in key] == [
        f"run/commits/{step:012}.json" for step in (1, 2)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "package", "resumed"),
    [
        ("transformers_trainer.py", "transformers", "resumed from out/checkpoint-60"),
        ("accelerate_loop.py", "accelerate", "resumed from step 60"),
    ],
)
def test_a_framework_resumes_from_the_checkpoint_before_the_killed_save(
    bucket, control, strict_server, tmp_path, name, package, resumed
):
    pytest.importorskip(package)
    environ = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "AWS_ENDPOINT_URL": strict_server.endpoint}
    environ |= {"AWS_PROFILE": "strict", "AWS_REGION": "us-east-1", "OMP_NUM_THREADS": "1"}

    def command(run):
        return [EXAMPLES / name, f"--checkpoints={bucket.url}/{run}/", "--steps=100"]

    for run in ("uninterrupted", "killed"):
        (tmp_path / run).mkdir()
    whole = warm_python.run(command("uninterrupted"), env=environ, cwd=tmp_path / "uninterrupted", check=True).stdout
    # The server holds the commit of step 80.
    control.faults({"key": f"^killed/commits/{80:012}", "action": {"delay_first_byte_s": HELD_S, "status": 500}})
    with warm_python.Process(command("killed"), env=environ, cwd=tmp_path / "killed") as training:
        assert kill_at(control, training.pid), training.errors()
    control.clear_faults()
    again = warm_python.run(command("killed"), env=environ, cwd=tmp_path / "killed", check=True).stdout
    assert resumed in again
    assert re.findall("weights .*", again) == re.findall("weights .*", whole) != []
    checkpoints = FolderCheckpoints(f"{bucket.url}/killed/", config=bucket.config)
    assert checkpoints.steps() == [80, 100]


@pytest.mark.timeout(1000)
def test_a_network_learns_from_images_in_class_folders():
    for package in ("moto", "sklearn", "PIL", "rich"):
        pytest.importorskip(package)
    done = run_example("train_images.py")
    assert (
        "1437 images of the classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, such as ('s3://digits/images/train/0/" in done.stdout
    )
    [report] = [line for line in done.stdout.splitlines() if " samples in " in line]
    # Workers are forked and kept already.
    assert "persistent_workers" not in report
    assert "multiprocessing_context" not in report
    accuracy, count = re.search(r"accuracy (\d\.\d+) on (\d+) other images", done.stdout).groups()
    assert (float(accuracy) >= 0.97, count) == (True, "360")


@pytest.mark.timeout(300)
def test_a_training_from_packed_shards_resumes_in_mid_epoch(bucket, control, digits, strict_server, fake_gcs_server):
    pytest.importorskip("moto")
    shards, both = f"{bucket.url}/shards/train", environment(fake_gcs_server, strict_server)
    pack = ["-m", "torchobj", "pack", f"{digits}train/", f"{shards}-%03d.tar", "--maxcount", "100"]
    assert "packed 15 shards: 1437 samples, 1437 files" in warm_python.run(pack, env=both, check=True).stdout

    def command(name):
        checkpoints = f"--checkpoints={bucket.url}/{name}/"
        return [EXAMPLES / "train_shards.py", "--train", f"--shards={shards}-*.tar", checkpoints, "--epochs=1"]

    uninterrupted = warm_python.run(command("uninterrupted"), env=both, timeout=240, check=True).stdout
    # The server holds the upload of step 30.
    control.faults({"key": f"^killed/steps/{30:012}-", "action": {"delay_first_byte_s": HELD_S}})
    with warm_python.Process(command("killed"), env=both) as training:
        assert any(line.startswith("step 20: in epoch 1") for line in training.stdout), training.errors()
        assert kill_at(control, training.pid), training.errors()
    control.clear_faults()
    resumed = warm_python.run(command("killed"), env=both, timeout=240, check=True).stdout
    assert "resumed from step 20, in epoch 1" in resumed
    assert re.findall("weights .*", resumed) == re.findall("weights .*", uninterrupted) != []


@pytest.mark.timeout(1000)
def test_a_training_from_packed_shards_resumes_in_a_later_epoch():
    for package in ("moto", "sklearn", "PIL", "pyarrow", "click"):
        pytest.importorskip(package)
    done = run_example("train_shards.py")
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


@pytest.mark.timeout(3000)
def test_ray_train_resumes_with_identical_weights():
    for package in ("moto", "sklearn", "PIL"):
        pytest.importorskip(package)
    done = run_example("ray_train.py", ray_packages(), limit_s=2400)
    assert re.findall(r"epochs (\d to \d): loss", done.stdout) == ["1 to 2", "1 to 1", "2 to 2"]
    assert "The weights are identical, bit for bit." in done.stdout


def run_example(name, *packages, limit_s=900):
    """Runs an example, which must succeed. `packages` are folders of further packages.

    Examples take one to three minutes alone, and five times as long beside four processes of tests on two cores.
    """
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [EXAMPLES.parent, *packages]))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
