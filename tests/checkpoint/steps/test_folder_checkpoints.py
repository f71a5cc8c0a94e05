"""Folders that are saved and restored by step: a restore returns all files of a save, or fails, also of hostile commits."""

import os
import threading
from datetime import UTC, datetime

import pytest
import torch

from tests.support.folders import content
from tests.support.long_tables import GCS_IN_MATRIX
from torchobj import Store, exceptions
from torchobj.checkpoint import CheckpointManager, FolderCheckpoints
from torchobj.checkpoint.leftovers import Attempt
from torchobj.checkpoint.steps import folder_checkpoints, folder_content
from torchobj.checkpoint.steps.commit import Commit, StoredObject, folder_of

pytestmark = pytest.mark.providers("s3", GCS_IN_MATRIX)

FILES = {
    "model.safetensors": b"m" * 3000,
    "tokenizer/vocab.json": b"v" * 500,
    "rng_state_0.pth": b"",
    "a [1]*?.bin": b"*",
}


def written(folder, files=FILES):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "checkpoint-1")


@pytest.fixture
def checkpoints(bucket):
    return FolderCheckpoints(f"{bucket.url}/run", config=bucket.config)


def test_a_folder_comes_back_with_all_its_files(checkpoints, folder, tmp_path):
    checkpoints.save(1, folder, {"loss": 0.5})
    checkpoints.save_async(2, written(tmp_path / "checkpoint-2", {"model.safetensors": b"2"})).result()
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.metrics(1)) == ([1, 2], 2, {"loss": 0.5})
    assert checkpoints.restore(1, tmp_path / "new" / "folder") == 1
    assert content(tmp_path / "new" / "folder") == FILES
    assert checkpoints.restore(folder=tmp_path / "latest") == 2
    assert content(tmp_path / "latest") == {"model.safetensors": b"2"}
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "latest", "new"]


def test_the_framework_may_delete_and_replace_files_once_save_async_returns(checkpoints, folder, tmp_path, monkeypatch):
    reached, going, real = threading.Event(), threading.Event(), folder_content.upload

    def upload(*given, **named):
        reached.set()
        assert going.wait(30)
        return real(*given, **named)

    monkeypatch.setattr(folder_content, "upload", upload)
    handle = checkpoints.save_async(1, folder)
    assert reached.wait(30)
    for path in list(folder.rglob("*.json")):
        path.unlink()
    (tmp_path / "new.bin").write_bytes(b"of the next step")
    (tmp_path / "new.bin").replace(folder / "model.safetensors")
    going.set()
    handle.result()
    checkpoints.restore(1, tmp_path / "restored")
    assert content(tmp_path / "restored") == FILES


def test_each_class_names_the_other_for_steps_of_the_other_kind(checkpoints, bucket, folder, tmp_path):
    manager = CheckpointManager(f"{bucket.url}/run", 2, config=bucket.config)
    checkpoints.save(1, folder)
    manager.save(2, {"x": torch.ones(2)})
    with pytest.raises(
        exceptions.CheckpointError, match="step 1: the files of a folder; restore it with FolderCheckpoi"
    ):
        manager.restore(1)
    with pytest.raises(
        exceptions.CheckpointError, match=r"step 2: not the files of a folder; restore it with Checkpoint"
    ):
        checkpoints.restore(folder=tmp_path / "restored")
    manager.save(3, {"x": torch.ones(2)})
    assert checkpoints.steps() == [2, 3]
    assert not [key for key in bucket.keys() if key.startswith("run/steps/000000000001")]


def test_of_two_jobs_that_save_a_step_one_commits_and_the_other_is_told(checkpoints, folder, bucket, monkeypatch):
    other, real = FolderCheckpoints(checkpoints.url, config=bucket.config), folder_content.upload

    def commit_first(*given, **named):
        monkeypatch.setattr(folder_content, "upload", real)
        other.save(1, folder)
        return real(*given, **named)

    monkeypatch.setattr(folder_content, "upload", commit_first)
    with pytest.raises(exceptions.CheckpointError, match="step 1 was committed by another writer"):
        checkpoints.save(1, folder)
    with pytest.raises(exceptions.CheckpointError, match="step 1 is committed already; overwrite=True replaces it"):
        checkpoints.save(1, folder)
    assert (checkpoints.steps(), checkpoints.leftovers()) == ([1], [])
    assert names(folder.parent) == ["checkpoint-1"]


def test_files_that_are_equal_to_those_of_the_last_commit_are_not_sent_again(checkpoints, folder, bucket, control):
    large = {"tokenizer.json": os.urandom(1 << 20), "config.json": b"{}"}
    checkpoints.save(1, written(folder, large))
    control.clear_requests()
    changed = {"model.safetensors": b"M" * 3000, "tokenizer/vocab.json": b"longer" * 100}
    checkpoints.save(2, written(folder, changed))
    assert sum(entry.bytes_received for entry in control.requests()) < 100_000
    checkpoints.delete(1)
    checkpoints.restore(2, folder.with_name("restored"))
    assert content(folder.with_name("restored")) == FILES | large | changed


def test_equal_files_of_a_step_that_was_deleted_meanwhile_are_sent(checkpoints, folder, bucket, monkeypatch):
    checkpoints.save(1, folder)
    real = Store.copy

    def deleted_first(self, source, key):
        bucket.remove(source)
        return real(self, source, key)

    monkeypatch.setattr(Store, "copy", deleted_first)
    checkpoints.save(2, folder)
    checkpoints.restore(2, folder.with_name("restored"))
    assert content(folder.with_name("restored")) == FILES


def test_a_step_is_replaced_by_a_save_of_the_same_files(checkpoints, folder):
    checkpoints.save(1, folder)
    checkpoints.save(1, folder, overwrite=True)
    checkpoints.restore(1, folder.with_name("restored"))
    assert (content(folder.with_name("restored")), checkpoints.leftovers()) == (FILES, [])


def test_a_folder_with_other_files_is_replaced_if_asked(checkpoints, folder, control):
    checkpoints.save(1, folder)
    restored = written(folder.with_name("restored"), {"model.safetensors": b"n" * 3000, "more/x": b"m"})
    assert checkpoints.restore(1, restored, replace=True) == 1
    assert (content(restored), names(folder.parent)) == (FILES, ["checkpoint-1", "restored"])
    (restored / "more").write_bytes(b"m")
    control.faults({"operation": "GetObject", "key": "model", "action": {"status": 403, "code": "AccessDenied"}})
    with pytest.raises(exceptions.TransferError):
        checkpoints.restore(1, restored, replace=True)
    # It stays until the download is complete.
    assert (content(restored), names(folder.parent)) == (FILES | {"more": b"m"}, ["checkpoint-1", "restored"])


def test_a_damaged_object_is_not_copied_into_the_next_step(checkpoints, bucket, folder):
    checkpoints.save(1, folder)
    [damaged] = [key for key in bucket.keys() if key.endswith("vocab.json")]
    bucket.write(damaged, b"d" * len(FILES["tokenizer/vocab.json"]))
    checkpoints.save(2, folder)
    checkpoints.restore(2, folder.with_name("restored"))
    assert content(folder.with_name("restored")) == FILES


def test_many_objects_that_no_save_wrote_are_an_error(checkpoints, bucket, folder, monkeypatch):
    checkpoints.save(1, folder)
    monkeypatch.setattr(folder_checkpoints, "_MAX_OTHERS", 2)
    prefix = next(key for key in bucket.keys() if key.endswith("model.safetensors")).rpartition("/")[0]
    for number in range(3):
        bucket.write(f"{prefix}/planted-{number}", b"")
    with pytest.raises(exceptions.CheckpointError, match="3 objects are below .* that the save did not write"):
        checkpoints.restore(1, folder.with_name("restored"))


def test_what_is_no_folder_of_files_is_replaced_if_asked(checkpoints, folder):
    checkpoints.save(1, folder)
    restored = written(folder.with_name("restored"), {"x": b"x"})
    (restored / "link").symlink_to("x")
    with pytest.raises(exceptions.CheckpointError, match="'link' is a symbolic link"):
        checkpoints.restore(1, restored)
    assert checkpoints.restore(1, restored, replace=True) == 1
    file = folder.with_name("file")
    file.write_bytes(b"file")
    assert checkpoints.restore(1, file, replace=True) == 1
    assert (content(restored), content(file)) == (FILES, FILES)
    assert names(folder.parent) == ["checkpoint-1", "file", "restored"]


@pytest.mark.parametrize("hashed", [folder_content._HASHED_BYTES, 100], ids=["small", "large"])
def test_a_folder_that_has_the_files_of_the_step_is_kept(checkpoints, folder, control, monkeypatch, hashed):
    monkeypatch.setattr(folder_content, "_HASHED_BYTES", hashed)
    checkpoints.save(1, folder)
    before, restored = folder.stat().st_ino, folder.with_name("restored")
    control.clear_requests()
    assert checkpoints.restore(1, folder) == 1
    assert folder.stat().st_ino == before
    # GCS describes an object in JSON.
    assert sum(entry.bytes_sent for entry in control.requests() if "/steps/" in (entry.key or "")) < 2000
    restored.mkdir()
    checkpoints.restore(1, restored)
    checkpoints.restore(1, restored)
    for name, other in (("model.safetensors", b"n" * 3000), ("model.safetensors", b"m"), ("more", b"m")):
        (restored / name).write_bytes(other)
        with pytest.raises(exceptions.ConfigError, match=f"restored'.*: has other files than .*, such as '{name}'"):
            checkpoints.restore(1, restored)
        assert (restored / name).read_bytes() == other
        (restored / name).unlink() if name == "more" else (restored / name).write_bytes(FILES[name])
        if hashed == 100:
            # Its time of modification differs.
            os.utime(
                restored / "model.safetensors", ns=(time := (folder / "model.safetensors").stat().st_mtime_ns, time)
            )
    assert names(folder.parent) == ["checkpoint-1", "restored"]


@pytest.mark.parametrize("hashed", [folder_content._HASHED_BYTES, 100], ids=["small", "large"])
def test_a_restore_to_a_folder_that_another_process_restores_meanwhile_keeps_that(
    checkpoints, folder, monkeypatch, hashed
):
    monkeypatch.setattr(folder_content, "_HASHED_BYTES", hashed)
    checkpoints.save(1, folder)
    real, restored = folder_checkpoints.download, folder.with_name("restored")

    def download(*given, **named):
        monkeypatch.setattr(folder_checkpoints, "download", real)
        checkpoints.restore(1, restored)
        return real(*given, **named)

    monkeypatch.setattr(folder_checkpoints, "download", download)
    checkpoints.restore(1, restored)
    assert (content(restored), names(folder.parent)) == (FILES, ["checkpoint-1", "restored"])


def nothing_restored(checkpoints, tmp_path, error, match):
    """A restore fails, and leaves nothing."""
    before = names(tmp_path)
    with pytest.raises(error, match=match):
        checkpoints.restore(1, tmp_path / "restored")
    assert names(tmp_path) == before


def test_files_that_are_gone_or_damaged_in_the_store_are_not_restored(checkpoints, folder, bucket, tmp_path):
    checkpoints.save(1, folder)
    key = next(key for key in bucket.keys() if key.endswith("model.safetensors"))
    bucket.write(key, b"n" * 3000)
    nothing_restored(checkpoints, tmp_path, exceptions.CheckpointError, "'model.safetensors' is not as it was saved")
    bucket.write(key, b"n" * 2999)
    nothing_restored(
        checkpoints, tmp_path, exceptions.CheckpointError, "'model.safetensors' is gone, or has another size"
    )
    bucket.remove(key)
    nothing_restored(
        checkpoints, tmp_path, exceptions.CheckpointError, "'model.safetensors' is gone, or has another size"
    )


def test_objects_that_the_commit_does_not_name_are_not_restored(checkpoints, folder, bucket, tmp_path):
    checkpoints.save(1, folder)
    prefix = next(key for key in bucket.keys() if key.endswith("model.safetensors")).removesuffix("model.safetensors")
    for name in ("model.safetensors/x", "tokenizer", "[!a]*?", "..", "other/"):
        bucket.write(prefix + name, b"x")
    checkpoints.restore(1, tmp_path / "restored")
    assert content(tmp_path / "restored") == FILES


def test_arguments_of_a_restore_are_checked(checkpoints, folder, tmp_path):
    nothing_restored(checkpoints, tmp_path, exceptions.CheckpointError, "step 1 is not committed; there are")
    with pytest.raises(exceptions.ConfigError, match="folder=None: must be the path"):
        checkpoints.restore()
    with pytest.raises(exceptions.CheckpointError, match="no step is committed"):
        checkpoints.restore(folder=tmp_path)
    assert checkpoints.restore(folder=tmp_path, missing_ok=True) is None
    checkpoints.save(1, folder)
    with pytest.raises(exceptions.ConfigError, match="file': is a file"):
        checkpoints.restore(1, written(tmp_path, {"file": b""}) / "file")


def test_an_exception_of_progress_ends_a_save_and_a_restore(checkpoints, folder, tmp_path):
    class Stopped(Exception):
        pass

    def stop(progress):
        raise Stopped

    with pytest.raises(Stopped):
        checkpoints.save(1, folder, progress=stop)
    assert (checkpoints.steps(), checkpoints.leftovers()) == ([], [])
    seen = []
    checkpoints.save(1, folder, progress=seen.append)
    assert (seen[-1].files_done, seen[-1].bytes_done) == (len(FILES), sum(map(len, FILES.values())))
    with pytest.raises(Stopped):
        checkpoints.restore(1, tmp_path / "restored", progress=stop)
    assert names(tmp_path) == ["checkpoint-1"]


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_folder_of_a_hundred_thousand_files_is_saved_and_restored(tmp_path):
    count, folder = 100_000, tmp_path / "checkpoint-1"
    for number in range(100):
        (folder / f"{number}").mkdir(parents=True)
    for number in range(count):
        (folder / f"{number % 100}" / f"{number}").write_bytes(b"%d" % number)
    checkpoints = FolderCheckpoints(f"memory://many-files/{tmp_path.name}")
    checkpoints.save(1, folder)
    # All of them are copied by the store.
    checkpoints.save(2, folder)
    checkpoints.restore(2, tmp_path / "restored")
    restored = content(tmp_path / "restored")
    assert len(restored) == count
    assert all(name == f"{int(data) % 100}/{int(data)}" for name, data in restored.items())


class TestHostileCommits:
    """Commit objects that anyone with access to the folder may have written."""

    @pytest.fixture
    def checkpoints(self, tmp_path):
        return FolderCheckpoints(f"memory://hostile-folders/{tmp_path.name}")

    def commit(self, checkpoints, *names, **fields):
        """Commits objects with these names, which exist where a store can hold them."""
        attempt, commits = Attempt.new(1), checkpoints._commits
        objects = [StoredObject(folder_of(attempt) + name, 1, **fields) for name in names]
        for item in objects:
            try:
                commits.store.put(commits.key(item.key), b"x")
            except (exceptions.StoreError, UnicodeEncodeError):
                continue
        commits.publish(Commit(attempt, "folder", tuple(objects), {}, datetime.now(tz=UTC)))

    @pytest.mark.parametrize(
        "name",
        ["../x", "..", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\..\\b", "a\0", "..\\x", "\ud800"],
        ids=ascii,
    )
    def test_names_that_leave_the_folder_are_refused(self, checkpoints, tmp_path, name):
        self.commit(checkpoints, "good", name)
        nothing_restored(checkpoints, tmp_path, exceptions.CheckpointError, "not a valid commit object")

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            (("a", "a/b"), "files were not transferred"),
            (("x" * 256,), "files were not transferred"),
            ((".torchobj-x",), "'.torchobj-x' is not as it was saved"),
            (("a/.torchobj-x/b",), "'a/.torchobj-x/b' is not as it was saved"),
        ],
        ids=["both", "long", "temporary", "below"],
    )
    def test_names_that_cannot_be_files_are_refused(self, checkpoints, tmp_path, given, match):
        self.commit(checkpoints, "good", *given)
        nothing_restored(checkpoints, tmp_path, exceptions.TorchobjError, match)

    def test_a_commit_without_objects_is_refused(self, checkpoints, tmp_path):
        self.commit(checkpoints)
        nothing_restored(checkpoints, tmp_path, exceptions.CheckpointError, "names no files")

    @pytest.mark.parametrize("sha256", ["", "x" * 64, "A" * 64, "0" * 63, "0" * 64 + "\n", 5, ["0" * 64]], ids=ascii)
    def test_a_sha256_that_is_none_is_refused(self, checkpoints, tmp_path, sha256):
        self.commit(checkpoints, "good", sha256=sha256)
        nothing_restored(checkpoints, tmp_path, exceptions.CheckpointError, "not a valid commit object: its sha256 is")

    def test_an_object_with_another_sha256_is_refused(self, checkpoints, tmp_path):
        self.commit(checkpoints, "good", sha256="0" * 64)
        nothing_restored(checkpoints, tmp_path, exceptions.CheckpointError, "'good' is not as it was saved")

    def test_links_beside_the_target_are_not_followed(self, checkpoints, tmp_path):
        self.commit(checkpoints, "sub/x")
        (tmp_path / "restored").mkdir()
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "restored" / "sub").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(exceptions.CheckpointError, match="'sub' is a symbolic link"):
            checkpoints.restore(1, tmp_path / "restored")
        assert names(tmp_path / "elsewhere") == []
