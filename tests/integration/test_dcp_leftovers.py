"""What distributed saves leave that fail or are killed: it is deleted, and nothing else ever is."""

import dataclasses
import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torchobj.dcp
from tests.killing import HELD_S, Saver, kill_at
from tests.prefetching import eventually
from tests.ranks import LONGEST_S, run_ranks, started
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter, sweep
from torchobj.checkpoint.dcp import attempt
from torchobj.checkpoint.dcp.place import Place

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

DAY_S = 86_400
REFUSED = {"action": {"status": 403, "code": "AccessDenied"}}
#: What others keep beside a checkpoint, and in its folder.
STRANGERS = {
    "run/__0_0.distcp",
    "run/notes.txt",
    "run/__0_0123456789ab_0.txt",
    "run2/__0_0123456789ab_0.distcp",
    "__0_0123456789ab_0.distcp",
}


def tensors(value):
    return {"weight": torch.full((1000,), value), "bias": torch.full((7,), value)}


def writer_of(place, kind=StorageWriter, **settings):
    return kind(f"{place.url}/run", config=place.config, **settings)


def save(place, value, **settings):
    dcp.save(tensors(value), storage_writer=writer_of(place, **settings))


def loaded(place, folder="run"):
    """The one value of all tensors of the checkpoint."""
    found = tensors(0.0)
    dcp.load(found, storage_reader=StorageReader(f"{place.url}/{folder}", config=place.config))
    [value] = {value for tensor in found.values() for value in tensor.unique().tolist()}
    return value


def swept(place, folder="run", **settings):
    """The keys that a sweep says that it has deleted; it has deleted these."""
    before = set(place.keys())
    deleted = {
        url.removeprefix(f"{place.url}/") for url in sweep(f"{place.url}/{folder}", config=place.config, **settings)
    }
    assert before - set(place.keys()) == deleted
    return deleted


def named(place, folder="run"):
    """The keys of a checkpoint: its metadata, its manifest and the files that the metadata names."""
    reader = StorageReader(f"{place.url}/{folder}", config=place.config)
    files = {info.relative_path for info in reader.read_metadata().storage_data.values()}
    return {f"{folder}/{name}" for name in (".metadata", "_torchobj_manifest.json", *files)}


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


def test_a_save_that_fails_on_one_rank_deletes_the_files_of_all_ranks(place):
    save(place, 1.0)
    before = set(place.keys())
    for name, text, _ in run_ranks(one_rank_fails, place.url, place.config):
        assert name == "CheckpointException"
        assert "ZeroDivisionError: the planner failed" in text
        assert "on rank 1:" in text
    assert set(place.keys()) == before
    assert loaded(place) == 1.0


@pytest.mark.parametrize("name", ["_torchobj_attempt_", "_0.distcp$", "_torchobj_manifest", "\\.metadata$"])
def test_a_save_that_the_store_refuses_deletes_its_files(place, control, name):
    save(place, 1.0)
    before = set(place.keys())
    control.faults({**REFUSED, "operation": "PutObject", "key": name})
    error = failure_of(lambda: save(place, 2.0, thread_count=2))
    assert isinstance(error, exceptions.AccessDeniedError)
    control.clear_faults()
    # The manifest is put before the metadata: it was another's by then.
    assert set(place.keys()) == before - ({"run/_torchobj_manifest.json"} if "metadata" in name else set())
    assert loaded(place) == 1.0
    save(place, 3.0)
    assert set(place.keys()) == named(place)


@pytest.mark.parametrize("is_made", [True, False])
def test_files_stay_while_it_is_not_known_whether_the_checkpoint_was_made(place, is_made):
    class Lost(StorageWriter):
        def _put_metadata(self, data):
            if is_made:
                super()._put_metadata(data)
            raise exceptions.StoreTimeoutError("no answer")

    save(place, 1.0)
    error = failure_of(lambda: dcp.save(tensors(2.0), storage_writer=writer_of(place, Lost)))
    assert "s3://" in error.__notes__[0]
    assert "was saved is not known" in error.__notes__[0]
    assert loaded(place) == (2.0 if is_made else 1.0)
    left = set(place.keys()) - named(place)
    assert len(left) == 2
    assert swept(place, older_than_s=0) >= left
    assert loaded(place) == (2.0 if is_made else 1.0)


def test_a_save_whose_files_cannot_be_deleted_leaves_them_to_a_sweep(place, control, caplog):
    control.faults(
        {**REFUSED, "operation": "PutObject", "key": "_torchobj_manifest"}, {**REFUSED, "operation": "DeleteObject"}
    )
    failure_of(lambda: save(place, 2.0))
    control.clear_faults()
    assert "for sweep() to delete" in caplog.text
    assert len(place.keys()) == 2
    assert len(swept(place, older_than_s=0)) == 2
    assert place.keys() == []


# Saves that are killed


def test_a_save_that_is_killed_at_any_request_leaves_what_a_sweep_deletes_and_no_more(place, control):
    saver = Saver(place, Path(__file__).with_name("distributed_killed.py"))
    url = f"{place.url}/run"
    try:
        saver.begin(url=url, value=1)
        assert saver.end() is None
        for key in STRANGERS:
            place.boto.put_object(Bucket=place.bucket, Key=key, Body=b"x")
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
                found_value = value_of(place)
                assert found_value == value + 1 if not killed else found_value in (value, value + 1), at
                before = set(place.keys())
                swept(place, older_than_s=0)
                left = set(place.keys())
                assert left - STRANGERS <= named(place), at
                assert named(place) - left <= {"run/_torchobj_manifest.json"}, at
                assert left >= STRANGERS, at
                assert place.uploads() == [], at
                assert value_of(place) == found_value, at
                found += before != left
                value, request = int(found_value), request + 1
            assert request > 10
        assert found > 10
    finally:
        saver.close()


def value_of(place):
    """The one value of the checkpoint that `distributed_killed.py` saves."""
    found = {"x": torch.zeros(1_500_000), "y": torch.zeros(10)}
    dcp.load(found, storage_reader=StorageReader(f"{place.url}/run", config=place.config))
    [value] = {value for tensor in found.values() for value in tensor.unique().tolist()}
    return value


def shift_times(monkeypatch, shift_of):
    """Has the store say another time of some objects: `shift_of` gives for a name by how many seconds."""
    listed = Place.objects

    def objects(self, *arguments):
        for info in listed(self, *arguments):
            modified = info.last_modified + datetime.timedelta(seconds=shift_of(info.key))
            yield dataclasses.replace(info, last_modified=modified)

    monkeypatch.setattr(Place, "objects", lambda *arguments: list(objects(*arguments)))


def test_the_next_save_deletes_what_expired(place, monkeypatch):
    save(place, 1.0)
    dcp.save(tensors(2.0), storage_writer=writer_of(place, Killed, thread_count=2))
    left = set(place.keys()) - named(place)
    [record] = {key.removeprefix("run/") for key in left if "attempt" in key}
    assert len(left) == 3
    for age_s, found in ((DAY_S - 60, left), (DAY_S + 60, set())):
        with monkeypatch.context() as patch:
            shift_times(patch, lambda name: -age_s if name == record else 0)  # noqa: B023  called in this block
            save(place, 3.0)
        assert set(place.keys()) - named(place) == found
    assert loaded(place) == 3.0


@pytest.mark.parametrize("shift_s", [-10 * DAY_S, 10 * DAY_S])
def test_a_clock_that_is_off_here_makes_no_save_expire(place, monkeypatch, shift_s):
    dcp.save(tensors(2.0), storage_writer=writer_of(place, Killed))
    shift_times(monkeypatch, lambda _: shift_s)
    assert swept(place) == set()
    save(place, 3.0)
    assert len(set(place.keys()) - named(place)) == 2


def test_a_sweep_covers_the_checkpoints_in_subfolders(place):
    for step in (1, 2):
        folder = f"{place.url}/run/step-{step}"
        dcp.save(tensors(1.0), storage_writer=StorageWriter(folder, config=place.config))
        dcp.save(tensors(2.0), storage_writer=Killed(folder, config=place.config))
    strategy = torchobj.dcp.HexPrefixStrategy(epoch_num=3)
    dcp.save(tensors(2.0), storage_writer=writer_of(place, Killed, prefix_strategy=strategy))
    dcp.save(tensors(2.0), storage_writer=Killed(f"{place.url}/running", config=place.config))
    assert swept(place) == set()
    assert len(swept(place, older_than_s=0)) == 6
    keys = {key for key in place.keys() if not key.startswith("running/")}
    assert keys == named(place, "run/step-1") | named(place, "run/step-2")
    assert len(place.keys()) == len(keys) + 2


def rank_dies(rank, url, config):
    dist.init_process_group("gloo")

    class Dying(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank == 1 and write_item.index.fqn == "second":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    state = {f"rank {rank}": torch.rand(1000), "first": torch.rand(10), "second": torch.rand(10)}
    dcp.save(state, storage_writer=StorageWriter(f"{url}/run", config=config), planner=Dying())


def test_what_a_job_leaves_of_which_a_rank_dies_is_swept(place):
    save(place, 1.0)
    with started(rank_dies, place.url, place.config) as ranks:
        for rank in ranks:
            rank.join(LONGEST_S / 2)
    assert -signal.SIGKILL in [rank.exitcode for rank in ranks]
    left = set(place.keys()) - named(place)
    assert left
    assert swept(place, older_than_s=0) == left
    assert loaded(place) == 1.0


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_other_stores_are_swept_too(scheme, tmp_path):
    url = f"file://{tmp_path}/run" if scheme == "file" else "memory://leftovers/run"
    dcp.save(tensors(1.0), storage_writer=StorageWriter(url))
    dcp.save(tensors(2.0), storage_writer=Killed(url))
    assert sweep(url) == []
    assert len(sweep(url, older_than_s=0)) == 2
    found = tensors(0.0)
    dcp.load(found, storage_reader=StorageReader(url))
    assert found["bias"][0] == 1.0
    assert sweep(url, older_than_s=0) == []


# Saves that are running


def test_a_save_that_is_running_is_never_swept_by_another_of_the_same_url(place):
    class Slow(StorageWriter):
        def finish(self, metadata, results):
            save(place, 2.0)
            assert loaded(place) == 2.0
            super().finish(metadata, results)

    save(place, 1.0)
    dcp.save(tensors(3.0), storage_writer=writer_of(place, Slow))
    assert loaded(place) == 3.0
    assert set(place.keys()) == named(place)


def test_a_save_that_is_between_manifest_and_metadata_keeps_its_files(place):
    class Slow(StorageWriter):
        def _put_metadata(self, data):
            save(place, 2.0)
            super()._put_metadata(data)

    dcp.save(tensors(3.0), storage_writer=writer_of(place, Slow))
    assert loaded(place) == 3.0


def test_a_record_is_renewed_while_its_rank_writes(place, control, monkeypatch):
    monkeypatch.setattr(attempt, "_RENEWED_AFTER_S", 0.01)

    def records():
        return [request for request in control.requests("PutObject") if "_torchobj_attempt_" in request.key]

    class Waiting(DefaultSavePlanner):
        def resolve_data(self, write_item):
            assert eventually(lambda: len(records()) > 3)
            return super().resolve_data(write_item)

    dcp.save(tensors(1.0), storage_writer=writer_of(place), planner=Waiting())
    assert loaded(place) == 1.0
    assert set(place.keys()) == named(place)


def test_a_sweep_in_the_process_that_saves_leaves_its_running_save_alone(place):
    class Sweeping(DefaultSavePlanner):
        def resolve_data(self, write_item):
            assert sweep(f"{place.url}/run", older_than_s=0, config=place.config) == []
            return super().resolve_data(write_item)

    dcp.save(tensors(1.0), storage_writer=writer_of(place), planner=Sweeping())
    assert loaded(place) == 1.0


def test_a_save_whose_files_another_process_swept_fails_and_leaves_the_old_checkpoint(place):
    class Late(StorageWriter):
        def finish(self, metadata, results):
            script = (
                "import sys, torchobj, torchobj.checkpoint as c;"
                "s3 = torchobj.S3Options(endpoint_url=sys.argv[2], profile='strict');"
                "config = torchobj.StoreConfig(s3=s3);"
                "assert len(c.sweep(sys.argv[1], older_than_s=0, config=config)) == 2"
            )
            arguments = [f"{place.url}/run", place.config.s3.endpoint_url]
            subprocess.run([sys.executable, "-c", script, *arguments], check=True)
            super().finish(metadata, results)

    save(place, 1.0)
    error = failure_of(lambda: dcp.save(tensors(2.0), storage_writer=writer_of(place, Late)))
    assert isinstance(error, exceptions.CheckpointError)
    assert "another process has swept files of this save" in str(error)
    assert loaded(place) == 1.0
    assert set(place.keys()) == named(place)


def test_a_sweep_that_finds_a_record_renewed_meanwhile_leaves_it(place, control, monkeypatch):
    dcp.save(tensors(1.0), storage_writer=writer_of(place, Killed))
    before = set(place.keys())
    refused = {"status": 412, "code": "PreconditionFailed"}
    control.faults({"operation": "PutObject", "key": "_torchobj_attempt_", "skip": 1, "action": refused})
    assert swept(place, older_than_s=0) == set()
    assert set(place.keys()) == before


def test_plans_that_torch_caches_give_no_two_saves_the_same_files(place):
    names = []
    for value in (1.0, 2.0, 3.0):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(tensors(value), storage_writer=writer_of(place), planner=planner)
        assert loaded(place) == value
        names.append(named(place))
    assert len(set.union(*names)) == 5
