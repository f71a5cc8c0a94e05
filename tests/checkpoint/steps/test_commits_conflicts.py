"""Other writers, lost responses and refusals: one writer commits, and the others leave nothing."""

import dataclasses
import json
import threading

import pytest

from tests.support.long_tables import GCS_IN_MATRIX
from tests.support.managers import LARGE, data_keys, nothing_of, saved_value, tensor
from tests.support.settings import with_profile
from torchobj import exceptions
from torchobj.checkpoint.steps import state_content

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

BODIES = ("steps/", "commits/")


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("attempts", [1, 10], ids=["no retry", "a retry that receives 412"])
def test_a_commit_with_a_lost_response_is_committed(open_manager, bucket, config, control, attempts):
    manager = open_manager(config=dataclasses.replace(config, max_attempts=attempts))
    control.faults({"operation": "PutObject", "key": "commits/", "times": 1, "action": {"lose_response": True}})
    manager.save(1, {"x": tensor(1)})
    assert control.fault_report()[0]["fired"] == 1
    assert (manager.steps(), saved_value(manager), manager.leftovers()) == ([1], 1.0, [])


def test_the_data_of_a_commit_that_cannot_be_checked_is_kept_with_a_note(open_manager, bucket, config, control):
    manager = open_manager(config=dataclasses.replace(config, max_attempts=1))
    control.faults(
        {"operation": "PutObject", "key": "commits/", "action": {"lose_response": True}},
        {"operation": "GetObject", "action": {"status": 500}},
    )
    with pytest.raises(exceptions.StoreError) as caught:
        manager.save(1, {"x": tensor(1)})
    assert "it is not known whether step 1 was committed" in caught.value.__notes__[0]
    control.clear_faults()
    assert (manager.steps(), saved_value(manager)) == ([1], 1.0)


class SavedMeanwhile:
    """Another writer commits the same step while `state_dict` of this object runs."""

    def __init__(self, other, step):
        self.other, self.step = other, step

    def state_dict(self):
        self.other.save(self.step, {"x": tensor(100)}, overwrite=True)
        return {}

    def load_state_dict(self, state):
        raise AssertionError("is never restored")


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("exists", [False, True], ids=["new step", "overwritten step"])
def test_the_second_of_two_writers_of_a_step_raises_and_leaves_nothing(open_manager, bucket, exists):
    mine, other = open_manager(), open_manager()
    if exists:
        mine.save(5, {"x": tensor(0)})
    with pytest.raises(exceptions.CheckpointError, match="step 5 was committed by another writer"):
        mine.save(5, {"x": tensor(1, LARGE), "race": SavedMeanwhile(other, 5)}, overwrite=exists)
    assert (mine.steps(), saved_value(mine), mine.leftovers()) == ([5], 100.0, [])
    assert len(data_keys(bucket)) == 1
    assert bucket.uploads() == []


def test_exactly_one_of_many_writers_of_a_step_commits(open_manager):
    managers = [open_manager() for _ in range(6)]
    start, outcomes = threading.Barrier(len(managers)), {}

    def save(number):
        start.wait()
        try:
            managers[number].save(1, {"x": tensor(number)})
            outcomes[number] = None
        except exceptions.CheckpointError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=save, args=(number,)) for number in range(len(managers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [number for number, error in outcomes.items() if error is None]
    assert len(outcomes) == len(managers)
    assert saved_value(managers[0]) == winner
    assert managers[0].leftovers() == []


def test_a_step_is_replaced_only_with_overwrite_and_by_a_complete_one(manager, bucket, control):
    manager.save(1, {"x": tensor(1)})
    with pytest.raises(exceptions.CheckpointError, match="step 1 is committed already; overwrite=True"):
        manager.save(1, {"x": tensor(2)})
    control.faults({"operation": "PutObject", "key": "steps/", "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.AccessDeniedError):
        manager.save(1, {"x": tensor(3)}, overwrite=True)
    control.clear_faults()
    assert saved_value(manager) == 1.0
    manager.save(1, {"x": tensor(4)}, overwrite=True)
    assert saved_value(manager) == 4.0
    assert len(data_keys(bucket)) == 1


@pytest.mark.providers("s3", "gs")
@pytest.mark.parametrize("size", [4, LARGE], ids=["one request", "parts"])
@pytest.mark.parametrize("body", BODIES)
def test_a_read_only_bucket_raises_access_denied_and_keeps_the_last_step(manager, bucket, control, size, body):
    manager.save(1, {"x": tensor(1)})
    operations = ("PutObject", "UploadPart", "CompleteMultipartUpload")
    control.faults(
        *({"operation": name, "key": body, "action": {"status": 403, "code": "AccessDenied"}} for name in operations)
    )
    with pytest.raises(exceptions.AccessDeniedError):
        manager.save(2, {"x": tensor(2, size)})
    control.clear_faults()
    assert (manager.latest(), saved_value(manager)) == (1, 1.0)
    assert nothing_of(bucket, 2)


def test_occasionally_refused_requests_do_not_fail_a_save(manager, bucket, control):
    control.faults({"probability": 0.1, "seed": 4, "action": {"status": 503, "code": "SlowDown"}})
    for step in range(6):
        manager.save(step, {"x": tensor(step, LARGE)})
    assert control.fault_report()[0]["fired"] > 3
    control.clear_faults()
    assert (manager.steps(), saved_value(manager)) == ([3, 4, 5], 5.0)
    assert (manager.leftovers(), bucket.uploads()) == ([], [])


@pytest.mark.providers("s3")
def test_credentials_that_expire_before_the_commit_raise_and_leave_no_step(
    open_manager, bucket, config, control, tmp_path, monkeypatch
):
    looked = open_manager()
    looked.save(1, {"x": tensor(1)})
    script, aws = tmp_path / "credentials.json", tmp_path / "config"
    aws.write_text(f"[profile ending]\ncredential_process = cat {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(aws))
    names = {"AccessKeyId": "AKIAENDING", "SecretAccessKey": "S" * 20, "SessionToken": "token"}
    script.write_text(json.dumps({"Version": 1, **names}))
    control.account("AKIAENDING", "S" * 20, token="token", expires_in_s=600)
    manager = open_manager(config=with_profile(config, "ending", max_attempts=2))
    real = state_content.save_counted

    def save_until_they_end(*given, **named):
        saved = real(*given, **named)
        control.account("AKIAENDING", "S" * 20, token="token", expires_in_s=-1)
        return saved

    monkeypatch.setattr(state_content, "save_counted", save_until_they_end)
    with pytest.raises(exceptions.CredentialsError):
        manager.save(2, {"x": tensor(2, LARGE)})
    control.clear_accounts()
    assert (looked.steps(), saved_value(looked), bucket.uploads()) == ([1], 1.0, [])
    assert [item.step for item in looked.sweep(0)] == [2]
    assert looked.leftovers() == []
