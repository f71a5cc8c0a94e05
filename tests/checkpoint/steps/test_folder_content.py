"""What of a folder is saved, by which rank, and what is refused: nothing is left of a save that is refused."""

import collections
import errno
import os
import shutil
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchobj import exceptions
from torchobj.checkpoint import FolderCheckpoints
from torchobj.checkpoint.steps import folder_content
from torchobj.checkpoint.steps.folder_content import _senders

URL = "memory://folder-content"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint-1"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"aaa")
    (folder / "sub" / "b.bin").write_bytes(b"b")
    return folder


@pytest.fixture
def checkpoints(tmp_path):
    return FolderCheckpoints(f"{URL}/{tmp_path.name}")


def refused(checkpoints, folder, error, match):
    """A save is refused, and leaves nothing, in the store and beside the folder."""
    before = sorted(os.listdir(folder.parent))
    with pytest.raises(error, match=match):
        checkpoints.save(1, folder)
    assert (checkpoints.steps(), checkpoints.leftovers()) == ([], [])
    assert sorted(os.listdir(folder.parent)) == before


def link(path):
    path.symlink_to("a.bin")


def link_to_nothing(path):
    path.symlink_to("nothing")


def link_to_a_folder(path):
    path.symlink_to("/etc")


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        # The path of a socket has 108 bytes at most.
        os.chdir(path.parent)
        bound.bind(path.name)


def not_utf8(path):
    with open(os.fsencode(path) + b"\xff", "wb"):
        pass


def backslash(path):
    path.with_name("..\\x").touch()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (link, "'sub/x' is a symbolic link, which a checkpoint cannot contain; replace it"),
        (link_to_nothing, "symbolic link"),
        (link_to_a_folder, "symbolic link"),
        (os.mkfifo, "'sub/x' is a device, a pipe or a socket, .* remove it"),
        (bound_socket, "is a device, a pipe or a socket"),
        (not_utf8, "must be UTF-8, without backslashes; rename it"),
        (backslash, "must be UTF-8, without backslashes; rename it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_checkpoint_cannot_contain_is_refused(checkpoints, folder, make, match, monkeypatch):
    monkeypatch.chdir(folder)
    make(folder / "sub" / "x")
    refused(checkpoints, folder, exceptions.CheckpointError, match)


def test_a_folder_without_files_is_refused(checkpoints, tmp_path):
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    (tmp_path / "empty" / ".torchobj-1").touch()
    refused(checkpoints, tmp_path / "empty", exceptions.ConfigError, "empty'.* has no files")
    refused(checkpoints, tmp_path / "missing", exceptions.ConfigError, "missing'.* does not exist")
    (tmp_path / "file").touch()
    refused(checkpoints, tmp_path / "file", exceptions.CheckpointError, "the folder cannot be read: .*Not a directory")
    with pytest.raises(exceptions.ConfigError, match="progress=3"):
        checkpoints.save_async(1, tmp_path, progress=3)


def test_a_folder_above_that_is_not_writable_is_named(checkpoints):
    with pytest.raises(exceptions.ConfigError, match="must be writable, and should be on the same file system"):
        checkpoints.save(1, "/proc/self/fdinfo")


def no_links(*given, **named):
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_files_are_copied_where_links_fail(checkpoints, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    os.utime(folder / "a.bin", ns=(10**18, 10**18))
    checkpoints.save(1, folder)
    checkpoints.restore(1, tmp_path / "restored")
    assert (tmp_path / "restored" / "sub" / "b.bin").read_bytes() == b"b"


def test_a_disk_that_is_full_while_files_are_copied_leaves_nothing(checkpoints, folder, monkeypatch):
    real, copied = shutil.copy2, []

    def copy(source, target, **named):
        if copied:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        copied.append(real(source, target, **named))

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(shutil, "copy2", copy)
    refused(checkpoints, folder, exceptions.CheckpointError, "cannot be staged in .*No space left on device")


def written_in_place(folder):
    (folder / "a.bin").write_bytes(b"longer")


def replaced(folder):
    (folder / "new").write_bytes(b"new")
    (folder / "new").replace(folder / "a.bin")


def added(folder):
    (folder / "c.bin").touch()


def removed(folder):
    (folder / "sub" / "b.bin").unlink()


@pytest.mark.parametrize("change", [written_in_place, replaced, added, removed])
def test_a_folder_that_changes_while_it_is_linked_is_refused(checkpoints, folder, change, monkeypatch):
    real = folder_content.link_or_copy

    def link_and_change(source, target):
        real(source, target)
        if source.name == "b.bin":
            change(folder)

    monkeypatch.setattr(folder_content, "link_or_copy", link_and_change)
    refused(
        checkpoints, folder, exceptions.CheckpointError, "checkpoint-1: changed while it was saved: .*has written all"
    )


def test_a_staged_file_that_another_program_removes_is_not_committed(checkpoints, folder, monkeypatch):
    real = folder_content.upload

    def remove_first(staged, *given, **named):
        removed(staged)
        return real(staged, *given, **named)

    monkeypatch.setattr(folder_content, "upload", remove_first)
    refused(checkpoints, folder, exceptions.CheckpointError, "changed while it was saved: sub/b.bin")


@pytest.mark.parametrize("moment", ["sha256_of", "upload"])
def test_a_file_that_is_rewritten_in_place_is_not_committed(checkpoints, folder, moment, monkeypatch):
    real = getattr(folder_content, moment)

    def change_first(*given, **named):
        written_in_place(folder)
        return real(*given, **named)

    monkeypatch.setattr(folder_content, moment, change_first)
    refused(checkpoints, folder, exceptions.CheckpointError, "changed while it was saved: a.bin")


def test_files_that_appear_after_a_save_began_are_not_saved(checkpoints, folder, tmp_path, monkeypatch):
    real = folder_content.upload

    def add_first(*given, **named):
        added(folder)
        return real(*given, **named)

    monkeypatch.setattr(folder_content, "upload", add_first)
    checkpoints.save(1, folder)
    checkpoints.restore(1, tmp_path / "restored")
    assert sorted(path.name for path in (tmp_path / "restored").rglob("*.bin")) == ["a.bin", "b.bin"]


def seen(*files, host="one"):
    return host, {name: (1, inode, size, 0) for name, inode, size in files}


NAMES = st.sampled_from(["a", "b/c", "b/d", "e/f/g", "h"])
SIZES = st.integers(0, 1000)


@given(st.lists(st.dictionaries(NAMES, st.just(None)), min_size=1, max_size=5), st.dictionaries(NAMES, SIZES))
def test_each_file_is_sent_once_by_a_rank_that_has_it(files_of_ranks, sizes):
    ranks = [seen(*((name, hash(name), sizes.get(name, 1)) for name in files)) for files in files_of_ranks]
    senders = _senders(ranks)
    assert senders.keys() == {name for files in files_of_ranks for name in files}
    assert all(name in ranks[rank][1] for name, rank in senders.items())


def test_ranks_that_have_the_same_files_send_about_as_many_bytes():
    sizes = [100, 60, 50, 40, 10, *[0] * 10]
    files = seen(*((f"{number}", number, size) for number, size in enumerate(sizes)))
    senders = _senders([files, files])
    sent = [[sizes[int(name)] for name, rank in senders.items() if rank == each] for each in (0, 1)]
    assert sent == [[100, 40], [60, 50, 10, *[0] * 10]]


def test_ranks_that_have_the_same_empty_files_send_equally_many():
    files = seen(*((f"{number}", number, 0) for number in range(10)))
    assert collections.Counter(_senders([files, files]).values()) == {0: 5, 1: 5}


def test_a_file_of_another_machine_is_a_copy_if_it_has_the_same_size():
    first, second = seen(("a", 1, 5)), seen(("a", 2, 5), ("b", 3, 1), host="two")
    assert _senders([first, second]) == {"a": 0, "b": 1}


def test_ranks_of_machines_with_one_file_system_share_its_files():
    def on(machine):
        return machine, {"a": (len(machine), 1, 5, 7), "b": (len(machine), 2, 5, 7)}

    assert sorted(_senders([on("one"), on("three")]).values()) == [0, 1]


@pytest.mark.parametrize(
    ("ranks", "match"),
    [
        ([seen(("a", 1, 5)), seen(("a", 2, 5))], r"'a' is another file on rank 1 \(5 bytes\) than on rank 0"),
        (
            [seen(("a", 1, 5)), seen(), seen(("a", 2, 6), host="two")],
            r"on rank 2 \(6 bytes\) than on rank 0 \(5 bytes\)",
        ),
        ([seen(("a", 1, 5)), seen(("a/b/c", 2, 5))], "'a' is a file on one rank, and a folder on another one"),
    ],
    ids=["one machine", "another size", "a folder"],
)
def test_ranks_with_different_files_of_one_name_are_refused(ranks, match):
    with pytest.raises(exceptions.CheckpointError, match=match):
        _senders(ranks)
