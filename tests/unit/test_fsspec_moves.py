"""Moving objects and folders: the checks that fsspec's suite makes on `mv` with local files."""

import pytest

from torchobj import exceptions
from torchobj.fsspec import ObjectFileSystem


class InMemory(ObjectFileSystem):
    protocol = "memory"


@pytest.fixture
def files():
    files = InMemory()
    files.pipe({"moves/a": b"a", "moves/deep/b": b"b", "moves/deep/er/c": b"c"})
    yield files
    for path in files.find("moves"):
        files.rm(path)


def test_a_file_is_moved_with_its_content_to_a_name_and_into_a_folder(files):
    files.mv("moves/a", "moves/renamed")
    assert not files.exists("moves/a")
    assert files.cat("moves/renamed") == b"a"
    files.mv("moves/renamed", "moves/deep/")
    assert files.cat("moves/deep/renamed") == b"a"
    assert len(files.find("moves")) == 3


@pytest.mark.parametrize("recursive", [False, True])
def test_a_failed_move_removes_nothing_and_leaves_nothing_at_its_destination(files, recursive, monkeypatch):
    def refuse(*_, **__):
        raise exceptions.AccessDeniedError("copy memory://moves/x: 403")

    monkeypatch.setattr(InMemory, "cp_file", refuse)
    with pytest.raises(PermissionError):
        files.mv("moves/deep" if recursive else "moves/a", "moves/elsewhere", recursive=recursive)
    assert files.find("moves") == ["moves/a", "moves/deep/b", "moves/deep/er/c"]


@pytest.mark.parametrize("recursive", [False, True])
def test_moving_a_missing_object_is_an_error(files, recursive):
    with pytest.raises(FileNotFoundError):
        files.mv("moves/missing", "moves/elsewhere", recursive=recursive)
    assert not files.exists("moves/elsewhere")


def test_a_move_onto_itself_keeps_the_object(files):
    files.mv("moves/a", "moves/a")
    assert files.cat("moves/a") == b"a"


def test_a_folder_is_moved_with_its_contents_and_a_move_replaces_the_destination(files):
    files.mv("moves/deep", "moves/other", recursive=True)
    assert files.find("moves") == ["moves/a", "moves/other/b", "moves/other/er/c"]
    files.mv("moves/a", "moves/other/b")
    assert files.cat("moves/other/b") == b"a"
    assert not files.exists("moves/a")
