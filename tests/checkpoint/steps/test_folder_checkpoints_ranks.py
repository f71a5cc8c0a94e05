"""Ranks that save one folder, or folders of their own, and restore them: each file is sent and read once."""

import collections
import os

import pytest
import torch.distributed as dist

from tests.support.folders import content
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import outcome
from tests.support.ranks import run_ranks
from torchobj.checkpoint import FolderCheckpoints
from torchobj.checkpoint.steps import folder_checkpoints, folder_content
from torchobj.exceptions import StoreError
from torchobj.ranks import machine

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


def of_ranks(url, config, **settings):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return FolderCheckpoints(url, config=config, **settings)


def written(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def one_folder(rank, url, config, tmp_path):
    sent, real = [], folder_content.upload

    def upload(folder, *given, **named):
        sent.extend(sorted(path.name for path in folder.iterdir()))
        return real(folder, *given, **named)

    folder_content.upload = upload
    downloads, real_download = [], folder_checkpoints.download

    def download(*given, **named):
        downloads.append(rank)
        return real_download(*given, **named)

    folder_checkpoints.download = download
    checkpoints, folder = of_ranks(url, config), tmp_path / "checkpoint-1"
    written(folder, **{f"rng_state_{rank}.pth": b"%d" % rank}, **({"model.bin": b"m" * 1000} if rank == 0 else {}))
    checkpoints.save_async(1, folder).result()
    checkpoints.save(2, folder)
    step = checkpoints.restore(folder=tmp_path / "restored")
    first, second = content(tmp_path / "restored"), tmp_path / f"of-rank-{rank}"
    checkpoints.restore(1, second)
    return sent, downloads, step, first, content(second), checkpoints.steps()


def test_each_file_of_one_folder_is_sent_by_one_rank_and_restored_once(bucket, tmp_path):
    results = run_ranks(one_folder, f"{bucket.url}/run", bucket.config, tmp_path)
    files = {"model.bin": b"m" * 1000, "rng_state_0.pth": b"0", "rng_state_1.pth": b"1"}
    # Those of the second step are copied by the store.
    assert [result[0] for result in results] == [["model.bin"], ["rng_state_0.pth", "rng_state_1.pth"]]
    # The ranks share the first folder, and have one each of the second one.
    assert [result[1] for result in results] == [[0, 0], [1]]
    assert [result[2:] for result in results] == [(2, files, files, [1, 2])] * 2
    left = {"checkpoint-1", "restored", "of-rank-0", "of-rank-1"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert collections.Counter(key.rpartition("/")[2] for key in bucket.keys() if "/steps/" in key) == dict.fromkeys(
        files, 2
    )


def two_machines(rank, url, config, tmp_path):
    machine._host_of = lambda: f"machine-{rank}"
    checkpoints, own = of_ranks(url, config), tmp_path / f"{rank}"
    written(own / "same", model=b"m%d" % rank, **{f"of-{rank}": b"x"})
    checkpoints.save(1, own / "same")
    if rank == 0:
        written(own / "first", model=b"m")
    # The second machine does not have the folder.
    checkpoints.save(2, own / "first")
    written(own / "other", model=b"m" * (rank + 1))
    other = outcome(lambda: checkpoints.save(3, own / "other"))
    checkpoints.restore(1, tmp_path / "restored")
    return other, checkpoints.steps(), content(tmp_path / "restored"), sorted(os.listdir(own))


def test_machines_save_their_own_files_and_one_copy_of_those_that_they_share(bucket, tmp_path):
    first, second = run_ranks(two_machines, f"{bucket.url}/run", bucket.config, tmp_path)
    for other, steps, restored, left in (first, second):
        assert other[0] == "CheckpointError"
        assert "'model' is another file on rank 1 (2 bytes) than on rank 0 (1 bytes)" in other[1]
        assert (steps, restored) == ([1, 2], {"model": b"m0", "of-0": b"x", "of-1": b"x"})
        assert set(left) <= {"same", "first", "other"}


def failing_on_one(rank, url, config, tmp_path):
    checkpoints, folder = of_ranks(url, config), written(tmp_path / "checkpoint-1", a=b"a" * 10, b=b"b" * 10)
    real = folder_content.upload

    def upload(*given, **named):
        if rank == 1:
            raise StoreError("the disk of rank 1 is gone")
        return real(*given, **named)

    folder_content.upload = upload
    results = [outcome(lambda: checkpoints.save(1, folder)), checkpoints.steps(), checkpoints.leftovers()]
    results.append(outcome(lambda: checkpoints.restore(rank, tmp_path / "restored")))
    results.append(outcome(lambda: checkpoints.restore(1, None if rank == 1 else tmp_path / "restored")))
    folder_content.upload = real
    return results, outcome(lambda: checkpoints.save(1, folder)), sorted(os.listdir(tmp_path))


def test_an_error_of_one_rank_is_that_of_all_and_nothing_is_left(bucket, tmp_path):
    first, second = run_ranks(failing_on_one, f"{bucket.url}/run", bucket.config, tmp_path)
    for results, then, left in (first, second):
        failed, steps, leftovers, differing, missing = results
        assert failed == ("StoreError", "the disk of rank 1 is gone")
        assert (steps, leftovers, then, left) == ([], [], None, ["checkpoint-1"])
        assert differing == ("ConfigError", "step=1 on rank 1, 0 on rank 0: must be the same on all ranks")
        assert missing == ("ConfigError", "folder=None: must be the path of the folder to restore")
