"""The copies of steps on a local disk: what is written there, which of it is restored, and who may use the folder."""

import dataclasses
import json
import os
from functools import partial

import pytest
import torch

from tests.support.managers import outcome, saved_value, tensor
from torchobj import Store, exceptions
from torchobj.checkpoint import CheckpointManager
from torchobj.checkpoint.steps import local_copy
from torchobj.checkpoint.steps.commits import Commits
from torchobj.checkpoint.steps.pending_save import PendingSave


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupts uploads from the disk, as the death of the process does: the bucket gets no commit."""

    class Killed(Exception):
        pass

    def kill(*given, **named):
        raise Killed

    def interrupt(manager, step, value):
        with monkeypatch.context() as patch:
            patch.setattr(local_copy, "upload", kill)
            with pytest.raises(Killed):
                manager.save(step, {"x": tensor(value)})

    return interrupt


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_step_is_on_the_disk_as_in_the_bucket(tier, sharded):
    manager = tier.open(sharded=sharded, keep_local=2)
    for step in (1, 2, 3):
        handle = manager.save_async(step, {"x": tensor(step)}, {"loss": 1.0})
        handle.wait_local()
        handle.result()
    assert (manager.steps(), tier.copies()) == ([1, 2, 3], [2, 3])
    bucket, disk = Commits(tier.url, None), Commits(f"file://{tier.folder}", None)
    for step in (2, 3):
        far, near = bucket.read(step), disk.read(step)
        assert (near.attempt, near.kind, near.metrics) == (far.attempt, far.kind, far.metrics)
        assert {(item.key, item.size) for item in near.objects} == {(item.key, item.size) for item in far.objects}
        assert all(item.crc32 is not None for item in near.objects)
        for item in far.objects:
            assert bytes(Store(tier.url).get(item.key)[:]) == (tier.folder / item.key).read_bytes()
    assert len(tier.files()) == sum(len(disk.read(step).objects) for step in (2, 3))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_restore_reads_the_disk_and_not_the_bucket(tier, sharded):
    tier.open(sharded=sharded).save(1, {"x": tensor(1), "text": "a"})
    store = Store(tier.url)
    for item in Commits(tier.url, None).read(1).objects:
        store.put(item.key, b"\0" * item.size)
    into = {"x": tensor(0), "text": ""}
    tier.open(sharded=sharded).restore(into=into)
    assert (into["x"][0].item(), into["text"]) == (1.0, "a")


def test_a_step_whose_upload_was_interrupted_is_restored(tier, interrupted):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    interrupted(manager, 2, 2)
    assert (tier.in_bucket(), tier.copies()) == ([1], [1, 2])
    manager = tier.open()
    assert saved_value(manager) == 2.0
    # Killed again, before the bucket has the next step.
    interrupted(manager, 3, 3)
    assert (tier.in_bucket(), saved_value(tier.open())) == ([1], 3.0)
    manager = tier.open()
    assert saved_value(manager) == 3.0
    manager.save(4, {"x": tensor(4)})
    assert (tier.in_bucket(), tier.copies(), saved_value(tier.open())) == ([1, 4], [4], 4.0)


def test_the_first_step_is_restored_if_its_upload_was_interrupted(tier, interrupted):
    manager = tier.open()
    state = {"x": tensor(0)}
    assert manager.restore(into=state, missing_ok=True) is None
    with pytest.raises(exceptions.CheckpointError, match="no step is committed"):
        manager.restore(into=state)
    with pytest.raises(exceptions.CheckpointError, match="step 1 is not committed"):
        manager.restore(1, into=state, missing_ok=True)
    interrupted(manager, 1, 1)
    manager = tier.open()
    assert manager.latest() is None
    assert manager.restore(into=state, missing_ok=True) is state
    assert state["x"][0] == 1


def test_a_copy_that_does_not_continue_the_bucket_is_ignored(tier, interrupted, caplog):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    interrupted(manager, 3, 3)
    # Another machine goes on from step 1.
    with CheckpointManager(tier.url) as other:
        other.save(2, {"x": tensor(2)})
    assert saved_value(tier.open()) == 2.0
    assert "the local copy of step 3 is ignored: it does not continue step 2" in caplog.text
    manager = tier.open()
    manager.restore()
    manager.save(4, {"x": tensor(4)})
    assert (tier.in_bucket(), tier.copies()) == ([1, 2, 4], [4])


def test_a_step_that_was_deleted_in_the_bucket_does_not_return(tier, interrupted):
    manager = tier.open(keep_local=5)
    for step in (1, 2, 3):
        manager.save(step, {"x": tensor(step)})
    manager.delete(3)
    assert (tier.copies(), saved_value(tier.open())) == ([1, 2, 3], 2.0)
    # Of a save that was killed between the commit and the mark on the disk, but restored once.
    manager = tier.open()
    manager.restore()
    interrupted(manager, 4, 4)
    copy = Commits(f"file://{tier.folder}", None).read(4)
    for item in copy.objects:
        Store(tier.url).put(item.key, (tier.folder / item.key).read_bytes())
    Commits(tier.url, None).publish(dataclasses.replace(copy, local=None))
    assert saved_value(tier.open()) == 4.0
    tier.open().delete(4)
    assert saved_value(tier.open()) == 2.0


def test_a_step_that_was_deleted_does_not_return_if_its_save_was_killed_after_the_commit(tier, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(self):
        raise Killed

    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    with monkeypatch.context() as patch:
        patch.setattr(PendingSave, "prune", kill)
        with pytest.raises(Killed):
            manager.save(2, {"x": tensor(2)})
    CheckpointManager(tier.url).delete(2)
    assert saved_value(tier.open()) == 1.0


def test_a_run_that_goes_back_continues_what_it_restored(tier, interrupted):
    manager = tier.open(keep_last=None)
    for step in (1, 2, 3):
        manager.save(step, {"x": tensor(step)})
    manager = tier.open(keep_last=None)
    manager.delete(3)
    assert saved_value(manager, 2) == 2.0
    interrupted(manager, 3, 30)
    assert (tier.in_bucket(), saved_value(tier.open())) == ([1, 2], 30.0)
    manager = tier.open()
    assert saved_value(manager, 1) == 1.0
    interrupted(manager, 4, 40)
    # It continues step 1, and step 2 is the newest.
    assert saved_value(tier.open()) == 30.0
    assert saved_value(tier.open(), 3) == 30.0
    assert outcome(lambda: tier.open().restore(4))[0] == "CheckpointError"


def test_a_step_that_is_saved_again_replaces_its_copy(tier, interrupted):
    manager = tier.open()
    interrupted(manager, 1, 1)
    interrupted(manager, 1, 2)
    assert (len(tier.files()), saved_value(tier.open())) == (1, 2.0)
    manager = tier.open()
    manager.save(1, {"x": tensor(3)})
    manager.save(1, {"x": tensor(4)}, overwrite=True)
    assert (len(tier.files()), saved_value(tier.open())) == (1, 4.0)


def damaged(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "gone":
        path.unlink()
    elif how == "link":
        path.rename(path.with_name("other"))
        path.symlink_to("other")
    else:
        # Of the tensor, of the directory at the end.
        data[{"tensor": data.index(torch.full((4,), 2.0).numpy().tobytes()), "end": len(data) - 30}[how]] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", ["tensor", "end", "truncated", "gone", "link"])
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_copy_is_read_from_the_bucket(tier, how, sharded, caplog):
    tier.open(sharded=sharded).save(2, {"x": tensor(2)})
    path = next(path for path in tier.files(2) if path.name != ".metadata")
    damaged(path, how)
    into = {"x": tensor(0)}
    tier.open(sharded=sharded).restore(into=into)
    assert into["x"].tolist() == [2.0] * 4
    warned = sum("the local copy of step 2 is damaged" in record.message for record in caplog.records)
    assert warned == (how == "tensor" or (how == "end" and not sharded))


@pytest.mark.parametrize("how", ["tensor", "truncated"])
def test_a_damaged_step_that_only_the_disk_has_is_not_restored(tier, interrupted, how, caplog):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    interrupted(manager, 2, 2)
    damaged(tier.files(2)[0], how)
    manager = tier.open()
    assert saved_value(manager) == 1.0
    manager.save(3, {"x": tensor(3)})
    assert (tier.in_bucket(), tier.copies()) == ([1, 3], [3])


def test_a_state_that_does_not_fit_is_an_error_and_the_copy_stays(tier):
    tier.open().save(1, {"x": tensor(1)})
    name, text = outcome(lambda: tier.open().restore(into={"x": tensor(0, 5)}))
    assert (name, "x" in text, tier.copies()) == ("CheckpointError", True, [1])


HOSTILE = {
    "above": lambda fields: fields["objects"][0].update(key="steps/../../secret"),
    "of another step": lambda fields: fields.update(step=7),
    "of another attempt": lambda fields: fields.update(nonce="0" * 32),
    "without a part": lambda fields: fields.pop("local"),
    "more objects than it has": lambda fields: fields["local"].update(total=2),
    "an invalid number of objects": lambda fields: fields["local"].update(total=True),
    "a huge number of objects": lambda fields: fields["local"].update(total=1 << 80),
    "ancestors that are none": lambda fields: fields["local"].update(continues=["../x"]),
    "more in its part": lambda fields: fields["local"].update(more=1),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_commit_object_on_the_disk_is_ignored(tier, interrupted, how):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    interrupted(manager, 2, 2)
    path = tier.folder / "commits" / f"{2:012}.json"
    fields = json.loads(path.read_text())
    HOSTILE[how](fields)
    path.write_text(json.dumps(fields))
    manager = tier.open()
    assert saved_value(manager) == 1.0
    manager.save(2, {"x": tensor(3)})
    assert (tier.in_bucket(), saved_value(tier.open())) == ([1, 2], 3.0)


def test_a_huge_commit_object_on_the_disk_is_ignored(tier):
    tier.open().save(1, {"x": tensor(1)})
    with (tier.folder / "commits" / f"{2:012}.json").open("wb") as file:
        file.truncate(1 << 40)
    assert saved_value(tier.open()) == 1.0


def test_a_folder_is_used_by_one_manager_at_a_time(tier):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    other = CheckpointManager("memory://local-copies/other", local=tier.disk)
    for call in (lambda: other.save(1, {}), other.restore):
        name, text = outcome(call)
        assert (name, str(tier.disk) in text, "use another one" in text) == ("ConfigError", True, True)
    manager.close()
    other.save(1, {"x": tensor(5)})
    # A closed manager does not need it.
    assert (saved_value(manager), saved_value(other)) == (1.0, 5.0)
    other.close()


def test_a_child_does_not_keep_the_lock(tier):
    tier.open().save(1, {"x": tensor(1)})
    going, ending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ending)
        os.read(going, 1)
        os._exit(0)
    os.close(going)
    # `open` closes the manager of this process first.
    assert saved_value(tier.open()) == 1.0
    os.close(ending)
    os.waitpid(child, 0)


def test_folders_of_others_are_refused(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("link", "file", "open", "other"):
        if name == "other":
            (tmp_path / name).mkdir(0o755)
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        manager = CheckpointManager("memory://local-copies/others", local=tmp_path / name)
        found = outcome(partial(manager.save, 1, {}))
        assert (found[0], str(tmp_path / name) in found[1]) == ("ConfigError", True), name


@pytest.mark.parametrize("arguments", [{"local": ""}, {"local": 3}, {"local": "s3://b/k"}, {"keep_local": 0}])
def test_arguments_that_are_not_valid(tmp_path, arguments):
    with pytest.raises(exceptions.ConfigError, match=next(iter(arguments))):
        CheckpointManager("memory://local-copies/arguments", **({"local": tmp_path} | arguments))


def test_a_manager_without_a_local_folder_has_no_copy_to_wait_for():
    handle = CheckpointManager("memory://local-copies/none").save_async(1, {})
    with pytest.raises(exceptions.ConfigError, match="pass local="):
        handle.wait_local()
    handle.result()


def test_what_a_killed_save_left_is_swept(tier):
    manager = tier.open()
    manager.save(1, {"x": tensor(1)})
    left = tier.folder / "steps" / f"{2:012}-{'a' * 32}"
    left.mkdir()
    (left / "state.pt").write_bytes(b"x")
    (left / ".torchobj-x").write_bytes(b"x")
    manager.save(3, {"x": tensor(3)})
    assert left.exists()
    tier.open().save(4, {"x": tensor(4)})
    assert not (left / "state.pt").exists()
    assert (tier.copies(), len(tier.files(4))) == ([4], 1)
