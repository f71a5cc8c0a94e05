"""Sources and targets are those of the file system in memory of fsspec."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import torchobj
from tests.support.file_systems import InMemory

KEYS = ("ord/a", "ord/s/b")


@pytest.fixture
def both():
    """A file system of torchobj and that of fsspec, with the same objects."""
    store = torchobj.Store("memory://fsspec-targets")
    store.delete([info.key for info in store.list()])
    oracle = MemoryFileSystem()
    for key in KEYS:
        store.put(key, key.encode())
        oracle.pipe(f"/fsspec-targets/{key}", key.encode())
    yield InMemory(), oracle
    oracle.rm("/fsspec-targets", recursive=True)


def tree(folder):
    """The files and folders below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("is_existing", [True, False])
@pytest.mark.parametrize("target", ["fd/d", "fd/d/", "./fd/d", "fd/../fd/d/", "d", "d/", ".", "ABSOLUTE", "ABSOLUTE/"])
@pytest.mark.parametrize("source", ["ord", "ord/", "ord/*", "ord/a"])
def test_a_download_to_a_target_writes_what_fsspec_writes(both, tmp_path, monkeypatch, source, target, is_existing):
    written = []
    for number, files in enumerate(both):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        named = target.replace("ABSOLUTE", f"{folder}/deep/d")
        # The first part exists, because the path of a missing folder with `..` does not.
        (folder / "fd").mkdir()
        if is_existing:
            (folder / named).mkdir(parents=True, exist_ok=True)
        files.get(
            f"fsspec-targets/{source}" if files is both[0] else f"/fsspec-targets/{source}",
            named,
            recursive=source != "ord/a",
        )
        written.append(tree(folder))
    assert written[0] == written[1]
    assert [content for content in written[0].values() if content]


def test_a_target_in_the_home_folder_and_one_that_is_a_path_are_downloaded_to(both, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    both[0].get("fsspec-targets/ord", "~/d", recursive=True)
    both[0].get("fsspec-targets/ord", tmp_path / "e", recursive=True)
    expected = {"a": b"ord/a", "s": None, "s/b": b"ord/s/b"}
    assert tree(tmp_path / "d") == tree(tmp_path / "e") == expected


@pytest.mark.parametrize("recursive", [True, False])
@pytest.mark.parametrize("source", ["data", "data/*", "data/l*", ["data/a", "data/link"]])
def test_links_to_folders_are_uploaded_as_by_fsspec(both, tmp_path, source, recursive):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "k").write_bytes(b"k")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"a")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real")
    named = [f"{tmp_path}/{each}" for each in ([source] if isinstance(source, str) else source)]
    written = []
    for files, bucket in zip(both, ("fsspec-targets", "/fsspec-targets"), strict=True):
        files.put(named[0] if isinstance(source, str) else named, f"{bucket}/up/", recursive=recursive)
        found = files.find(f"{bucket}/up")
        written.append({name.strip("/"): files.cat_file(name) for name in found})
    assert written[0] == written[1]


def test_another_number_of_targets_than_of_paths_is_an_error(both, tmp_path):
    with pytest.raises(torchobj.exceptions.ConfigError, match="1 targets for 2 paths: pass one target for each path"):
        both[0].get(["fsspec-targets/ord/a", "fsspec-targets/ord/s/b"], [str(tmp_path / "a")])
    assert list(tmp_path.iterdir()) == []


def test_a_local_pattern_without_files_is_no_error_of_a_store(both, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder is selected") as raised:
        both[0].put(f"{tmp_path}/none*", "fsspec-targets/up")
    assert not isinstance(raised.value, torchobj.StoreError)
