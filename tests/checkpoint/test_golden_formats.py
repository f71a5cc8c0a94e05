"""One of each format that commit ea84036 wrote loads: files, checkpoints, sets of objects, states and uploads."""

import json
import random
import shutil
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torchobj
from tests.golden.make_golden_formats import go_on, loaders, parts, serve_sets, streams, tensors
from tests.support.ranks import run_ranks
from torchobj.checkpoint import CheckpointManager, StorageReader

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
]

FORMATS = Path(__file__).parents[1] / "golden" / "formats" / "ea84036"


@pytest.fixture
def folder(tmp_path):
    """A copy, from which tests may delete."""
    return shutil.copytree(FORMATS, tmp_path / "formats")


def expected(name):
    return json.loads((FORMATS / name).read_text())


def assert_is_as_saved(found):
    assert found.keys() == tensors().keys()
    for name, value in tensors().items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


@pytest.mark.parametrize("name", ["saved.pt", "unsummed.pt"])
def test_a_file_is_loaded(folder, name):
    assert_is_as_saved(torchobj.load(f"file://{folder}/{name}"))


def test_a_distributed_checkpoint_is_loaded(folder):
    blank = {name: torch.zeros_like(value) if hasattr(value, "shape") else None for name, value in tensors().items()}
    dcp.load(blank, storage_reader=StorageReader(f"file://{folder}/dcp"))
    assert_is_as_saved(blank)


def restored(folder, sharded, rank=0, ranks=1):
    """The steps that a manager finds, and training resumed from them."""
    manager = CheckpointManager(f"file://{folder}", sharded=sharded)
    assert (manager.steps(), manager.latest(), manager.leftovers()) == ([1, 20], 20, [])
    assert manager.metrics(20) == {"loss": 0.25, "best": float("inf")}
    state = parts(rank, ranks)
    with torch.no_grad():
        state["model"].weight.zero_()
    manager.restore(into=state)
    assert state["epoch"] == 2
    assert state["optimizer"].state_dict()["state"][0]["step"] == 1
    drawn = [torch.rand(1).item(), random.random(), float(numpy.random.rand())]  # noqa: NPY002
    # Their iterators use the random generators.
    rest = {name: go_on(state[name]) for name in loaders()}
    return {"rest": rest, "drawn": drawn, "weight": state["model"].weight.tolist()}


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_steps_are_found_restored_and_deleted(folder, name):
    assert restored(folder / name, name == "sharded") == expected(f"{name}.json")
    manager = CheckpointManager(f"file://{folder}/{name}", keep_last=1, sharded=name == "sharded")
    manager.save(21, {"epoch": 3})
    assert (manager.steps(), manager.leftovers()) == ([21], [])
    assert [path.name.split("-")[0] for path in (folder / name / "steps").iterdir()] == [f"{21:012}"]


def of_rank(rank, folder, sharded):
    dist.init_process_group("gloo")
    return restored(folder, sharded, rank, 2)


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_resume_their_own_states(folder, sharded):
    found = run_ranks(of_rank, folder / "ranks" / ("sharded" if sharded else "whole"), sharded)
    for rank in range(2):
        assert found[rank] == expected(f"ranks/expected-{sharded}-{rank}.json")


@pytest.fixture(scope="module")
def sets():
    """The sets of objects, where they were when their states were saved."""
    serve_sets(FORMATS / "sets")


@pytest.mark.parametrize(("kind", "new"), [("loaders", loaders), ("streams", streams)])
def test_states_of_loaders_resume(kind, new, sets):
    states = torch.load(FORMATS / f"{kind}.pt", weights_only=True)
    found = new()
    assert found.keys() == states.keys()
    for name, loader in found.items():
        loader.load_state_dict(states[name])
    assert {name: go_on(loader) for name, loader in found.items()} == expected(f"{kind}.json")


def test_a_state_of_a_sampler_is_loaded():
    sampler, state = loaders()["elastic"].sampler, torch.load(FORMATS / "sampler.pt", weights_only=True)
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state


def test_a_manifest_and_the_indexes_of_shards_are_loaded():
    manifest = torchobj.Manifest.load(FORMATS / "sets" / "manifest.parquet")
    names = [manifest.url(index).rpartition("/")[2] for index in range(len(manifest))]
    assert names == [f"{number:02}.txt" for number in range(12)]
    for name, counts in (("index", [20, 20]), ("shards/00.tar.index", [20]), ("shards/01.tar.index", [20])):
        assert torchobj.shards.TarIndex.load(FORMATS / "sets" / f"{name}.parquet").counts() == counts


def test_an_unfinished_upload_is_found_and_aborted(folder):
    [name] = (folder / "unfinished").glob(".*.key")
    # It names its object by the path below the store's root, which was the root of the file system.
    assert name.read_text().endswith("/unfinished/object")
    name.write_text("object")
    store = torchobj.Store(f"file://{folder}/unfinished")
    [upload] = store.unfinished_uploads()
    assert upload.key == "object"
    store.abort_upload(upload)
    assert list((folder / "unfinished").iterdir()) == []
