"""Distributed checkpoints that are replaced, damaged, gone, or not where they are said to be."""

import datetime
import multiprocessing
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torchobj
import torchobj.s3torchconnector.dcp
from tests.support.distributed_states import (
    QUIET,
    assert_equal,
    blank,
    error_of,
    files_of,
    loaded,
    reader_of,
    save,
    still_good,
    upload,
    with_an_old_one,
)
from tests.support.ranks import LONGEST_S, run_ranks, started
from torchobj import exceptions
from torchobj.checkpoint import StorageReader, StorageWriter
from torchobj.checkpoint.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp import load_items

pytestmark = QUIET


def test_a_checkpoint_is_replaced_whole_and_leaves_nothing(bucket):
    save(bucket, {"weight": torch.zeros(1000)}, thread_count=3)
    before = files_of(bucket)
    new = {"weight": torch.rand(1000), "bias": torch.rand(5)}
    save(bucket, new, thread_count=2)
    assert_equal(loaded(bucket, new), new)
    assert len(files_of(bucket)) == 2
    assert not set(before) & set(files_of(bucket))


def saved_by_ranks(rank, url, config, value):
    dist.init_process_group("gloo")
    state = {"shared": torch.full((300,), value), f"rank {rank}": torch.full((1000,), value)}
    dcp.save(state, storage_writer=StorageWriter(f"{url}/step 1", config=config))


def test_a_checkpoint_of_another_number_of_ranks_is_replaced_whole(bucket):
    state = {"shared": torch.full((300,), 1.0), "rank 0": torch.full((1000,), 1.0)}
    save(bucket, state)
    run_ranks(saved_by_ranks, bucket.url, bucket.config, 2.0)
    assert len(files_of(bucket)) == 2
    both = {name: torch.full((1000 if "rank" in name else 300,), 2.0) for name in ("shared", "rank 0", "rank 1")}
    assert_equal(loaded(bucket, both), both)
    save(bucket, state)
    assert len(files_of(bucket)) == 1
    assert_equal(loaded(bucket, state), state)


def test_a_checkpoint_of_torch_is_replaced_too(bucket, tmp_path):
    dcp.save({"weight": torch.zeros(1000)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    upload(bucket, tmp_path)
    new = {"weight": torch.rand(1000)}
    save(bucket, new)
    assert still_good(bucket, new)
    assert "step 1/__0_0.distcp" not in bucket.keys()


def test_a_save_that_failed_changes_nothing_for_the_next_one(bucket, control):
    with_an_old_one(bucket)
    before = set(files_of(bucket))
    refused = {"operation": "PutObject", "key": "\\.metadata$", "times": 1}
    control.faults({**refused, "action": {"status": 403, "code": "AccessDenied"}})
    new = {"weight": torch.rand(100)}
    error_of(lambda: save(bucket, new))
    assert before <= set(files_of(bucket))
    save(bucket, new)
    assert not before & set(files_of(bucket))


def test_a_checkpoint_whose_metadata_is_damaged_is_replaced_and_its_files_stay(bucket, caplog):
    with_an_old_one(bucket)
    before = set(files_of(bucket))
    bucket.write("step 1/.metadata", b"{")
    new = {"weight": torch.rand(100)}
    save(bucket, new)
    assert_equal(loaded(bucket, new), new)
    assert before < set(files_of(bucket))
    assert "its old files are not deleted" in caplog.text


def test_an_existing_checkpoint_is_not_overwritten_unless_it_may_be(bucket):
    old = with_an_old_one(bucket)
    error = error_of(lambda: save(bucket, {"weight": torch.rand(3)}, overwrite=False))
    assert isinstance(error, exceptions.CheckpointError)
    # torch's own writer begins with the same words.
    assert str(error).startswith("Checkpoint already exists")
    assert "overwrite=False" in str(error) and "step 1/.metadata" in str(error)
    assert still_good(bucket, old)


@pytest.mark.parametrize("overwrite", [1, None, "no"])
@pytest.mark.parametrize(
    "kind",
    [StorageWriter, lambda url, **settings: torchobj.s3torchconnector.dcp.S3StorageWriter(None, url, **settings)],
)
def test_an_overwrite_that_is_no_bool_is_refused_before_a_file_is_written(kind, overwrite):
    with pytest.raises(exceptions.ConfigError, match=f"overwrite={overwrite!r}: must be True or False"):
        kind("s3://bucket/step 1", overwrite=overwrite)


def test_of_two_writers_that_may_not_overwrite_one_wins(bucket):
    class Late(StorageWriter):
        def finish(self, metadata, results):
            save(bucket, {"weight": torch.full((3,), 1.0)}, overwrite=False)
            super().finish(metadata, results)

    writer = Late(f"{bucket.url}/step 1", config=bucket.config, overwrite=False)
    error = error_of(lambda: dcp.save({"weight": torch.zeros(3)}, storage_writer=writer))
    assert isinstance(error, exceptions.CheckpointError)
    assert torch.equal(loaded(bucket, {"weight": torch.zeros(3)})["weight"], torch.ones(3))


def test_a_put_of_the_metadata_whose_answer_is_lost_is_no_other_writer(bucket, control):
    control.faults({"operation": "PutObject", "key": "\\.metadata$", "times": 1, "action": {"lose_response": True}})
    state = {"weight": torch.rand(3)}
    save(bucket, state, overwrite=False)
    assert still_good(bucket, state)


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_flipped_byte_is_an_error_that_names_tensor_and_file(bucket, name):
    state = {"small": torch.rand(100), "large": torch.rand(100_000)}
    save(bucket, state)
    [key] = files_of(bucket)
    body = bytearray(bucket.body(key))
    body[bytes(body).index(state[name].numpy().tobytes()) + 13] ^= 1
    bucket.write(key, bytes(body))
    error = error_of(lambda: loaded(bucket, state))
    assert isinstance(error, exceptions.IntegrityError)
    assert name in str(error)
    assert key in str(error)
    loaded(bucket, state, verify=False)


def test_a_byte_flipped_around_a_tensor_is_an_error_or_no_harm(bucket):
    state = {"weight": torch.rand(5000)}
    save(bucket, state)
    [key] = files_of(bucket)
    good = bucket.body(key)
    start = good.index(state["weight"].numpy().tobytes())
    for position in (5, 70, 130, 215, start - 40, start + 20_000, start + 20_006):
        body = bytearray(good)
        body[position] ^= 4
        bucket.write(key, bytes(body))
        found = blank(state)
        try:
            dcp.load(found, storage_reader=reader_of(bucket))
        except CheckpointException as failed:
            [(error, _)] = failed.failures.values()
            assert isinstance(error, exceptions.TorchobjError), position
        else:
            assert_equal(found, state)


def test_a_short_object_is_an_error(bucket):
    state = {"weight": torch.rand(100_000)}
    save(bucket, state)
    [key] = files_of(bucket)
    bucket.write(key, bucket.body(key)[:200_000])
    error = error_of(lambda: loaded(bucket, state))
    assert isinstance(error, exceptions.StoreError)
    assert key in str(error)


def test_a_file_that_another_save_replaces_in_the_middle_of_a_load_is_an_error(any_bucket, tmp_path, monkeypatch):
    def put(value):
        state = {str(number): torch.full((9000 + number,), value) for number in range(6)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
        upload(any_bucket, tmp_path)
        return state

    first = put(1.0)
    monkeypatch.setattr(load_items, "_WAVE_BYTES", 10_000)
    read = load_items._Load._next_wave

    def read_and_replace(self):
        monkeypatch.setattr(load_items._Load, "_next_wave", read)
        wave = read(self)
        put(2.0)
        return wave

    monkeypatch.setattr(load_items._Load, "_next_wave", read_and_replace)
    # Of another dtype, so that they are read through buffers, in waves.
    found = {name: torch.zeros(tensor.shape, dtype=torch.float16) for name, tensor in first.items()}
    error = error_of(lambda: dcp.load(found, storage_reader=reader_of(any_bucket)))
    assert isinstance(error, exceptions.ObjectChangedError)
    assert "__0_0.distcp" in str(error)


def test_a_file_that_is_gone_is_an_error(bucket):
    state = {"weight": torch.rand(100)}
    save(bucket, state)
    [key] = files_of(bucket)
    bucket.remove(key)
    assert isinstance(error_of(lambda: loaded(bucket, state)), exceptions.ObjectNotFoundError)


def test_a_store_that_asks_for_less_is_asked_again(bucket, control):
    slow = {"status": 503, "code": "SlowDown"}
    control.faults(
        {"operation": "UploadPart", "probability": 0.1, "seed": 1, "action": slow},
        {"operation": "GetObject", "probability": 0.1, "seed": 2, "action": slow},
    )
    state = {str(number): torch.rand(3 << 20) for number in range(6)}
    save(bucket, state, thread_count=2)
    assert_equal(loaded(bucket, state), state)
    assert control.fault_report()[0]["fired"]
    assert bucket.uploads() == []


@pytest.mark.parametrize("url", ["/a/folder", "az://bucket/x", "s3://", 5])
def test_what_is_no_url_is_refused(url):
    for kind in (StorageWriter, StorageReader):
        assert not kind.validate_checkpoint_id(url)
        with pytest.raises(exceptions.ConfigError):
            kind(url)
        with pytest.raises(exceptions.ConfigError):
            kind("memory://x/y").reset(url)


def test_a_path_is_refused_for_it_has_lost_a_slash(tmp_path):
    with pytest.raises(exceptions.ConfigError, match="must be a URL as a str"):
        StorageWriter(tmp_path)


def test_a_checkpoint_id_names_another_checkpoint(bucket):
    writer = StorageWriter(f"{bucket.url}/unused", config=bucket.config)
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer, checkpoint_id=f"{bucket.url}/step 1/")
    assert writer.checkpoint_id == f"{bucket.url}/step 1"
    found = {"weight": torch.zeros(3)}
    reader = StorageReader(f"{bucket.url}/unused", config=bucket.config)
    dcp.load(found, storage_reader=reader, checkpoint_id=f"{bucket.url}/step 1")
    assert torch.equal(found["weight"], torch.ones(3))


def test_where_there_is_no_checkpoint_it_says_so(bucket):
    with pytest.raises(CheckpointException, match="no such object|not found|NoSuchKey|404"):
        loaded(bucket, {"weight": torch.rand(3)})


def test_where_a_checkpoint_lies():
    for url, base in (
        ("file:///a/b", "file:///a/b"),
        ("s3://b/a", "s3://b"),
        ("s3://b", "s3://b"),
        ("file://", "file://"),
    ):
        folder = CheckpointDir(f"{url}/", torchobj.StoreConfig())
        assert (folder.url, folder.url_of("x")) == (url, f"{url}/x")
        assert f"{folder.store.url}/{folder.key('x')}" == f"{url}/x"
        assert folder.store.url == base
        assert pickle.loads(pickle.dumps(folder)).url == url


def dies_in_the_middle(rank, url, config, results):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))

    class Dying(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(write_item)

    try:
        state = {f"rank {rank}": torch.rand(1000), "shared": torch.rand(10)}
        dcp.save(state, storage_writer=StorageWriter(f"{url}/step 1", config=config), planner=Dying())
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")
    else:
        results.put("saved")
    os._exit(0)


def test_a_rank_that_dies_leaves_the_old_checkpoint(bucket):
    old = with_an_old_one(bucket)
    results = multiprocessing.get_context("fork").SimpleQueue()
    with started(dies_in_the_middle, bucket.url, bucket.config, results) as ranks:
        for rank in ranks:
            rank.join(LONGEST_S / 2)
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL]
    assert results.get() != "saved"
    assert still_good(bucket, old)


def test_a_save_that_replaces_another_programs_checkpoint_keeps_files_that_other_metadata_names(tmp_path):
    kept, new = {"x": torch.ones(3)}, {"x": torch.zeros(3)}
    url = f"file://{tmp_path}/step"
    dcp.save(kept, storage_writer=StorageWriter(url), no_dist=True, use_collectives=False)
    [file] = (tmp_path / "step").glob("*.distcp")
    os.utime(file, (1, 1))
    dcp.save(new, storage_writer=dcp.FileSystemWriter(tmp_path / "step"), no_dist=True)
    dcp.save(new, storage_writer=StorageWriter(url), no_dist=True)
    assert file.exists()
    assert not (tmp_path / "step" / "__0_0.distcp").exists()
