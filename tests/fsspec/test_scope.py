"""Which objects the methods of the fsspec file system touch: blocks read, prefixes found, objects removed."""

import pytest
from fsspec.callbacks import Callback

import torchobj
from torchobj import exceptions

BUCKET = "scope"


def fill(files, *names):
    for name in names:
        files.pipe(f"scope/{name}", name.encode())


def test_a_block_is_read_up_to_its_delimiters(files):
    files.pipe("scope/k", b"Alice, 100\nBob, 200\nCharlie, 300")
    assert files.read_block("scope/k", 0, 13) == b"Alice, 100\nBo"
    assert files.read_block("scope/k", 0, 13, delimiter=b"\n") == b"Alice, 100\nBob, 200\n"
    assert files.read_block("scope/k", 5, None, delimiter=b"\n") == b"Bob, 200\nCharlie, 300"
    assert files.read_block("scope/k", 30, 100) == b"00"


class Counted(Callback):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def set_size(self, size):
        self.sizes.append(size)
        super().set_size(size)


def test_transfer_callbacks_receive_the_total(files, tmp_path):
    (tmp_path / "up").write_bytes(b"x" * 5_000_000)
    for transfer in (
        lambda told: files.put_file(tmp_path / "up", "scope/k", callback=told),
        lambda told: files.get_file("scope/k", tmp_path / "down", callback=told),
    ):
        told = Counted()
        transfer(told)
        assert (told.sizes, told.size, told.value) == ([5_000_000], 5_000_000, 5_000_000)
    assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()


def test_a_reader_has_the_size_of_its_object_without_moving(files):
    files.pipe("scope/k", b"0123456789")
    with files.open("scope/k") as file:
        assert (file.size, file.tell(), file.read(3), file.size) == (10, 0, b"012", 10)
    with pytest.raises(ValueError, match="closed"):
        _ = file.size
    with files.open("scope/no") as file, pytest.raises(FileNotFoundError):
        _ = file.size


def test_find_returns_all_keys_with_the_prefix(files):
    fill(files, "a/x1", "a/x2/y", "a/z", "ab/x1")
    for folder in ("scope/a", "scope/a/", "memory://scope/a"):
        assert files.find(folder, prefix="x") == ["scope/a/x1", "scope/a/x2/y"]
    assert files.find("scope", prefix="a/x") == ["scope/a/x1", "scope/a/x2/y"]
    assert files.find("scope/a", prefix="no") == []
    found = files.find("scope/a", detail=True, prefix="z")
    assert {name: entry["size"] for name, entry in found.items()} == {"scope/a/z": 3}
    for settings in ({"maxdepth": 1}, {"withdirs": True}):
        with pytest.raises(exceptions.ConfigError, match="prefix="):
            files.find("scope", prefix="a", **settings)


def test_find_makes_one_listing(files, monkeypatch):
    fill(files, "a/x", "a/b/y", "a/b/c/z", "k")
    torchobj.Store("memory://scope").put("a/b/", b"")
    listings, listed = [], torchobj.Store.list
    monkeypatch.setattr(torchobj.Store, "list", lambda *given: listings.append(given) or listed(*given))
    assert files.find("scope/a") == ["scope/a/b/c/z", "scope/a/b/y", "scope/a/x"]
    assert len(listings) == 1
    assert files.find("scope/k") == ["scope/k"]
    assert files.find("scope/a", maxdepth=1) == ["scope/a/x"]
    assert files.find("scope/a", withdirs=True) == [
        "scope/a", "scope/a/b", "scope/a/b/c", "scope/a/b/c/z", "scope/a/b/y", "scope/a/x"
    ]  # fmt: skip


def test_a_failed_listing_is_not_reported_as_empty(files, monkeypatch):
    fill(files, "a/x")

    def denied(*_):
        raise exceptions.AccessDeniedError("403")

    monkeypatch.setattr(torchobj.Store, "list", denied)
    with pytest.raises(PermissionError):
        files.find("scope/a")
    with pytest.raises(PermissionError):
        files.rm("scope/a", recursive=True)


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("path", ["", "/", "memory://", "scope", "scope/", "memory://scope", ["scope/a/x", "scope"]])
def test_removing_a_whole_bucket_is_refused(files, path, recursive):
    fill(files, "a/x", "k")
    for remove in (files.rm, files.delete):
        with pytest.raises(exceptions.UnsupportedError):
            remove(path, recursive=recursive)
    with pytest.raises((exceptions.UnsupportedError, exceptions.InvalidKeyError, FileNotFoundError)):
        files.rm_file(path if isinstance(path, str) else path[1])
    assert files.find("scope") == ["scope/a/x", "scope/k"]


def test_moving_a_bucket_deletes_nothing(files):
    fill(files, "a/x")
    with pytest.raises(exceptions.UnsupportedError):
        files.mv("scope", "elsewhere/copy", recursive=True)
    assert files.find("scope") == ["scope/a/x"]


def test_only_the_named_folder_is_removed_and_only_with_recursive(files):
    fill(files, "a/x", "a/b/y", "ab", "c")
    files.rm("scope/a")
    assert len(files.find("scope")) == 4
    files.rm("scope/a/*")
    assert files.find("scope") == ["scope/a/b/y", "scope/ab", "scope/c"]
    files.rm(["scope/a", "scope/c"], recursive=True)
    assert files.find("scope") == ["scope/ab"]
    with pytest.raises(FileNotFoundError):
        files.rm("scope/a", recursive=True)
