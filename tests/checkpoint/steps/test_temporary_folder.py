"""Temporary folders: that of a killed process is removed by the next one, and nothing else."""

import os
import signal
import time
from pathlib import Path

import pytest

from torchobj import exceptions
from torchobj.checkpoint.steps.temporary_folder import TemporaryFolder


def entries(folder):
    return sorted(os.listdir(folder))


@pytest.fixture
def killed(tmp_path):
    """The name of a folder that a killed process left, with a file in it."""
    child = os.fork()
    if child == 0:
        (TemporaryFolder(tmp_path).files / "left").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    [name] = entries(tmp_path)
    return name


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path, killed):
    with TemporaryFolder(tmp_path) as folder:
        assert (killed not in entries(tmp_path), entries(folder.files)) == (True, [])
    assert entries(tmp_path) == []


def test_the_folder_of_a_running_save_is_kept(tmp_path):
    with TemporaryFolder(tmp_path) as first, TemporaryFolder(tmp_path) as second:
        assert first.files.is_dir() and second.files.is_dir()
        (first.files / "sub").mkdir()
        (first.files / "sub" / "file").write_bytes(b"x")
    assert entries(tmp_path) == []


def test_the_folder_of_another_machine_is_removed_after_a_day(tmp_path, killed):
    lock = tmp_path / killed / "lock"
    lock.write_text("another machine")
    TemporaryFolder(tmp_path).remove()
    assert entries(tmp_path) == [killed]
    os.utime(lock, (day_ago := time.time() - 86_500, day_ago))
    TemporaryFolder(tmp_path).remove()
    assert entries(tmp_path) == []


def test_nothing_else_is_removed(tmp_path, killed):
    parent = tmp_path / "parent"
    parent.mkdir()
    # Behind a link, without a lock file, and with a link in place of the lock file.
    (parent / f".torchobj-staged-{'0' * 32}").symlink_to(tmp_path / killed)
    (parent / f".torchobj-staged-{'1' * 32}").mkdir()
    (parent / f".torchobj-staged-{'2' * 32}").mkdir()
    (parent / f".torchobj-staged-{'2' * 32}" / "lock").symlink_to(tmp_path / killed / "lock")
    os.rename(tmp_path / killed, other := tmp_path / ".torchobj-staged-of-the-user")
    (parent / f".torchobj-staged-{'0' * 32}").unlink()
    (parent / f".torchobj-staged-{'0' * 32}").symlink_to(other)
    before = entries(parent)
    TemporaryFolder(parent).remove()
    TemporaryFolder(tmp_path).remove()
    assert (entries(parent), entries(other)) == (before, ["files", "lock"])


def test_a_folder_that_is_not_writable_is_named():
    with pytest.raises(exceptions.ConfigError, match=r"/proc/[0-9]+: a temporary folder cannot be created: .*writable"):
        TemporaryFolder(Path("/proc/self").resolve())
