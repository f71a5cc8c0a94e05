"""A distributed save that fails, on whichever rank and by whatever, leaves what was there."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.support.distributed_states import (
    QUIET,
    assert_equal,
    error_of,
    files_of,
    loaded,
    save,
    still_good,
    with_an_old_one,
    writer_of,
)
from tests.support.interrupting import interrupted
from tests.support.prefetching import eventually
from tests.support.ranks import run_ranks
from torchobj import exceptions
from torchobj.checkpoint import StorageWriter

pytestmark = QUIET


PART = {"operation": "UploadPart"}


REFUSED = {"action": {"status": 403, "code": "AccessDenied"}}


def test_a_part_of_one_file_that_fails_fails_the_save(bucket, control):
    old = with_an_old_one(bucket)
    state = {name: torch.rand(6 << 20) for name in "abc"}
    control.faults({**PART, "key": "_1\\.distcp$", "skip": 1, "action": {"status": 403, "code": "AccessDenied"}})
    error = error_of(lambda: save(bucket, state, thread_count=3))
    assert isinstance(error, exceptions.AccessDeniedError)
    assert "_1.distcp" in str(error)
    control.clear_faults()
    assert still_good(bucket, old)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_save_that_is_interrupted_ends_at_once_and_leaves_the_old_checkpoint(bucket, control, threads):
    old = with_an_old_one(bucket)
    state = {name: torch.rand(6 << 20) for name in "abc"}
    with interrupted(control, **PART):
        error = error_of(lambda: save(bucket, state, thread_count=threads))
    assert isinstance(error, KeyboardInterrupt)
    assert eventually(lambda: bucket.uploads() == [])
    assert still_good(bucket, old)


def test_an_upload_that_begins_while_the_save_is_interrupted_is_aborted(bucket, control):
    old = with_an_old_one(bucket)
    # The server has begun the upload, and its response arrives after the interrupt.
    with interrupted(control, 3, operation="CreateMultipartUpload"):
        error = error_of(lambda: save(bucket, {"a": torch.rand(6 << 20)}))
    assert isinstance(error, KeyboardInterrupt)
    assert eventually(lambda: control.requests("AbortMultipartUpload") and bucket.uploads() == [])
    assert still_good(bucket, old)


class Failing(DefaultSavePlanner):
    def resolve_data(self, write_item):
        if write_item.index.fqn == "bad":
            raise ZeroDivisionError("the planner failed")
        return super().resolve_data(write_item)


def test_an_item_that_cannot_be_resolved_fails_the_save(bucket):
    old = with_an_old_one(bucket)
    state = {"a": torch.rand(5 << 20), "bad": torch.rand(6 << 20), "c": torch.rand(7 << 20)}
    for threads in (1, 3):
        writer = writer_of(bucket, thread_count=threads)
        error = error_of(lambda writer=writer: dcp.save(state, storage_writer=writer, planner=Failing()))
        assert isinstance(error, ZeroDivisionError)
        assert still_good(bucket, old)


def test_an_object_that_cannot_be_pickled_fails_the_save(bucket):
    old = with_an_old_one(bucket)
    error = error_of(lambda: save(bucket, {"a": torch.rand(100), "bad": lambda: 1}))
    assert "lambda" in str(error)
    assert still_good(bucket, old)


def test_a_save_whose_metadata_fails_leaves_the_old_checkpoint(bucket, control):
    old = with_an_old_one(bucket)
    control.faults({"operation": "PutObject", "key": "\\.metadata$", "action": {"status": 403, "code": "AccessDenied"}})
    error = error_of(lambda: save(bucket, {"weight": torch.rand(100)}))
    assert isinstance(error, exceptions.AccessDeniedError)
    control.clear_faults()
    assert still_good(bucket, old)
    assert len(files_of(bucket)) == 1
    new = {"weight": torch.rand(100)}
    save(bucket, new)
    assert still_good(bucket, new)
    assert len(files_of(bucket)) == 1


def test_a_save_whose_old_files_cannot_be_deleted_is_saved_and_warns(bucket, control, caplog):
    with_an_old_one(bucket)
    [old] = files_of(bucket)
    control.faults(*({**REFUSED, "operation": operation} for operation in ("DeleteObject", "DeleteObjects")))
    new = {"weight": torch.rand(100)}
    save(bucket, new)
    control.clear_faults()
    assert still_good(bucket, new)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"{bucket.url}/step 1 is saved" in warning
    assert old.removeprefix("step 1/") in warning
    assert old in files_of(bucket)


@pytest.mark.parametrize("name", ["../step 2/__0_0.distcp", "config.json", ".metadata", "/x.distcp", 5, ("a",), ["a"]])
def test_what_is_no_file_of_the_checkpoint_is_never_deleted(bucket, name, caplog):
    save(bucket, {"weight": torch.rand(100)})
    metadata = pickle.loads(bucket.body("step 1/.metadata"))
    [info] = metadata.storage_data.values()
    info.relative_path = name
    bucket.write("step 1/.metadata", pickle.dumps(metadata))
    before = {f"step 1/{name}", "step 2/__0_0.distcp", *files_of(bucket)} - {"step 1/.metadata"}
    for key in before:
        bucket.write(key, b"kept")
    new = {"weight": torch.rand(100)}
    save(bucket, new)
    assert_equal(loaded(bucket, new), new)
    assert before <= set(bucket.keys())
    assert "not deleted" in caplog.text


def one_rank_fails(rank, url, config):
    dist.init_process_group("gloo")
    state = {f"rank {rank}": torch.rand(1000), f"bad{rank}": torch.rand(1000)}

    class FailingOnOne(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if write_item.index.fqn == "bad1":
                raise ZeroDivisionError("rank 1 failed")
            return super().resolve_data(write_item)

    writer = StorageWriter(f"{url}/step 1", config=config)
    dcp.save(state, storage_writer=writer, planner=FailingOnOne(dedup_save_to_lowest_rank=True))


def test_a_rank_that_fails_fails_all_ranks_with_its_error(bucket):
    old = with_an_old_one(bucket)
    for name, text, _ in run_ranks(one_rank_fails, bucket.url, bucket.config):
        assert name == "CheckpointException"
        assert "ZeroDivisionError: rank 1 failed" in text
    assert still_good(bucket, old)


def test_a_result_that_is_missing_fails_the_save(bucket):
    class Forgetful(StorageWriter):
        def finish(self, metadata, results):
            super().finish(metadata, [of_rank[1:] for of_rank in results])

    writer = Forgetful(f"{bucket.url}/step 1", config=bucket.config)
    state = {"first": torch.rand(3), "second": torch.rand(3)}
    error = error_of(lambda: dcp.save(state, storage_writer=writer))
    assert isinstance(error, exceptions.CheckpointError)
    assert "first" in str(error)
    assert "no rank wrote it" in str(error)
    assert "step 1/.metadata" not in bucket.keys()
