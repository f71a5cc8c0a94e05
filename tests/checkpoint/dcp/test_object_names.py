"""Names of files may have been chosen by anybody: a sweep deletes nothing that no save of the folder could have written."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import torchobj.s3torchconnector.dcp
from torchobj import Store, exceptions
from torchobj.checkpoint import StorageReader, StorageWriter, sweep
from torchobj.checkpoint.checkpoint_dir import is_canonical
from torchobj.checkpoint.dcp.object_names import FileNames, attempt_of, is_metadata, ranked
from torchobj.checkpoint.leftovers import Attempt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

#: Of a file in the checkpoint's folder, and of one in a folder of the folder.
TOKEN, TOKEN_BELOW = "tobj0000123456789ab", "tobj0010123456789ab"
#: Outside of the folder `run`, or not of the names that a save gives.
STRANGERS = {
    f"__0_{TOKEN}_0.distcp",
    f"run2/__0_{TOKEN}_0.distcp",
    f"victim/__0_{TOKEN}_0.distcp",
    f"runx__0_{TOKEN}_0.distcp",
    f"run/__0_{TOKEN}_0.txt",
    f"run/__0_{TOKEN}_x.distcp",
    f"run/__0_{TOKEN}_0.distcp.bak",
    # Of a checkpoint in the folder above.
    f"run/__0_{TOKEN_BELOW}_0.distcp",
    f"run/below/__0_tobjfff{TOKEN[7:]}_0.distcp",
    "run/__0_0.distcp",
    "run/__0_0123456789ab_0.distcp",
    "run/shard_000000000000123_0.distcp",
    f"run/__0_{TOKEN.upper()}_0.distcp",
    f"run/__0_{TOKEN}0.distcp",
    f"run/__0_{TOKEN}_0123456789.distcp",
    "run/.metadata",
    "run/notes.txt",
}


def planted(name, keys=STRANGERS):
    store = Store(f"memory://{name}")
    store.delete([info.key for info in store.list()])
    for key in keys:
        store.put(key, b"x")
    return store


def keys_of(store):
    return {info.key for info in store.list()}


def test_files_that_no_save_of_the_folder_wrote_are_not_swept():
    store = planted("names-table")
    assert sweep(f"{store.url}/run", older_than_s=0) == []
    assert keys_of(store) == STRANGERS
    store.put(f"run/__0_{TOKEN}_0.distcp", b"x")
    store.put(f"run/below/__0_{TOKEN_BELOW}_0.distcp", b"x")
    assert len(sweep(f"{store.url}/run", older_than_s=0)) == 2
    assert keys_of(store) == STRANGERS


class Killed(StorageWriter):
    """Ends before the checkpoint is made, as a process that is killed."""

    def finish(self, metadata, results):
        pass


@pytest.mark.parametrize("strategy", [None, torchobj.s3torchconnector.dcp.RoundRobinPrefixStrategy(["a/b", "c"])])
def test_a_sweep_of_any_folder_above_or_below_keeps_what_metadata_names(strategy):
    store, url = planted("names-folders", ()), "memory://names-folders/run/x"
    dcp.save({"weight": torch.ones(9)}, storage_writer=StorageWriter(url, prefix_strategy=strategy))
    before = keys_of(store)
    dcp.save({"weight": torch.ones(9)}, storage_writer=Killed(url, prefix_strategy=strategy))
    [left] = keys_of(store) - before
    for folder in ("run/x/a/b", "run/x/a", "run/x/a/b/x"):
        assert sweep(f"{store.url}/{folder}", older_than_s=0) == []
    for folder in ("run/x", "run", ""):
        store.put(left, b"x")
        assert sweep(f"{store.url}/{folder}", older_than_s=0) == [f"{store.url}/{left}"]
    assert keys_of(store) == before
    found = {"weight": torch.zeros(9)}
    dcp.load(found, storage_reader=StorageReader(url))
    assert torch.equal(found["weight"], torch.ones(9))


@pytest.mark.parametrize("metadata", [".metadata", "__0.metadata", "__12.metadata"])
@pytest.mark.parametrize("names_it", [True, False])
def test_metadata_that_cannot_be_read_keeps_the_files_whose_token_it_contains(metadata, names_it):
    file = f"run/__0_{TOKEN}_0.distcp"
    store = planted("names-metadata", {file, f"run/x{metadata}", f"run/below/{metadata}"})
    store.put(f"run/{metadata}", file.encode() if names_it else b"damaged")
    assert len(sweep(f"{store.url}/run", older_than_s=0)) == (0 if names_it else 1)
    assert (file in keys_of(store)) == names_it


@pytest.mark.parametrize("rank", [None, 0, 7, 1000])
def test_metadata_of_a_rank_is_recognised_by_its_name(rank):
    name = ranked(".metadata", rank)
    assert is_metadata(name)
    assert not any(map(is_metadata, (f"x{name}", f"{name}x", f"x/{name}", "__.metadata", "__x.metadata")))


PARTS = st.sampled_from(
    ["", ".", "..", "run", "victim", "below", "\\", "..\\victim", "__0_", "\n", "*", "%2e%2e", "_0.distcp", ".distcp"]
)
DEPTHS = st.sampled_from(["000", "001", "002", "fff", "0", "-01", "\u0660\u0660\u0660"])
NAMES = st.lists(PARTS, max_size=6).map("/".join)
FILES = st.builds(lambda start, depth, end: f"{start}{depth}{TOKEN[3:]}{end}", NAMES, DEPTHS, PARTS)


@given(st.lists(FILES | NAMES, max_size=4))
@example([f"../victim/__0_{TOKEN}_0.distcp"])
@example([f"below/__0_{TOKEN}_0.distcp"])
def test_no_name_deletes_what_no_save_of_this_folder_wrote(names):
    below = {f"run/below/__0_{TOKEN}_0.distcp", "run/below/.metadata"}
    store = planted("names-property", STRANGERS | below)
    store.put("run/below/.metadata", f"names __0_{TOKEN}_0.distcp".encode())
    given = {f"run/{name}" for name in names if is_canonical(f"run/{name}")}
    for key in given:
        store.put(key, b"x")
    store.put("run/below/.metadata", f"names __0_{TOKEN}_0.distcp".encode())
    sweep("memory://names-property/run", older_than_s=0)
    left = keys_of(store)
    assert STRANGERS | below <= left
    owned = {key for key in given if attempt_of(key.removeprefix("run/")) is not None}
    assert given - owned <= left


@given(st.text(max_size=8).filter(lambda prefix: is_canonical(f"{prefix}_")), st.integers(0, 50))
def test_a_name_tells_the_folder_and_the_token_of_its_save(prefix, number):
    names, other = FileNames(prefix), FileNames(prefix)
    file = names.file(number)
    assert attempt_of(file) == names.attempt
    assert attempt_of(f"run/x/{file}") == Attempt("run/x/", names.attempt.nonce)
    assert attempt_of(other.file(number)) != attempt_of(file)
    inner = file.partition("/")[2]
    assert not inner or attempt_of(inner) is None


@pytest.mark.parametrize("url", ["", "run", "/tmp/run", "az://b/x", "file:///", 5, None])
def test_a_sweep_wants_the_url_of_a_folder(url):
    with pytest.raises(exceptions.ConfigError):
        sweep(url)


@pytest.mark.parametrize("age", [-1, float("nan"), float("inf"), "1", None, True])
def test_a_sweep_wants_an_age(age):
    with pytest.raises(exceptions.ConfigError, match="older_than_s"):
        sweep("memory://records-ages/x", older_than_s=age)


@pytest.mark.parametrize("prefix", ["a//b", "../a", "./a", "a\\b", "/a", "a/.."])
def test_a_prefix_strategy_that_leads_out_of_the_folder_is_refused_before_anything_is_written(prefix):
    writer = StorageWriter(
        "memory://prefixes/run", prefix_strategy=torchobj.s3torchconnector.dcp.RoundRobinPrefixStrategy([prefix])
    )
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": torch.ones(4)}, storage_writer=writer)
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, exceptions.ConfigError)
    assert "prefix_strategy: the prefix" in str(error)
    assert list(Store("memory://prefixes").list("")) == []
