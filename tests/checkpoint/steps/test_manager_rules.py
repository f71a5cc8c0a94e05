"""Steps that rules keep and delete, failures after a commit, and sweeps."""

import json
import logging

import numpy
import pytest
import torch

import torchobj
from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import LARGE, Holder, data_keys, saved_value, tensor
from torchobj import exceptions
from torchobj.checkpoint import CheckpointManager, sweep
from torchobj.checkpoint.dcp.object_names import FileNames
from torchobj.checkpoint.steps import pending_save, state_content

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)


@pytest.mark.providers("s3", "gs")
def test_rules_keep_the_newest_multiples_and_best_steps_without_failed_ones(open_manager, bucket, control):
    manager = open_manager(keep_last=2, keep_every=10, keep_best=("loss", "min", 1))
    for step, loss in ((10, 5.0), (12, 1.0), (14, 3.0), (16, 4.0)):
        manager.save(step, {"x": tensor(step)}, {"loss": loss})
    control.faults({"operation": "PutObject", "key": "commits/", "action": {"status": 403, "code": "AccessDenied"}})
    for step in (18, 20, 22):
        with pytest.raises(exceptions.AccessDeniedError):
            manager.save(step, {"x": tensor(step)}, {"loss": 0.0})
    control.clear_faults()
    assert manager.steps() == [10, 12, 14, 16]
    manager.save(24, {"x": tensor(24)}, {"loss": float("nan")})
    assert manager.steps() == [10, 12, 16, 24]
    assert [saved_value(manager, step) for step in manager.steps()] == [10, 12, 16, 24]
    # A step with a lower number may still be the last one saved.
    manager.save(2, {"x": tensor(2)})
    assert manager.steps() == [2, 10, 12, 16, 24]
    assert len(data_keys(bucket)) == 5


def test_going_back_keeps_new_steps_and_warns_of_the_latest_one(open_manager, caplog):
    manager = open_manager(keep_last=2)
    for step in (100, 200, 300, 110, 120, 130):
        manager.save(step, {"x": tensor(step)})
    assert (manager.steps(), manager.latest()) == ([120, 130, 200, 300], 300)
    assert (
        "step 130 is saved, but the latest step is still 300; to give up later steps, delete(step) each of [200, 300]"
        in caplog.text
    )
    manager.delete(200)
    manager.delete(300)
    caplog.clear()
    manager.save(140, {"x": tensor(140)})
    assert (manager.steps(), caplog.text) == ([130, 140], "")


def test_deleted_steps_are_logged(open_manager, caplog):
    manager = open_manager(keep_last=1)
    with caplog.at_level(logging.INFO, "torchobj"):
        manager.save(1, {"x": tensor(1)})
        manager.save(2, {"x": tensor(2)})
    assert "deleted step 1: no rule keeps it" in caplog.text


def test_best_and_metrics_return_the_best_step_and_its_metrics(open_manager, caplog):
    manager, infinite = open_manager(keep_last=3, keep_best=("loss", "min", 1)), float("inf")
    assert manager.best() is None
    for step, loss in ((1, 2.0), (2, -infinite), (3, infinite), (4, float("nan"))):
        manager.save(step, {"x": tensor(step)}, {"loss": loss})
    assert caplog.text == ""
    manager.save(5, {"x": tensor(5)}, {"los": 1})
    manager.save(6, {"x": tensor(6)})
    assert caplog.text.count("without the metric 'loss' of keep_best") == 1
    again = open_manager(keep_best=("loss", "min", 1))
    assert (again.best(), again.steps(), again.metrics(2)) == (2, [2, 4, 5, 6], {"loss": -infinite})
    assert open_manager(keep_best=("loss", "max", 1)).best() == 2
    with pytest.raises(exceptions.ConfigError, match="keep_best=None"):
        open_manager().best()
    with pytest.raises(exceptions.CheckpointError, match="step 3 is not committed"):
        again.metrics(3)


@pytest.mark.providers("s3", "gs")
def test_a_missing_bucket_raises_instead_of_returning_no_steps(bucket, config):
    manager = CheckpointManager(f"{bucket.url}-misspelt/run", config=config)
    asked = [manager.latest, manager.steps, manager.restore, manager.leftovers, lambda: manager.save(1, {})]
    for ask in asked:
        with pytest.raises(exceptions.BucketNotFoundError):
            ask()


def test_a_step_that_another_process_saves_again_is_not_deleted_by_a_rule(open_manager, monkeypatch):
    mine, other = open_manager(keep_last=1), open_manager(keep_last=None)
    mine.save(1, {"x": tensor(1)})
    real = pending_save.expired

    def meanwhile(*given):
        monkeypatch.setattr(pending_save, "expired", real)
        other.save(1, {"x": tensor(10)}, overwrite=True)
        return real(*given)

    monkeypatch.setattr(pending_save, "expired", meanwhile)
    mine.save(2, {"x": tensor(2)})
    assert mine.steps() == [1, 2]
    assert (saved_value(mine, 1), mine.leftovers()) == (10.0, [])


def test_a_refused_commit_leaves_no_data(manager, bucket, control):
    control.faults({"operation": "PutObject", "key": "commits/", "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.AccessDeniedError):
        manager.save(1, {"x": tensor(1)})
    assert bucket.keys() == []


@pytest.mark.providers("s3")
def test_the_error_of_an_aborted_upload_mentions_sweep(manager, control):
    control.faults({"operation": "UploadPart", "action": {"status": 404, "code": "NoSuchUpload"}})
    with pytest.raises(exceptions.StoreError) as caught:
        manager.save(1, {"x": tensor(1, LARGE)})
    assert "did it call sweep with too small an age" in caught.value.__notes__[0]


def test_a_background_failure_logs_one_line(manager, control, caplog):
    control.faults({"operation": "PutObject", "key": "steps/", "action": {"status": 403, "code": "AccessDenied"}})
    with caplog.at_level(logging.INFO, "torchobj"):
        assert manager.save_async(1, {"x": tensor(1)}).exception() is not None
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith("step 1 was not saved: AccessDeniedError: put ")
    assert record.exc_info is None


@pytest.mark.providers("s3", "gs")
def test_a_failed_deletion_does_not_fail_the_save_and_is_repeated_by_the_next(open_manager, control, caplog):
    manager = open_manager(keep_last=1)
    manager.save(1, {"x": tensor(1)})
    control.faults(
        {"operation": "DeleteObjects", "action": {"status": 403, "code": "AccessDenied"}},
        {"operation": "DeleteObject", "action": {"status": 403, "code": "AccessDenied"}},
    )
    manager.save(2, {"x": tensor(2)})
    manager.save(3, {"x": tensor(3)})
    assert "step 2 is saved, but old steps were not deleted" in caplog.text
    permission = "storage.objects.delete" if manager.url.startswith("gs:") else "s3:DeleteObject"
    assert caplog.text.count(f"grant {permission}") == 1
    control.clear_faults()
    assert manager.steps() == [1, 2, 3]
    manager.save(4, {"x": tensor(4)})
    assert manager.steps() == [4]


def test_an_invalid_commit_object_is_neither_counted_nor_deleted_by_rules(open_manager, bucket, caplog):
    manager = open_manager(keep_last=1)
    manager.save(1, {"x": tensor(1)})
    good = json.loads(bucket.body("run/commits/000000000001.json"))
    stranger = "run/keep/me"
    bucket.write(stranger, b"x")
    broken = {
        90: b"no json",
        91: json.dumps(good | {"version": 2}).encode(),
        92: json.dumps(good | {"step": 92, "objects": [{"key": "keep/me", "size": 1}]}).encode(),
        93: json.dumps(good).encode(),
        94: b"[]",
    }
    for step, body in broken.items():
        bucket.write(f"run/commits/{step:012}.json", body)
        with pytest.raises(exceptions.CheckpointError, match=rf"not a valid commit object.*delete\({step}\)"):
            manager.restore(step)
    assert manager.restore(1)["x"][0] == 1
    manager.save(2, {"x": tensor(2)})
    manager.sweep(0)
    assert manager.steps() == [2, *broken]
    assert stranger in bucket.keys()
    assert "version 2, this torchobj reads 1" in caplog.text
    with pytest.raises(exceptions.CheckpointError, match="000000000094.json: not a valid commit object"):
        manager.restore()
    manager.delete(94)
    manager.save(93, {"x": tensor(93)}, overwrite=True)
    assert (manager.steps(), saved_value(manager)) == ([90, 91, 92, 93], 93.0)
    assert stranger in bucket.keys()


@pytest.mark.providers("s3")
def test_a_sweep_deletes_old_data_without_a_commit_only(manager, bucket, control, gate):
    gate.open.set()
    manager.save(1, {"x": tensor(1)})
    dead, foreign = f"run/steps/{4:012}-{'0f' * 16}", ["run/steps/mine", "run/steps/000000000004-notes/x", "elsewhere"]
    for key in (f"{dead}/state.pt", f"{dead}/more/deep.bin", *foreign):
        bucket.write(key, b"x")
    for key in (f"{dead}/second.pt", "run/other"):
        bucket.boto.create_multipart_upload(Bucket=bucket.name, Key=key)
    assert {(item.key, item.size, item.step) for item in manager.leftovers()} == {
        (f"{dead}/state.pt".removeprefix("run/"), 1, 4),
        (f"{dead}/more/deep.bin".removeprefix("run/"), 1, 4),
        (f"{dead}/second.pt".removeprefix("run/"), None, 4),
    }
    assert manager.sweep() == []
    # Advances the server's clock, within the limit of signatures.
    control.clock(200)
    torchobj.Store(bucket.url, config=bucket.config).put(f"{dead}/state.pt", b"written again")
    control.clock(400)
    # The age of an attempt is that of its last write.
    assert manager.sweep(300) == []
    gate.open.clear()
    gate.reached.clear()
    handle = manager.save_async(9, {"x": tensor(9)})
    assert gate.reached.wait(60)
    control.clock(700)
    assert len(manager.sweep(300)) == 3
    control.clock(0)
    gate.open.set()
    handle.result()
    assert manager.leftovers() == []
    assert set(foreign) < set(bucket.keys())
    assert [upload["Key"] for upload in bucket.uploads()] == ["run/other"]
    assert [saved_value(manager, step) for step in manager.steps()] == [1, 9]
    with pytest.raises(exceptions.ConfigError, match="older_than_s"):
        manager.sweep(-1)


@pytest.mark.providers("s3")
def test_uploads_are_found_on_a_server_that_lists_them_for_whole_keys_only(manager, bucket, control):
    control.bucket(bucket.name, {"lists_uploads_of_keys": True})
    dead = f"run/steps/{4:012}-{'0f' * 16}/state.pt"
    part = f"run/{FileNames('').file(0)}"
    for key in (dead, part, "run/other", "other"):
        bucket.boto.create_multipart_upload(Bucket=bucket.name, Key=key)
    store = torchobj.Store(bucket.url, config=bucket.config)
    assert [upload.key for upload in store.unfinished_uploads("run/")] == sorted([part, "run/other", dead])
    assert [item.key for item in manager.leftovers()] == [dead.removeprefix("run/")]
    manager.sweep(0)
    assert [upload["Key"] for upload in bucket.uploads()] == sorted(["other", part, "run/other"])
    assert sweep(f"{bucket.url}/run", older_than_s=0, config=bucket.config) == []
    assert [upload["Key"] for upload in bucket.uploads()] == ["other", "run/other"]


def test_data_that_is_swept_before_the_commit_is_not_committed(manager, open_manager, bucket, monkeypatch):
    real = state_content.save_counted

    def save_and_lose(state, url, **named):
        saved = real(state, url, **named)
        bucket.remove(url.removeprefix(f"{bucket.url}/"))
        return saved

    monkeypatch.setattr(state_content, "save_counted", save_and_lose)
    with pytest.raises(
        exceptions.CheckpointError, match=r"state.pt is gone, or has another size; did another process call sweep\?"
    ):
        manager.save(1, {"x": tensor(1)})
    assert bucket.keys() == []


@pytest.mark.providers("s3", "gs")
def test_a_server_without_conditions_logs_a_warning_and_versions_are_compared(manager, bucket, control, caplog):
    control.faults({"operation": "PutObject", "key": "commits/", "times": 1, "action": {"status": 501}})
    manager.save(1, {"x": tensor(1)})
    assert "does not support conditional writes" in caplog.text
    assert saved_value(manager) == 1.0


def test_a_server_without_conditions_writes_the_pointer_without_a_warning(manager, bucket, control, caplog):
    control.faults({"operation": "PutObject", "key": "latest.json", "times": 1, "action": {"status": 501}})
    manager.save(1, {"x": tensor(1)})
    assert "run/latest.json" in bucket.keys()
    assert "conditional" not in caplog.text


def test_mismatches_are_named_before_anything_is_overwritten(manager):
    model = torch.nn.Linear(2, 2)
    manager.save(1, {"x": tensor(1), "deep": {"y": tensor(2)}, "model": model, "step": 1})
    for wrong, named in [
        (
            {"deep": {"y": torch.zeros(5)}},
            r"deep.y: torch.float32 of shape \(5,\) here, torch.float32 of shape \(4,\) in the checkpoint",
        ),
        ({"deep": {"y": torch.zeros(4, dtype=torch.int32)}}, "deep.y: torch.int32 .* here"),
        ({"deep": torch.zeros(4)}, "deep: Tensor here, dict in the checkpoint"),
        ({"step": {"a": 1}}, "step: dict here, int in the checkpoint"),
        ({"deep": {"z": 1}}, "deep.z: not in the checkpoint; deep.y: only in the checkpoint"),
        (
            {"model": torch.nn.Linear(3, 2)},
            r"model.weight: a tensor of shape \(2, 3\) here, .* of shape \(2, 2\) in the checkpoint",
        ),
        ({"model": torch.nn.Linear(2, 2, bias=False)}, "model.bias: only in the checkpoint"),
    ]:
        into = {"x": torch.zeros(4), **wrong}
        with pytest.raises(exceptions.CheckpointError, match=named):
            manager.restore(into=into)
        assert torch.equal(into["x"], torch.zeros(4))
    with pytest.raises((exceptions.CheckpointError, exceptions.ConfigError), match="nothing_there"):
        manager.restore(into={"x": torch.zeros(4), "nothing_there": 1})
    some = {"x": torch.zeros(4)}
    there = some["x"]
    assert manager.restore(into=some) is some
    assert some["x"] is there
    assert torch.equal(there, tensor(1))


def test_bad_input_raises_before_anything_is_written(manager, bucket):
    state = {"x": tensor(1)}
    for call, named in [
        (lambda: CheckpointManager("ftp://x/y"), "scheme 'ftp'"),
        (lambda: CheckpointManager("/a/path"), "not a URL"),
        (lambda: CheckpointManager("s3://"), "no bucket"),
        (lambda: manager.save(-1, state), "step=-1"),
        (lambda: manager.save(True, state), "step=True"),
        (lambda: manager.save(10**12, state), "step=1000000000000"),
        (lambda: manager.save("1", state), "step='1'"),
        (lambda: manager.save(1.0, state), "step=1.0"),
        (lambda: manager.save(1, [1]), "state is a list"),
        (lambda: manager.save(1, state, {"loss": "low"}), "metrics="),
        (lambda: manager.save(1, state, [1]), "metrics="),
        (lambda: manager.save_async(1, state, when_busy="later"), "when_busy='later'"),
        (lambda: manager.restore("newest"), "step='newest'"),
        (lambda: manager.restore("latest"), "no step is committed"),
        (lambda: manager.delete(1), "step 1 is not committed"),
    ]:
        with pytest.raises((exceptions.ConfigError, exceptions.CheckpointError), match=named):
            call()
    assert bucket.keys() == []


def test_any_integer_type_is_a_step(manager):
    manager.save(numpy.int64(3), {"x": tensor(3)})
    handle = manager.save_async(torch.tensor(4), {"x": tensor(4)})
    handle.result()
    assert saved_value(manager, numpy.uint8(3)) == 3.0
    assert (handle.step, manager.steps()) == (4, [3, 4])


def test_other_than_plain_data_is_refused_by_default(manager):
    manager.save(1, {"x": tensor(1), "holder": Holder(3)})
    with pytest.raises(Exception, match="Holder"):
        manager.restore()
    assert manager.restore(weights_only=False)["holder"].inner == 3


@pytest.mark.parametrize("method", ["save", "save_async"])
@pytest.mark.parametrize("overwrite", ["no", 1, None])
def test_an_overwrite_that_is_no_bool_is_refused_and_replaces_nothing(tmp_path, method, overwrite):
    with CheckpointManager(f"file://{tmp_path}/run") as manager:
        manager.save(1, {"x": tensor(1)})
        with pytest.raises(exceptions.ConfigError, match=f"overwrite={overwrite!r}: must be True or False"):
            getattr(manager, method)(1, {"x": tensor(2)}, overwrite=overwrite)
        assert torch.equal(manager.restore(1)["x"], tensor(1))
