"""Records of saves may have been written by anybody: a sweep deletes nothing that the save of a record did not write."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.prefetching import eventually
from torchobj import Store, StoreConfig, exceptions
from torchobj.checkpoint import StorageReader, StorageWriter, sweep
from torchobj.checkpoint.dcp import attempt
from torchobj.checkpoint.dcp.attempt import Record, record_of_file
from torchobj.checkpoint.dcp.checkpoint_dir import CheckpointDir
from torchobj.checkpoint.dcp.manifest import Manifest, WrittenFile
from torchobj.checkpoint.dcp.prefix import RoundRobinPrefixStrategy
from torchobj.checkpoint.dcp.sweeping import sweep_expired
from torchobj.checkpoint.keys import is_canonical

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TOKEN = "0123456789ab"
#: Outside of the folder `run`, or not of the names that a save gives.
STRANGERS = {
    f"__0_{TOKEN}_0.distcp",
    f"run2/__0_{TOKEN}_0.distcp",
    f"victim/__0_{TOKEN}_0.distcp",
    f"runx__0_{TOKEN}_0.distcp",
    f"run/__0_{TOKEN}_0.txt",
    f"run/__0_{TOKEN}_x.distcp",
    f"run/__0_{TOKEN}_0.distcp.bak",
    "run/__0_0.distcp",
    "run/.metadata",
    "run/notes.txt",
}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        json.dumps({"format": 1, "files": ["__0_"]}),
        json.dumps({"format": 1, "files": f"../victim/__0_{TOKEN}_"}),
        json.dumps({"format": 1, "files": f"/__0_{TOKEN}_"}),
        json.dumps({"format": 1, "files": f"a//__0_{TOKEN}_"}),
        json.dumps({"format": 1, "files": f"a\\..\\__0_{TOKEN}_"}),
        json.dumps({"format": 1, "files": f"\ud800__0_{TOKEN}_"}),
        json.dumps({"format": 1, "files": "__0_"}),
        json.dumps({"format": 1, "files": "__0_ba9876543210_"}),
        json.dumps({"format": 1, "files": f"{'a/' * 600}__0_{TOKEN}_"}),
        json.dumps({"format": 2, "files": f"__0_{TOKEN}_"}),
        json.dumps({"format": 1, "files": f"__0_{TOKEN}_", "x": "x" * 10_000}),
    ],
    ids=lambda content: repr(content)[:50],
)
def test_a_record_that_no_save_wrote_deletes_nothing_and_is_logged(content, caplog):
    store = Store("memory://records-table")
    store.delete([info.key for info in store.list()])
    for key in STRANGERS:
        store.put(key, b"x")
    store.put(f"run/_torchobj_attempt_{TOKEN}.json", content if isinstance(content, bytes) else content.encode())
    assert sweep("memory://records-table/run", older_than_s=0) == []
    assert "is not a record of a save" in caplog.text
    assert {info.key for info in store.list()} > STRANGERS


class Killed(StorageWriter):
    """Ends before the checkpoint is made, as a process that is killed."""

    def finish(self, metadata, results):
        pass


def test_a_record_that_names_files_of_a_checkpoint_below_deletes_none_of_them():
    store, url = Store("memory://records-below"), "memory://records-below/run"
    for kind, folder in ((StorageWriter, "step-1"), (Killed, "step-2")):
        dcp.save({"weight": torch.ones(9)}, storage_writer=kind(f"{url}/{folder}"))
    before, planted = {info.key for info in store.list()}, set()
    for key in before:
        record = record_of_file(key.removeprefix("run/"))
        if record is not None:
            planted.add(record.name)
            store.put(f"run/{record.name}", record.dump())
    assert len(planted) == 2
    assert set(swept_directly(url)) == planted
    assert {info.key for info in store.list()} == before


def swept_directly(url):
    """Sweeps the records of one folder, not of those below."""
    folder = CheckpointDir(url, StoreConfig())
    records = folder.objects("_torchobj_attempt_")
    return sweep_expired(folder, records, max(info.last_modified for info in records), 0)


def test_a_manifest_deletes_no_files_that_are_named_or_that_no_save_wrote():
    store, url = Store("memory://records-manifest"), "memory://records-manifest/run"
    dcp.save({"weight": torch.ones(9)}, storage_writer=StorageWriter(url))
    dcp.save({"weight": torch.ones(9)}, storage_writer=Killed(f"{url}/below"))
    own = next(info.key for info in store.list() if info.key.endswith(".distcp") and "below" not in info.key)
    place = CheckpointDir(url, StoreConfig())
    save_id = Manifest.load(place.get("_torchobj_manifest.json"), "u").save_id
    for key in STRANGERS - {"run/.metadata"}:
        store.put(key, b"x")
    store.put(f"run/__5_{TOKEN}_0.distcp", b"replaced")
    names = [info.key for info in store.list()]
    replaced = [name.removeprefix("run/") for name in names] + [f"../{name}" for name in names]
    written = WrittenFile(own.removeprefix("run/"), 5, None, 5)
    store.put("run/_torchobj_manifest.json", Manifest(save_id, (written,), tuple(replaced)).dump())
    record = record_of_file(written.name)
    store.put(f"run/{record.name}", record.dump())
    # The only one that a save wrote and that nothing names.
    gone = {f"__0_{TOKEN}_0.distcp", f"__5_{TOKEN}_0.distcp", record.name}
    assert set(swept_directly(url)) == gone - {f"__0_{TOKEN}_0.distcp"}
    found = {"weight": torch.zeros(9)}
    dcp.load(found, storage_reader=StorageReader(url))
    assert {info.key for info in store.list()} == set(names) - {f"run/__5_{TOKEN}_0.distcp"}


PARTS = st.sampled_from(
    ["", ".", "..", "run", "victim", "below", "\\", "..\\victim", "\0", "__0_", "\n", "*", "%2e%2e"]
)
BEGINNINGS = st.lists(PARTS, max_size=6).map("/".join).map(lambda start: f"{start}{TOKEN}_")
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)


@given(
    st.builds(dict, format=st.just(1) | JSON, files=BEGINNINGS | st.text() | JSON, swept=st.booleans() | JSON) | JSON
)
@example({"format": 1, "files": f"../victim/__0_{TOKEN}_"})
@example({"format": 1, "files": f"below/__0_{TOKEN}_"})
@example({"format": 1, "files": f"__0_{TOKEN}_", "swept": True})
def test_no_record_deletes_what_no_save_of_this_folder_wrote(content):
    store = Store("memory://records-property")
    store.delete([info.key for info in store.list()])
    below = {f"run/below/__0_{TOKEN}_0.distcp", "run/below/.metadata"}
    for key in STRANGERS | below:
        store.put(key, f"names __0_{TOKEN}_0.distcp".encode() if key == "run/below/.metadata" else b"x")
    store.put(f"run/_torchobj_attempt_{TOKEN}.json", json.dumps(content).encode())
    sweep("memory://records-property/run", older_than_s=0)
    left = {info.key for info in store.list()}
    assert STRANGERS | below <= left
    assert len(left - STRANGERS - below) <= 1


@given(st.text(max_size=8).filter(lambda prefix: is_canonical(f"{prefix}_")), st.integers(0, 50))
def test_a_record_owns_the_files_of_its_save_and_is_read_as_it_was_written(prefix, number):
    record, other = Record.new(prefix), Record.new(prefix)
    assert record.owns(record.file(number))
    assert not other.owns(record.file(number))
    for written in (record, record._replace(is_swept=True)):
        assert Record.load(written.dump(), record.name, "u") == written
    assert record_of_file(record.file(number)) == record


@pytest.mark.parametrize("url", ["", "run", "/tmp/run", "az://b/x", "file:///", 5, None])
def test_a_sweep_wants_the_url_of_a_folder(url):
    with pytest.raises(exceptions.ConfigError):
        sweep(url)


@pytest.mark.parametrize("age", [-1, float("nan"), float("inf"), "1", None, True])
def test_a_sweep_wants_an_age(age):
    with pytest.raises(exceptions.ConfigError, match="older_than_s"):
        sweep("memory://records-ages/x", older_than_s=age)


def test_a_renewal_does_not_undo_the_mark_of_a_sweep(monkeypatch):
    monkeypatch.setattr(attempt, "_RENEWAL_INTERVAL_S", 0.001)
    record = Record.new("__0_")
    marked = record._replace(is_swept=True).dump()

    class Raced(CheckpointDir):
        finds = 0

        def find(self, name):
            found = super().find(name)
            self.store.put(self.key(name), marked)
            self.finds += 1
            return found

    place = Raced("memory://renewal/run", StoreConfig())
    with attempt.running(place, record):
        assert eventually(lambda: place.finds > 0)
    assert place.get(record.name) == marked


@pytest.mark.parametrize("prefix", ["a//b", "../a", "./a", "a\\b", "/a", "a/.."])
def test_a_prefix_strategy_that_leads_out_of_the_folder_is_refused_before_anything_is_written(prefix):
    writer = StorageWriter("memory://prefixes/run", prefix_strategy=RoundRobinPrefixStrategy([prefix]))
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.ones(4)}, storage_writer=writer)
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, exceptions.ConfigError)
    assert "prefix_strategy: the prefix" in str(error)
    assert list(Store("memory://prefixes").list("")) == []
