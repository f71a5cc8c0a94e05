"""What `remove_checkpoint` deletes: what a key or a checkpoint's metadata names, and nothing else of a folder."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import torchobj
from torchobj import exceptions
from torchobj.checkpoint import StorageWriter
from torchobj.lightning import ObjectCheckpointIO
from torchobj.s3torchconnector.lightning import S3LightningCheckpoint

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

#: Each is, in the test below, the current directory, or a folder or bucket above it.
NAMELESS = {
    "an empty str": "",
    "an empty Path": Path(),
    "here": ".",
    "here by a detour": "inner/..",
    "above": "..",
    "the root": "/",
    "the root as a URL": "file:///",
    "the root as a URL with slashes": "file:////",
    "home": "~home",
}


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def files(tmp_path, tmp_path_factory, monkeypatch):
    """A current directory with files, in a folder with others."""
    # Lightning imports it, and its first import writes there.
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
    here = tmp_path / "data" / "work"
    (here / "inner").mkdir(parents=True)
    for name in ("data/other", "data/work/train.py", "data/work/inner/results.csv"):
        (tmp_path / name).write_text("precious")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "data"))
    return tmp_path


@pytest.mark.parametrize("path", NAMELESS.values(), ids=NAMELESS.keys())
def test_a_path_that_names_no_checkpoint_is_refused_before_anything_is_deleted(files, path):
    before = tree(files)
    path = str(files / "data") if path == "~home" else path
    with pytest.raises(exceptions.ConfigError, match="names no object|nothing was deleted"):
        ObjectCheckpointIO().remove_checkpoint(path)
    assert tree(files) == before


@pytest.mark.parametrize("as_path", [str, Path])
@pytest.mark.parametrize(
    "path",
    [
        "~",
        "~/",
        "~/x/..",
        "~root",
        "file:~",
        "file:~/",
        "file:..",
        "file:.",
        "local:..",
        "local:~",
        "local:",
        "file:",
        "simplecache::.",
        "x::file:~",
        "..::x",
        "data:x",
        "zip:x",
        "C:/x",
        "inner/../..",
        "./..",
        "link",
    ],
)
def test_what_fsspec_reads_otherwise_than_a_path_is_not_deleted(files, path, as_path, monkeypatch):
    deleted = []
    monkeypatch.setattr(shutil, "rmtree", lambda folder, *_, **__: deleted.append(folder))
    Path("link").symlink_to("..")
    before = tree(files)
    with pytest.raises(exceptions.ConfigError, match="nothing was deleted"):
        ObjectCheckpointIO().remove_checkpoint(as_path(path))
    assert not deleted
    assert tree(files) == before


@pytest.mark.parametrize("path", ["", Path(), ".", "work/x.ckpt", Path("x.ckpt"), "file:///x.ckpt", "memory://b/x"])
def test_the_class_of_s3torchconnector_takes_s3_urls_only(files, path):
    plugin = S3LightningCheckpoint()
    calls = (plugin.load_checkpoint, plugin.remove_checkpoint, lambda path: plugin.save_checkpoint({}, path))
    for call in calls:
        with pytest.raises(exceptions.ConfigError, match="s3://"):
            call(path)
    assert len(tree(files)) == 6


def test_a_path_of_this_machine_is_left_to_lightnings_own_plugin(files):
    plugin = ObjectCheckpointIO()
    plugin.save_checkpoint({"weight": torch.ones(3)}, "run/x.ckpt")
    assert torch.equal(plugin.load_checkpoint(Path("run/x.ckpt"))["weight"], torch.ones(3))
    plugin.remove_checkpoint("run/x.ckpt")
    assert tree(files / "data/work") == ["inner", "inner/results.csv", "run", "train.py"]
    # A sharded checkpoint of Lightning is a folder.
    Path("run/sharded").mkdir()
    Path("run/sharded/.metadata").touch()
    plugin.remove_checkpoint(Path("run/sharded"))
    assert tree(files / "data/work/run") == []


def test_a_deleted_file_leaves_the_folders_above_it(files):
    for folder in ("deep/er", "inner/empty"):
        (files / "data/work" / folder).mkdir(parents=True)
    url = f"file://{files}/data/work"
    plugin = ObjectCheckpointIO()
    plugin.save_checkpoint({}, f"{url}/deep/er/x.ckpt")
    plugin.remove_checkpoint(f"{url}/deep/er/x.ckpt")
    torchobj.Store(url).put("inner/empty/x", b"x")
    torchobj.Store(url).delete("inner/empty/x")
    assert tree(files / "data/work") == ["deep", "deep/er", "inner", "inner/empty", "inner/results.csv", "train.py"]


@pytest.mark.parametrize("scheme", ["s3", "file", "memory"])
def test_of_a_folder_what_its_metadata_names_is_deleted_and_nothing_else(scheme, bucket, tmp_path, caplog):
    base = {"s3": bucket.url, "file": f"file://{tmp_path}", "memory": "memory://removal"}[scheme]
    config = bucket.config if scheme == "s3" else None
    store = torchobj.Store(base, config=config)
    for folder in ("one", "two", "three"):
        writer = StorageWriter(f"{base}/{folder}", config=config)
        dcp.save({"weight": torch.ones(3), "step": 3}, storage_writer=writer, no_dist=True)
        store.put(f"{folder}/notes.txt", b"precious")
    store.put("one 2", b"precious")
    # As torchobj wrote it before.
    store.put("two/_torchobj_manifest.json", b"{}")
    plugin = ObjectCheckpointIO(config=config)
    for folder in ("one/", "two", "never was", "notes"):
        plugin.remove_checkpoint(f"{base}/{folder}")
    left = {info.key for info in store.list()}
    assert {key for key in left if not key.startswith("three/")} == {
        *("one 2", "one/notes.txt", "two/notes.txt", "two/_torchobj_manifest.json")
    }
    assert len([key for key in left if key.startswith("three/")]) == 3
    assert "none of the objects" not in caplog.text
    plugin.remove_checkpoint(f"{base}/one")
    assert "one is not a checkpoint: none of the objects" in caplog.text
    assert {info.key for info in store.list()} == left


def test_a_folder_whose_metadata_cannot_be_read_is_not_touched():
    store = torchobj.Store("memory://damaged-removal")
    for key in ("run/.metadata", "run/0.distcp", "run/x"):
        store.put(key, b"x")
    with pytest.raises(exceptions.CheckpointError, match="memory://damaged-removal/run/.metadata"):
        ObjectCheckpointIO().remove_checkpoint("memory://damaged-removal/run")
    assert len(list(store.list())) == 3


@pytest.mark.parametrize(
    "name", ["../victim.distcp", "/victim.distcp", "a/../../victim.distcp", "..\\victim.distcp", "victim", ".", ""]
)
def test_what_hostile_metadata_names_outside_of_its_folder_stays(name, tmp_path, caplog):
    for base in (f"file://{tmp_path}", "memory://hostile"):
        store = torchobj.Store(base)
        for key in ("victim", "victim.distcp", "run/victim"):
            store.put(key, b"precious")
        metadata = Metadata({}, storage_data={MetadataIndex("x"): _StorageInfo(name, 0, 1)})
        store.put("run/.metadata", pickle.dumps(metadata))
        ObjectCheckpointIO().remove_checkpoint(f"{base}/run")
        assert {info.key for info in store.list()} >= {"victim", "victim.distcp", "run/victim"}
    assert "not deleted" in caplog.text
