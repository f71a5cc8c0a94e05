"""What distributed saves leave that fail or are killed: it is deleted, and nothing else ever is."""

import datetime
import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torchobj.s3torchconnector.dcp
from tests.support import warm_python
from tests.support.killing import HELD_S, Saver, kill_at
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.ranks import LONGEST_S, run_ranks, started
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter, sweep
from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp import save_items
from torchobj.checkpoint.dcp.object_names import attempt_of

pytestmark = [
    pytest.mark.providers("s3", GCS_IN_MATRIX),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

DAY_S = 86_400
REFUSED = {"action": {"status": 403, "code": "AccessDenied"}}
TOKEN = "tobj0000123456789ab"
#: What others keep beside a checkpoint, and in its folder.
STRANGERS = {
    "run/__0_0.distcp",
    "run/notes.txt",
    "run/__0_0123456789ab_0.distcp",
    "run/shard_000000000000123_0.distcp",
    f"run/__0_{TOKEN}_0.txt",
    f"run2/__0_{TOKEN}_0.distcp",
    f"__0_{TOKEN}_0.distcp",
}


def tensors(value):
    return {"weight": torch.full((1000,), value), "bias": torch.full((7,), value)}


def writer_of(bucket, kind=StorageWriter, **settings):
    return kind(f"{bucket.url}/run", config=bucket.config, **settings)


def save(bucket, value, **settings):
    dcp.save(tensors(value), storage_writer=writer_of(bucket, **settings))


def loaded(bucket, folder="run"):
    """The one value of all tensors of the checkpoint."""
    found = tensors(0.0)
    dcp.load(found, storage_reader=StorageReader(f"{bucket.url}/{folder}", config=bucket.config))
    [value] = {value for tensor in found.values() for value in tensor.unique().tolist()}
    return value


def swept(bucket, folder="run", **settings):
    """The keys that a sweep says that it has deleted; it has deleted these."""
    before = set(bucket.keys())
    deleted = {
        url.removeprefix(f"{bucket.url}/") for url in sweep(f"{bucket.url}/{folder}", config=bucket.config, **settings)
    }
    assert before - set(bucket.keys()) == deleted
    return deleted


def named(bucket, folder="run"):
    """The keys of a checkpoint: its metadata and the files that the metadata names."""
    reader = StorageReader(f"{bucket.url}/{folder}", config=bucket.config)
    files = {info.relative_path for info in reader.read_metadata().storage_data.values()}
    return {f"{folder}/{name}" for name in (".metadata", *files)}


class Killed(StorageWriter):
    """Ends before the checkpoint is made, as a process that is killed: nothing is cleaned up."""

    def finish(self, metadata, results):
        pass


def failure_of(call):
    with pytest.raises(CheckpointException) as caught:
        call()
    [(error, _)] = caught.value.failures.values()
    return error


# Saves that fail


class FailingOnOne(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.index.fqn == "bad1":
            raise ZeroDivisionError("the planner failed")
        return super().resolve_data(write_item)


def one_rank_fails(rank, url, config):
    dist.init_process_group("gloo")
    state = {f"rank {rank}": torch.rand(1000), f"bad{rank}": torch.rand(1000)}
    planner = FailingOnOne(dedup_save_to_lowest_rank=True)
    dcp.save(state, storage_writer=StorageWriter(f"{url}/run", config=config, thread_count=2), planner=planner)


def test_a_save_that_fails_on_one_rank_deletes_the_files_of_all_ranks(bucket):
    save(bucket, 1.0)
    before = set(bucket.keys())
    for name, text, _ in run_ranks(one_rank_fails, bucket.url, bucket.config):
        assert name == "CheckpointException"
        assert "ZeroDivisionError: the planner failed" in text
        assert "on rank 1:" in text
    assert set(bucket.keys()) == before
    assert loaded(bucket) == 1.0


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("name", ["_0.distcp$", "_1.distcp$", "\\.metadata$"])
def test_a_save_that_the_store_refuses_deletes_its_files(bucket, control, name):
    save(bucket, 1.0)
    before = set(bucket.keys())
    control.faults({**REFUSED, "operation": "PutObject", "key": name})
    error = failure_of(lambda: save(bucket, 2.0, thread_count=2))
    assert isinstance(error, exceptions.AccessDeniedError)
    control.clear_faults()
    assert set(bucket.keys()) == before
    assert loaded(bucket) == 1.0
    save(bucket, 3.0)
    assert set(bucket.keys()) == named(bucket)


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("is_made", [True, False])
def test_files_stay_while_it_is_not_known_whether_the_checkpoint_was_made(bucket, is_made):
    class Lost(StorageWriter):
        def _put_metadata(self, data):
            if is_made:
                super()._put_metadata(data)
            raise exceptions.StoreTimeoutError("no answer")

    save(bucket, 1.0)
    error = failure_of(lambda: dcp.save(tensors(2.0), storage_writer=writer_of(bucket, Lost)))
    assert bucket.url in error.__notes__[0]
    assert "it is unknown whether" in error.__notes__[0]
    assert loaded(bucket) == (2.0 if is_made else 1.0)
    left = set(bucket.keys()) - named(bucket)
    assert len(left) == 1
    assert swept(bucket, older_than_s=0) == left
    assert loaded(bucket) == (2.0 if is_made else 1.0)


def test_files_stay_if_metadata_exists_and_cannot_be_compared(bucket, monkeypatch):
    find = CheckpointDir.find

    def unavailable(self, name):
        raise exceptions.StoreTimeoutError("no answer")

    class Late(StorageWriter):
        def _put_metadata(self, data):
            super()._put_metadata(data)
            # The response is lost, and the retry finds the object that it wrote.
            monkeypatch.setattr(CheckpointDir, "find", unavailable)
            super()._put_metadata(data)

    writer = writer_of(bucket, Late, overwrite=False)
    error = failure_of(lambda: dcp.save(tensors(1.0), storage_writer=writer))
    monkeypatch.setattr(CheckpointDir, "find", find)
    assert "it is unknown whether" in error.__notes__[0]
    assert loaded(bucket) == 1.0


def test_a_save_whose_files_cannot_be_deleted_leaves_them_to_a_sweep(bucket, control, caplog):
    control.faults(
        {**REFUSED, "operation": "PutObject", "key": "\\.metadata$"}, {**REFUSED, "operation": "DeleteObject"}
    )
    failure_of(lambda: save(bucket, 2.0))
    control.clear_faults()
    assert "sweep() deletes them later" in caplog.text
    assert len(bucket.keys()) == 1
    assert len(swept(bucket, older_than_s=0)) == 1
    assert bucket.keys() == []


# Saves that are killed


@pytest.mark.providers("s3")
def test_a_save_that_is_killed_at_any_request_leaves_what_a_sweep_deletes_and_no_more(bucket, control):
    saver = Saver(bucket, Path(__file__).with_name("distributed_killed.py"))
    url = f"{bucket.url}/run"
    try:
        saver.begin(url=url, value=1)
        assert saver.end() is None
        for key in STRANGERS:
            bucket.write(key, b"x")
        value, found, killed = 1, 0, True
        for performed in (True, False):
            held = {"delay_first_byte_s": HELD_S} | ({} if performed else {"status": 500})
            request, killed = 0, True
            while killed:
                control.faults({"skip": request, "times": 1, "action": held})
                pid = saver.begin(url=url, value=value + 1)
                killed = kill_at(control, pid)
                assert saver.end() == (signal.SIGKILL if killed else None)
                control.clear_faults()
                at = (performed, request)
                found_value = value_of(bucket)
                assert found_value == value + 1 if not killed else found_value in (value, value + 1), at
                before = set(bucket.keys())
                swept(bucket, older_than_s=0)
                left = set(bucket.keys())
                assert left - STRANGERS == named(bucket), at
                assert left >= STRANGERS, at
                assert bucket.uploads() == [], at
                assert value_of(bucket) == found_value, at
                found += before != left
                value, request = int(found_value), request + 1
            assert request > 8
        assert found > 8
    finally:
        saver.close()


def value_of(bucket):
    """The one value of the checkpoint that `distributed_killed.py` saves."""
    found = {"x": torch.zeros(1_500_000), "y": torch.zeros(10)}
    dcp.load(found, storage_reader=StorageReader(f"{bucket.url}/run", config=bucket.config))
    [value] = {value for tensor in found.values() for value in tensor.unique().tolist()}
    return value


def shift_times(monkeypatch, shift_of):
    """Has the store say another time of some objects: `shift_of` gives for a name by how many seconds."""
    listed = CheckpointDir.objects

    def objects(self, *arguments):
        for info in listed(self, *arguments):
            modified = info.last_modified + datetime.timedelta(seconds=shift_of(info.key))
            yield info._replace(last_modified=modified)

    monkeypatch.setattr(CheckpointDir, "objects", lambda *arguments: list(objects(*arguments)))


def test_the_next_save_deletes_what_expired(bucket, monkeypatch):
    save(bucket, 1.0)
    dcp.save(tensors(2.0), storage_writer=writer_of(bucket, Killed, thread_count=2))
    left = set(bucket.keys()) - named(bucket)
    assert len(left) == 2
    for age_s, found in ((DAY_S - 60, left), (DAY_S + 60, set())):
        with monkeypatch.context() as patch:
            shift_times(patch, lambda name: -age_s if f"run/{name}" in left else 0)  # noqa: B023  called in this block
            save(bucket, 3.0)
        assert set(bucket.keys()) - named(bucket) == found
    assert loaded(bucket) == 3.0


@pytest.mark.parametrize("shift_s", [-10 * DAY_S, 10 * DAY_S])
def test_a_clock_that_is_off_here_makes_no_save_expire(bucket, monkeypatch, shift_s):
    dcp.save(tensors(2.0), storage_writer=writer_of(bucket, Killed))
    shift_times(monkeypatch, lambda _: shift_s)
    assert swept(bucket) == set()
    save(bucket, 3.0)
    assert len(set(bucket.keys()) - named(bucket)) == 1


@pytest.mark.providers("s3", "gs")
def test_a_sweep_covers_the_checkpoints_in_subfolders(bucket):
    for step in (1, 2):
        folder = f"{bucket.url}/run/step-{step}"
        dcp.save(tensors(1.0), storage_writer=StorageWriter(folder, config=bucket.config))
        dcp.save(tensors(2.0), storage_writer=Killed(folder, config=bucket.config))
    strategy = torchobj.s3torchconnector.dcp.HexPrefixStrategy(epoch_num=3)
    dcp.save(tensors(2.0), storage_writer=writer_of(bucket, Killed, prefix_strategy=strategy))
    dcp.save(tensors(2.0), storage_writer=Killed(f"{bucket.url}/running", config=bucket.config))
    assert swept(bucket) == set()
    assert len(swept(bucket, older_than_s=0)) == 3
    keys = {key for key in bucket.keys() if not key.startswith("running/")}
    assert keys == named(bucket, "run/step-1") | named(bucket, "run/step-2")
    assert len(bucket.keys()) == len(keys) + 1


def rank_dies(rank, url, config):
    dist.init_process_group("gloo")

    class Dying(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank == 1 and write_item.index.fqn == "second":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    state = {f"rank {rank}": torch.rand(1000), "first": torch.rand(10), "second": torch.rand(10)}
    dcp.save(state, storage_writer=StorageWriter(f"{url}/run", config=config), planner=Dying())


def test_what_a_job_leaves_of_which_a_rank_dies_is_swept(bucket):
    save(bucket, 1.0)
    with started(rank_dies, bucket.url, bucket.config) as ranks:
        for rank in ranks:
            rank.join(LONGEST_S / 2)
    assert -signal.SIGKILL in [rank.exitcode for rank in ranks]
    left = set(bucket.keys()) - named(bucket)
    assert left
    assert swept(bucket, older_than_s=0) == left
    assert loaded(bucket) == 1.0


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_stores_are_swept_too(scheme, tmp_path):
    url = f"file://{tmp_path}/run" if scheme == "file" else "memory://leftovers/run"
    dcp.save(tensors(1.0), storage_writer=StorageWriter(url))
    dcp.save(tensors(2.0), storage_writer=Killed(url))
    assert sweep(url) == []
    assert len(sweep(url, older_than_s=0)) == 1
    found = tensors(0.0)
    dcp.load(found, storage_reader=StorageReader(url))
    assert found["bias"][0] == 1.0
    assert sweep(url, older_than_s=0) == []


# Saves that are running


def test_a_save_that_is_running_is_never_swept_by_another_of_the_same_url(bucket):
    class Slow(StorageWriter):
        def finish(self, metadata, results):
            save(bucket, 2.0)
            assert loaded(bucket) == 2.0
            super().finish(metadata, results)

    save(bucket, 1.0)
    dcp.save(tensors(3.0), storage_writer=writer_of(bucket, Slow))
    assert loaded(bucket) == 3.0
    assert set(bucket.keys()) == named(bucket)


def test_a_save_that_is_about_to_write_its_metadata_keeps_its_files(bucket):
    class Slow(StorageWriter):
        def _put_metadata(self, data):
            save(bucket, 2.0)
            super()._put_metadata(data)

    dcp.save(tensors(3.0), storage_writer=writer_of(bucket, Slow))
    assert loaded(bucket) == 3.0


def test_a_sweep_in_the_process_that_saves_leaves_its_running_save_alone(bucket, monkeypatch):
    close = save_items.close_files

    def close_and_sweep(files):
        closed = close(files)
        assert files
        assert sweep(f"{bucket.url}/run", older_than_s=0, config=bucket.config) == []
        return closed

    monkeypatch.setattr(save_items, "close_files", close_and_sweep)
    dcp.save(tensors(1.0), storage_writer=writer_of(bucket))
    assert loaded(bucket) == 1.0


@pytest.mark.parametrize("is_first", [False, True])
def test_a_save_whose_files_another_process_swept_fails_before_its_metadata(bucket, is_first):
    class Late(StorageWriter):
        def finish(self, metadata, results):
            script = (
                "import pickle, sys, torchobj.checkpoint as c;"
                "config = pickle.loads(bytes.fromhex(sys.argv[2]));"
                "assert len(c.sweep(sys.argv[1], older_than_s=0, config=config)) == 1"
            )
            arguments = [f"{bucket.url}/run", pickle.dumps(bucket.config).hex()]
            warm_python.run(["-c", script, *arguments], check=True)
            super().finish(metadata, results)

        def _put_metadata(self, data):
            raise AssertionError("the metadata is written")

    if not is_first:
        save(bucket, 1.0)
    before = set(bucket.keys())
    error = failure_of(lambda: dcp.save(tensors(2.0), storage_writer=writer_of(bucket, Late)))
    assert isinstance(error, exceptions.CheckpointError)
    assert "another process swept files of this save" in str(error)
    assert set(bucket.keys()) == before
    assert is_first or loaded(bucket) == 1.0


def test_metadata_is_absent_throughout_a_first_save_and_replaced_files_stay_until_it_is_written(bucket):
    seen = []

    class Watched(StorageWriter):
        def write_data(self, plan, planner):
            future = super().write_data(plan, planner)
            seen.append(set(bucket.keys()))
            return future

        def _put_metadata(self, data):
            seen.append(set(bucket.keys()))
            super()._put_metadata(data)
            seen.append(set(bucket.keys()))

    for value in (1.0, 2.0):
        before = set(bucket.keys())
        dcp.save(tensors(value), storage_writer=writer_of(bucket, Watched))
        written, checked, committed = seen
        [file] = written - before
        assert ".distcp" in file
        assert written == checked == before | {file}
        assert committed == before | {file, "run/.metadata"}
        assert set(bucket.keys()) == {file, "run/.metadata"}
        seen.clear()
    assert loaded(bucket) == 2.0


def test_a_file_of_a_save_that_was_replaced_by_another_one_fails_the_save(bucket):
    class Damaged(StorageWriter):
        def finish(self, metadata, results):
            [key] = bucket.keys()
            bucket.write(key, bucket.body(key)[:-1])
            super().finish(metadata, results)

    error = failure_of(lambda: dcp.save(tensors(2.0), storage_writer=writer_of(bucket, Damaged)))
    assert isinstance(error, exceptions.CheckpointError)
    assert "1 of 1, such as __0_" in str(error)
    assert bucket.keys() == []


def test_the_files_of_a_rank_expire_together_by_the_newest(bucket, monkeypatch):
    dcp.save(tensors(1.0), storage_writer=writer_of(bucket, Killed, thread_count=2))
    dcp.save(tensors(2.0), storage_writer=writer_of(bucket, Killed, thread_count=2))
    owners = {}
    for key in bucket.keys():
        owners.setdefault(attempt_of(key.removeprefix("run/")), set()).add(key)
    old, young = owners.values()
    assert len(old) == len(young) == 2
    shift_times(monkeypatch, lambda name: -10 * DAY_S if f"run/{name}" in {*old, min(young)} else 0)
    assert swept(bucket) == old
    save(bucket, 3.0)
    assert set(bucket.keys()) == young | named(bucket)


@pytest.mark.providers("s3", "gs")
def test_metadata_that_is_written_after_the_files_were_listed_keeps_them(bucket, monkeypatch):
    dcp.save(tensors(1.0), storage_writer=writer_of(bucket, Killed))
    [file] = bucket.keys()
    listed = CheckpointDir.unfinished_uploads

    def list_and_commit(self, beginning):
        bucket.write("run/__7.metadata", f"names {file.removeprefix('run/')}".encode())
        return listed(self, beginning)

    monkeypatch.setattr(CheckpointDir, "unfinished_uploads", list_and_commit)
    assert swept(bucket, older_than_s=0) == set()
    assert file in bucket.keys()


@pytest.mark.providers("s3")
def test_a_save_keeps_the_files_of_a_rank_with_an_unfinished_upload_and_a_sweep_aborts_it(bucket, monkeypatch):
    dcp.save(tensors(1.0), storage_writer=writer_of(bucket, Killed))
    [file] = bucket.keys()
    parts = file.replace("_0.distcp", "_1.distcp")
    for key in (parts, "run/other", "other"):
        bucket.boto.create_multipart_upload(Bucket=bucket.name, Key=key)
    with monkeypatch.context() as patch:
        shift_times(patch, lambda name: -10 * DAY_S if f"run/{name}" == file else 0)
        save(bucket, 2.0)
    assert file in bucket.keys()
    assert swept(bucket, older_than_s=0) == {file}
    assert sorted(upload["Key"] for upload in bucket.uploads()) == ["other", "run/other"]


def test_a_slow_save_that_ends_an_upload_while_another_one_sweeps_keeps_its_files(bucket, monkeypatch):
    dcp.save(tensors(1.0), storage_writer=writer_of(bucket, Killed))
    [file] = bucket.keys()
    later = file.replace("_0.distcp", "_1.distcp")
    listed = CheckpointDir.unfinished_uploads

    def end_upload(self, beginning=""):
        bucket.write(later, b"x")
        return listed(self, beginning)

    with monkeypatch.context() as patch:
        shift_times(patch, lambda name: -10 * DAY_S if f"run/{name}" == file else 0)
        patch.setattr(CheckpointDir, "unfinished_uploads", end_upload)
        save(bucket, 2.0)
    assert {file, later} <= set(bucket.keys())


def test_plans_that_torch_caches_give_no_two_saves_the_same_files(bucket):
    names = []
    for value in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(tensors(value), storage_writer=writer_of(bucket), planner=planner)
        assert loaded(bucket) == value
        names.append(named(bucket))
    assert len(set.union(*names)) == 4
